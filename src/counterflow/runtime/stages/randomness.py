"""Random draws that do not depend on the schedule: a stream for each (seed, step, micro-batch, layer).

Invariant: what a layer draws for some samples depends on nothing else, so that it draws the same when it runs
a second time to recompute, by the engine or by the user's own checkpoint. For a whole micro-batch these are
the numbers that torch draws in one process. For a half they are the half's share of them, if the draws are
made value by value along the samples (dropout is); other draws, and those of compiled layers, come from a
stream of the half's own.

Streams are drawn from torch's default generators, which are seeded before each layer. What a layer draws
elsewhere (Python's or NumPy's random numbers, a generator of its own) is beyond its reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from ..messages.values import Value, number_of
from ..torch_private import TorchDispatchMode, keeps_statistics, saving_hooks, schema_of
from ..transport import TimedOut
from ..transport.turns import has_turn, process_lock, settle


class Rows(NamedTuple):
    """Samples ``start`` to ``stop`` of the ``samples`` of micro-batch ``micro_batch`` of all replicas."""

    micro_batch: int
    samples: int
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is the whole micro-batch."""
        return self.stop - self.start == self.samples


_NOTHING = nullcontext()

_BITS = 2**64 - 1

_UPDATES = {"optimizer": -1, "hooks": -2}
"""In the seeds of what makes an update, in the place of the micro-batch."""

_STEPS = 16
"""Of so many steps the base of the seeds is remembered: without a flush those of several are in use."""


class RandomStreams:
    """The streams of one run.

    Args:
        seed: the run's seed.
        device: where the layers run.
        shared: whether other workers are threads of this process.
        timeout_seconds: how long a thread waits for its turn.
    """

    def __init__(
        self, seed: int, device: torch.device, *, shared: bool = False, timeout_seconds: float = 300.0
    ) -> None:
        self.seed = seed
        self.device = device
        self.shared = shared
        self.timeout_seconds = timeout_seconds
        self._quiet: dict[int, bool] = {}
        """By layer, whether it drew nothing when it was watched, and may be run a second time."""
        self._drawing: _SharedDraws | None = None
        """What catches draws at the moment."""
        self.compiled = False
        """Whether layers go through ``torch.compile``: draws inside of them cannot be caught."""
        self._draws_again = False
        """Whether a layer has drawn for a half what a checkpoint of its own will draw again."""
        self._has_turn = False
        self._bases: dict[tuple[int, int], int] = {}
        """Of the seeds of a step's streams, by the run's seed (a load changes it) and step; the last few."""

    @cached_property
    def generators(self) -> list[torch.Generator]:
        """The generators that layers draw from."""
        found = [torch.default_generator]
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            torch.cuda.init()
            found.append(torch.cuda.default_generators[index])
        return found

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the user's own random state as it was."""
        generators = self.generators
        with self.turn():
            before = [generator.get_state() for generator in generators]
            try:
                yield
            finally:
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)

    def step(self) -> Any:
        """Around a step: keeps the user's random state, where that need not be done layer by layer."""
        return _NOTHING if self.shared else self.kept()

    def initial(self, layer: int) -> Any:
        """Around the initialisation of a layer's weights."""
        return self._seeded(number_of(self.seed, "weights", layer))

    def update(self, what: str, step: int, *of: int) -> Any:
        """Around what makes an update, which draws the same on all copies of a stage.

        Args:
            what: ``hooks`` of parameters, or the ``optimizer``.
            step: the number of the step whose mini-batch the update is of.
            of: the stage, or what else tells the weights.
        """
        key = self._key(step, _UPDATES[what], of[0])
        for more in of[1:]:
            key = self._mixed(key + more)
        if self.shared:
            return self._seeded(key)
        for generator in self.generators:
            generator.manual_seed(key)
        return _NOTHING  # the step restores the state

    def run(
        self, layer: Callable[[Value], Value], value: Value, *, index: int, step: int, rows: Rows
    ) -> Value:
        """A layer's output on some samples of a micro-batch.

        Args:
            layer: what runs: a module or a function.
            value: what it takes.
            index: its number among all layers; -1: the loss function.
            step: the step's number.
            rows: which samples ``value`` has.
        """
        key = self._key(step, rows.micro_batch, index)
        if rows.whole or self._drawing is not None:
            if self.shared:
                with self._seeded(key):
                    return layer(value)
            for generator in self.generators:
                generator.manual_seed(key)
            return layer(value)  # the step restores the state
        if self.compiled and index >= 0:
            with self._seeded(number_of(key, rows.start)):
                return layer(value)
        watched = pytree.tree_leaves((value, list(layer.buffers()) if isinstance(layer, nn.Module) else ()))
        before = versions(watched)  # of these tensors, whatever the layer puts in their place
        if self._quiet.get(index):
            with self._seeded(key):
                states = self.states()
                output: Value = layer(value)
                if self.drew_nothing(states):
                    return output
            self._quiet[index] = False  # it draws on some inputs only
            if versions(watched) != before:
                raise ConfigError(
                    f"layer {index} ({type(layer).__name__}) begins to draw random numbers and to change its "
                    "input or its buffers in place in one forward of half a micro-batch; let it do so from "
                    "the first forward on, or take a schedule that halves nothing"
                )
        with self._seeded(key), self._sharing(rows) as draws:
            output = layer(value)
        if index not in self._quiet:
            modules = layer.modules() if isinstance(layer, nn.Module) else ()
            changes = any(map(keeps_statistics, modules)) or versions(watched) != before
            self._quiet[index] = not draws.drew and not changes
        elif draws.drew:
            self._quiet[index] = False
        return output

    def _key(self, step: int, micro_batch: int, index: int) -> int:
        """The seed of a stream: steps are told apart by a hash, what is in a step by mixing (SplitMix64)."""
        base = self._bases.get((self.seed, step))
        if base is None:
            if len(self._bases) >= _STEPS:
                self._bases.clear()
            base = self._bases[self.seed, step] = number_of(self.seed, step)
        return self._mixed(base + micro_batch * 0x9E3779B97F4A7C15 + index * 0xD1342543DE82EF95)

    @staticmethod
    def _mixed(number: int) -> int:
        mixed = number & _BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
        return mixed >> 12

    def unless_drawn(self, run: Callable[[], Value]) -> Value | None:
        """What ``run`` gives; None if it drew random numbers."""
        with self._seeded(self.seed):
            before = self.states()
            output = run()
            return output if self.drew_nothing(before) else None

    def backward(self, rows: Rows | None) -> AbstractContextManager[Any] | None:
        """Around a backward, in which the user's own checkpoints may draw again, if anything has to be.

        Args:
            rows: the samples it is of; None for a whole micro-batch.
        """
        if self._draws_again and rows is not None and not rows.whole:
            return self._drawn_again(rows)
        return self.turn() if self.shared else None

    @contextmanager
    def _drawn_again(self, rows: Rows) -> Iterator[None]:
        with self.turn(), self._sharing(rows):
            yield

    @contextmanager
    def _sharing(self, rows: Rows) -> Iterator[_SharedDraws]:
        """Catch what is drawn for a part of a micro-batch."""
        with _SharedDraws(self.generators, rows) as draws:
            self._drawing = draws
            try:
                yield draws
            finally:
                self._drawing = None
                self._draws_again |= draws.again

    def states(self) -> list[Tensor]:
        """Where the generators are by now."""
        return [generator.get_state() for generator in self.generators]

    def drew_nothing(self, before: list[Tensor]) -> bool:
        """Whether the generators are where they were."""
        return all(map(torch.equal, self.states(), before))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time, where workers are threads.

        Raises:
            TimedOut: another thread kept its turn for too long.
        """
        # The worker's, not the thread's: autograd has threads of its own for devices.
        if not self.shared or self._has_turn or has_turn():
            yield
            return
        settle()
        if not process_lock.acquire(timeout=self.timeout_seconds):
            raise TimedOut(None, self.timeout_seconds)
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            process_lock.release()

    @contextmanager
    def _seeded(self, key: int) -> Iterator[None]:
        with self.kept() if self.shared else _NOTHING:
            for generator in self.generators:
                generator.manual_seed(key)
            yield


def versions(tree: object) -> list[int]:
    """How often each tensor was changed in place; those of inference mode do not count it."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001


_draws: dict[Any, bool] = {}
"""By operator, whether it draws random numbers: its tags are slow to ask for."""

_VALUE_BY_VALUE = frozenset(
    f"aten::{name}"
    for name in (
        "bernoulli", "bernoulli_", "native_dropout", "rand", "randn", "rand_like", "randn_like", "randint",
        "randint_like", "random", "random_", "uniform", "uniform_", "normal", "normal_", "exponential",
        "exponential_", "geometric", "geometric_", "log_normal", "log_normal_", "cauchy", "cauchy_",
    )
)  # fmt: skip
"""Operators that draw for each value on its own, however many values there are and whatever they are."""


class _SharedDraws(TorchDispatchMode):
    """Draws for the whole micro-batch what is drawn for a part of it, and hands out the part's share.

    The state of the generators is all it goes by, so that a checkpoint that restores it draws the same.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to have torch.compile kept out by a wrapper around every operator: it is slow."""
        return False

    def __init__(self, generators: list[torch.Generator], rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators = generators
        self.rows = rows
        self.count = rows.stop - rows.start
        self.drew = False
        self.again = False
        self._around = _kept_by()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        draws = _draws.get(func)
        if draws is None:
            draws = _draws[func] = torch.Tag.nondeterministic_seeded in func.tags
        if not draws or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.drew = True
        # Within a checkpoint autograd records nothing, or saves in another way than around the layer.
        self.again = self.again or _kept_by() != self._around
        scale = next(filter(None, map(self._scale, args)), 0)
        if not scale:  # a decision, the same for all samples
            return func(*args, **kwargs)
        if schema_of(func).name not in _VALUE_BY_VALUE:
            self._part_ways()
            return func(*args, **kwargs)
        among = slice(scale * self.rows.start, scale * self.rows.stop)
        whole = [self._whole(arg, scale, among) for arg in args]
        drawn = func(*whole, **kwargs)
        for described, arg, wider in zip(schema_of(func).arguments, args, whole, strict=False):
            if described.alias_info is not None and described.alias_info.is_write and wider is not arg:
                arg.copy_(wider[among])
        if drawn is whole[0]:
            return args[0]
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[among], drawn)

    def _scale(self, arg: object) -> int:
        """Values of the first dimension a sample; 0 where it is not the samples."""
        if isinstance(arg, Tensor):
            size = arg.shape[0] if arg.dim() else 0
        elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], int):
            size = arg[0]
        else:
            return 0
        return size // self.count if self.count and size % self.count == 0 else 0

    def _whole(self, arg: Any, scale: int, among: slice) -> Any:
        """``arg`` with the first dimension of a whole micro-batch, in the same order in memory."""
        size, mine = scale * self.rows.samples, scale * self.count
        if isinstance(arg, Tensor) and arg.dim() and arg.shape[0] == mine:
            order = sorted(range(arg.dim()), key=lambda dim: (-arg.stride()[dim], -arg.shape[dim]))
            shape = [size, *arg.shape[1:]]
            back = sorted(range(arg.dim()), key=order.__getitem__)
            whole = arg.new_zeros([shape[dim] for dim in order]).permute(back)
            whole[among] = arg
            return whole
        if isinstance(arg, (list, tuple)) and arg and arg[0] == mine:
            return [size, *arg[1:]]
        return arg

    def _part_ways(self) -> None:
        """From here on draw from a stream of the part's own: what is drawn cannot be shared out."""
        states = [generator.get_state().numpy().tobytes().hex() for generator in self.generators]
        seed = number_of(self.rows.start, *states)
        for generator in self.generators:
            generator.manual_seed(seed)


def _kept_by() -> tuple[bool, Any]:
    """Whether autograd records, and how it saves: a checkpoint of either kind changes one of them."""
    return torch.is_grad_enabled(), saving_hooks()
