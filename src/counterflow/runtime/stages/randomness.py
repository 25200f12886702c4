"""Random draws that do not depend on the order: a stream for each (seed, step, layer, micro-batch, part).

Invariant: what a layer draws depends on nothing else, so it draws the same when it runs a second time to
recompute, by the engine or by the user's own checkpoint. A half of a micro-batch, or a slice, is a part of it
and draws from a stream of its own.

Streams are drawn from torch's default generators, which are seeded before each layer. What a layer draws
elsewhere (Python's or NumPy's random numbers, a generator of its own) is beyond its reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.common.numbering import number_of

from ..messages.values import Value
from ..transport.base import TimedOut
from ..transport.rng_lock import holds_rng, process_lock, synchronize_stream
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper

_NOTHING = nullcontext()

_BITS = 2**64 - 1

_UPDATES = {"optimizer": -1, "hooks": -2}
"""In the seeds of what makes an update, in the place of the micro-batch."""

_STEPS = 16
"""Steps of which the base of the seeds is remembered: asynchronous schemes use those of several."""

_KEPT = "another worker's thread kept the random generators, and did not give them back"


class RandomStreams(StageWrapper):
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
        self._has_turn = False
        self._bases: list[tuple[int, int | None, int]] = [(seed, None, 0)] * _STEPS
        """Bases of the last few steps: the run's seed (a load changes it), the step, and the seeds' base."""

    @cached_property
    def generators(self) -> list[torch.Generator]:
        """The generators that layers draw from."""
        generators = [torch.default_generator]
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            torch.cuda.init()
            generators.append(torch.cuda.default_generators[index])
        return generators

    @contextmanager
    def preserved(self) -> Iterator[None]:
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
        """Context of a step: it preserves the user's random state, unless each layer does."""
        return _NOTHING if self.shared else self.preserved()

    def initial(self, layer: int) -> Any:
        """Context of the initialisation of a layer's weights."""
        return self._seeded(number_of(self.seed, "weights", layer))

    def update(self, what: str, step: int, *of: int) -> Any:
        """Context of an update, in which all copies of a stage draw equal random numbers.

        Args:
            what: ``hooks`` of parameters, or the ``optimizer``.
            step: the number of the step whose mini-batch the update is of.
            of: the stage, or other numbers that identify the weights.
        """
        key = self._key(step, SampleRows(_UPDATES[what], 0, 0, 0), of[0])
        for more in of[1:]:
            key = _mixed(key + more)
        return self._from(key)

    def layer(self, index: int, step: int, rows: SampleRows) -> AbstractContextManager[Any]:
        """Context of a layer's run on some samples of a micro-batch.

        Args:
            index: its number among all layers; -1: the loss function.
            step: the step's number.
            rows: which samples it runs on.
        """
        return self._from(self._key(step, rows, index))

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        key = self._key(step, rows, layer.index)
        if self.shared:
            with self._seeded(key):
                return run(value, step, rows)
        for generator in self.generators:  # ``step`` restores their states
            generator.manual_seed(key)
        return run(value, step, rows)

    def _from(self, key: int) -> AbstractContextManager[Any]:
        # ``step`` restores the state where no other worker needs it
        if self.shared:
            return self._seeded(key)
        for generator in self.generators:
            generator.manual_seed(key)
        return _NOTHING

    def _key(self, step: int, rows: SampleRows, index: int) -> int:
        """The seed of a stream: a hash distinguishes steps, and mixing (SplitMix64) the streams of a step."""
        seed, of, base = self._bases[step % _STEPS]
        if of != step or seed != self.seed:
            base = number_of(self.seed, step)
            self._bases[step % _STEPS] = self.seed, step, base
        # 0: the whole micro-batch, or its first slice.
        part = rows.slice << 64 | rows.start << 32 | rows.samples - rows.stop
        mixed = base + rows.micro_batch * 0x9E3779B97F4A7C15 + index * 0xD1342543DE82EF95
        return _mixed(mixed + part * 0xD6E8FEB86659FD93)

    @contextmanager
    def continued(
        self, index: int, step: int, rows: SampleRows, states: Sequence[Tensor] | None
    ) -> Iterator[list[Tensor]]:
        """Run a part of a layer that draws from where an earlier part of it ended.

        Args:
            index: number of the layer; -1: the loss function.
            step: number of the step.
            rows: samples of the run.
            states: states of the generators after the earlier part; None: this is the first part.

        Yields:
            The states after this part, once it has ended.
        """
        ends: list[Tensor] = []
        with self.preserved():
            if states is None:
                key = self._key(step, rows, index)
                for generator in self.generators:
                    generator.manual_seed(key)
            else:
                for generator, state in zip(self.generators, states, strict=True):
                    generator.set_state(state)
            yield ends
            ends.extend(self.states())

    def unless_drawn(self, run: Callable[[], Value]) -> Value | None:
        """Return the result of ``run``; None if it drew random numbers."""
        with self._seeded(self.seed):
            before = self.states()
            output = run()
            return output if self.drew_nothing(before) else None

    def backward(self) -> AbstractContextManager[Any]:
        """Context of a backward, in which the user's own checkpoints may draw again."""
        return self.turn() if self.shared else _NOTHING

    def states(self) -> list[Tensor]:
        """Current states of the generators."""
        return [generator.get_state() for generator in self.generators]

    def restore(self, states: Sequence[Tensor]) -> None:
        """Set the generators to states."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def drew_nothing(self, before: list[Tensor]) -> bool:
        """True if no generator has drawn since the states ``before``."""
        return all(map(torch.equal, self.states(), before))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time, where workers are threads.

        Raises:
            TimedOut: another thread kept its turn for too long.
        """
        # The worker's, not the thread's: autograd has threads of its own for devices.
        if not self.shared or self._has_turn or holds_rng():
            yield
            return
        synchronize_stream()
        if not process_lock.acquire(timeout=self.timeout_seconds):
            raise TimedOut(None, self.timeout_seconds, _KEPT)
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            process_lock.release()

    @contextmanager
    def _seeded(self, key: int) -> Iterator[None]:
        with self.preserved() if self.shared else _NOTHING:
            for generator in self.generators:
                generator.manual_seed(key)
            yield


def _mixed(number: int) -> int:
    mixed = number & _BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
    return mixed >> 12
