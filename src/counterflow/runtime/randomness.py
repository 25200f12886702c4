"""Random draws that do not depend on the schedule: a stream for each (seed, step, micro-batch, layer).

Invariant: a layer that runs on a micro-batch draws the same numbers whichever worker runs it, whenever,
as a whole, in halves, together with another micro-batch, or a second time to recompute it.

Streams are drawn from torch's default generators, which are seeded before each layer. Where a layer runs
on other rows than one whole micro-batch, random operators are caught and drawn for whole micro-batches.
Random numbers drawn inside one fused kernel (attention with dropout on a GPU) are beyond its reach there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .transport import TimedOut
from .values import Value, number_of


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


_process_lock = threading.RLock()
"""The default generators are the process's: threads that are workers take turns with their layers."""


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
        return nullcontext() if self.shared else self.kept()

    def initial(self, layer: int) -> Any:
        """Around the initialisation of a layer's weights."""
        return self._seeded(number_of(self.seed, "weights", layer))

    def run(self, layer: nn.Module, value: Value, *, index: int, step: int, rows: Sequence[Rows]) -> Value:
        """A layer's output on ``rows`` (of one micro-batch, or several one after another).

        Args:
            layer: what runs.
            value: what it takes.
            index: its number among all layers.
            step: the step's number.
            rows: which samples ``value`` has.
        """
        first = rows[0]
        key = self._key(step, first.micro_batch, index)
        if len(rows) == 1 and first.whole:
            if self.shared:
                with self._seeded(key):
                    return layer(value)
            for generator in self.generators:
                generator.manual_seed(key)
            return layer(value)  # the step restores the state
        if self._quiet.get(index):
            with self._seeded(key):
                before = [generator.get_state() for generator in self.generators]
                output: Value = layer(value)
                if all(map(torch.equal, (g.get_state() for g in self.generators), before)):
                    return output
            self._quiet[index] = False  # it draws on some inputs only
        keys = [self._key(step, r.micro_batch, index) for r in rows]
        with self._turn_kept(), _WholeDraws(self.generators, keys, rows) as draws:
            output = layer(value)
        if index not in self._quiet or draws.drew:
            self._quiet[index] = not draws.drew and not any(map(keeps_statistics, layer.modules()))
        return output

    def _key(self, step: int, micro_batch: int, layer: int) -> int:
        return number_of(self.seed, step, micro_batch, layer)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time, where workers are threads.

        Raises:
            TimedOut: another thread kept its turn for too long.
        """
        if not self.shared:
            yield
            return
        if not _process_lock.acquire(timeout=self.timeout_seconds):
            raise TimedOut(None, self.timeout_seconds)
        try:
            yield
        finally:
            _process_lock.release()

    def _turn_kept(self) -> AbstractContextManager[None]:
        """Around a layer: where workers are threads, keeps the random state that a step cannot."""
        return self.kept() if self.shared else nullcontext()

    @contextmanager
    def _seeded(self, key: int) -> Iterator[None]:
        with self._turn_kept():
            for generator in self.generators:
                generator.manual_seed(key)
            yield


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a training forward changes the module's own buffers: running statistics of batch norms."""
    return isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001 - the base of all that keep any


_draws: dict[Any, bool] = {}
"""By operator, whether it draws random numbers: its tags are slow to ask for."""


class _WholeDraws(TorchDispatchMode):
    """Draws random numbers for whole micro-batches and hands out those of the rows at hand."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to have torch.compile kept out by a wrapper around every operator: it is slow."""
        return False

    def __init__(self, generators: list[torch.Generator], keys: Sequence[int], rows: Sequence[Rows]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators = generators
        self.rows = rows
        self.count = sum(r.stop - r.start for r in rows)
        self.drew = False
        self.states: list[list[Tensor]] = []
        for key in keys:
            for generator in generators:
                generator.manual_seed(key)
            self.states.append([generator.get_state() for generator in generators])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        draws = _draws.get(func)
        if draws is None:
            draws = _draws[func] = torch.Tag.nondeterministic_seeded in func.tags
        if not draws:
            return func(*args, **kwargs)
        self.drew = True
        if not self._scale(args[0]):
            return func(*args, **kwargs)
        scale = self._scale(args[0])
        pieces = []
        at = 0
        for segment, rows in enumerate(self.rows):
            for generator, state in zip(self.generators, self.states[segment], strict=True):
                generator.set_state(state)
            taken = slice(scale * at, scale * (at + rows.stop - rows.start))
            among = slice(scale * rows.start, scale * rows.stop)
            at += rows.stop - rows.start
            drawn = func(*[self._whole(a, scale, rows, taken, among) for a in args], **kwargs)
            pieces.append([t[among] for t in (drawn if isinstance(drawn, tuple) else (drawn,))])
            self.states[segment] = [generator.get_state() for generator in self.generators]
        joined = tuple(torch.cat(same) for same in zip(*pieces, strict=True))
        if func._schema.is_mutable:  # noqa: SLF001 - the operator's own description
            args[0].copy_(joined[0])
            return args[0]
        return joined if len(joined) > 1 else joined[0]

    def _scale(self, first: object) -> int:
        """Values of the first dimension a sample; 0 where it is not the samples."""
        if isinstance(first, Tensor):
            size = first.shape[0] if first.dim() else 0
        elif isinstance(first, (list, tuple)) and first and isinstance(first[0], int):
            size = first[0]
        else:
            return 0
        return size // self.count if self.count and size % self.count == 0 else 0

    def _whole(self, arg: Any, scale: int, rows: Rows, taken: slice, among: slice) -> Any:
        """``arg`` with the first dimension of a whole micro-batch."""
        size, mine = scale * rows.samples, scale * self.count
        if isinstance(arg, Tensor) and arg.dim() and arg.shape[0] == mine:
            whole = arg.new_zeros((size, *arg.shape[1:]))
            whole[among] = arg[taken]
            return whole
        if isinstance(arg, (list, tuple)) and arg and arg[0] == mine:
            return [size, *arg[1:]]
        return arg
