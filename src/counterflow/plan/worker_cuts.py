"""Cuts for workers that hold several stages, and for memory that stages of equal cost do not fit into.

Stages of equal cost are not best where a worker holds two of them (two directions, waves, loops): what counts
is when the last worker is done. Layers move from a stage of the worst worker to another stage while that is
better.

Invariant: the cuts are never worse by this measure than those that balance stages, and the same inputs give
the same cuts. The measure is an estimate: how long an order takes with them, and whether it fits, is played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement

from .model import Model
from .profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDING = 1e-9
"""Of a measure: what differs by less is equal."""


@dataclass(frozen=True)
class Balance:
    """What cuts are judged by.

    Attributes:
        model: the layers.
        profile: what they cost.
        placement: which worker holds which stage.
        passes: micro-batches of an update that go through each pipe.
        samples: of a micro-batch.
        recompute: what is computed again in a backward.
        usable_bytes: memory of a worker.
    """

    model: Model
    profile: Profile
    placement: Placement
    passes: int
    samples: int
    recompute: Recompute
    usable_bytes: float

    def improved(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts that begin as these, better for the slowest worker, and for memory if all fit in the end."""
        if any(len(held) > 1 for held in self._held):
            cuts = self._moved(cuts, by_memory=False)
        if self._excess(cuts) == 0:
            return cuts
        fitting = self._moved(cuts, by_memory=True)
        return fitting if self._excess(fitting) == 0 else cuts

    def _moved(self, cuts: tuple[int, ...], *, by_memory: bool) -> tuple[int, ...]:
        """Move one layer after another, each time the best move, while there is a better one."""
        ends = self._ends(cuts)
        while True:
            worst = int((self._bytes(ends) if by_memory else self._seconds(ends))[0].argmax())
            tried = np.concatenate((ends, *self._moves(ends, worst)))
            best = self._best(tried, by_memory=by_memory)
            if best == 0:
                return tuple(ends[0, 1:-1].tolist())
            ends = tried[best : best + 1]

    def _best(self, ends: Ints, *, by_memory: bool) -> int:
        """The best, the first of equal ones: by bytes too many, then by when the slowest worker is done, then
        by the longest stage, which all micro-batches have to pass, then by how even workers are.
        """
        seconds = self._seconds(ends)
        stages = np.diff(self._sums["seconds"][ends], axis=1).max(axis=1)
        measures = [seconds.max(axis=1), stages, np.square(seconds).sum(axis=1)]
        if by_memory:
            measures.insert(0, np.maximum(self._bytes(ends).max(axis=1) - self.usable_bytes, 0.0))
        left = np.arange(len(ends))
        for measure in measures:
            least = measure[left].min()
            left = left[measure[left] <= least * (1 + _ROUNDING)]
        return int(left[0])

    def _moves(self, ends: Ints, worker: int) -> Iterator[Ints]:
        """A layer from each stage of a worker to each other stage; those between move up by one."""
        for stage in self._held[worker]:
            if ends[0, stage + 1] - ends[0, stage] < 2:
                continue
            for other in range(self.placement.stages):
                moved = ends.copy()
                if other > stage:
                    moved[0, stage + 1 : other + 1] -= 1
                elif other < stage:
                    moved[0, other + 1 : stage + 1] += 1
                else:
                    continue
                yield moved

    def _ends(self, cuts: tuple[int, ...]) -> Ints:
        return np.array([[0, *cuts, len(self.model.layers)]], dtype=np.int64)

    def _excess(self, cuts: tuple[int, ...]) -> float:
        return max(0.0, float(self._bytes(self._ends(cuts)).max()) - self.usable_bytes)

    def _seconds(self, ends: Ints) -> Floats:
        """When each worker is done at the earliest: its first input, all of its work, its last gradient."""
        sums = self._sums["seconds"]
        return self.passes * self._by_worker(np.diff(sums[ends], axis=1)) + sums[ends[:, self._first]]

    def _bytes(self, ends: Ints) -> Floats:
        """About what each worker holds."""
        fixed, saved, inputs = (
            np.diff(self._sums[name][ends], axis=1) for name in ("fixed", "saved", "inputs")
        )
        stages = self.placement.stages
        ahead = np.minimum(self.passes, stages - np.arange(stages))  # from a forward to its backward
        working = 0.0
        if self.recompute is Recompute.NONE:
            kept = saved
        elif self.recompute is Recompute.LAYER:
            kept = inputs
        else:
            kept, working = self._inputs[ends[:, :-1]], saved.max(axis=1, keepdims=True)
        buffers = 2 * float(self._inputs[1:].max(initial=0.0))
        found: Floats = self._by_worker(fixed + ahead * kept) + working + buffers
        return found

    def _by_worker(self, stages: Floats) -> Floats:
        """A number of each stage, summed over what each worker holds."""
        found: Floats = stages @ self._holds
        return found

    @cached_property
    def _held(self) -> list[list[int]]:
        return [[s for _, s in self.placement.held(worker)] for worker in range(self.placement.workers)]

    @cached_property
    def _first(self) -> list[int]:
        return [min(held) for held in self._held]

    @cached_property
    def _holds(self) -> Floats:
        table = np.zeros((self.placement.stages, self.placement.workers))
        for worker, held in enumerate(self._held):
            for stage in held:
                table[stage, worker] += 1
        return table

    @cached_property
    def _inputs(self) -> Floats:
        """Bytes that each layer takes."""
        outputs = [self.profile.layer(kind).output_bytes for kind in self.model.layers[:-1]]
        return self.samples * np.array([self.model.input_bytes, *outputs])

    @cached_property
    def _sums(self) -> dict[str, Floats]:
        """Of all layers before each."""
        kinds = [self.profile.layer(kind) for kind in self.model.layers]
        samples, again = self.samples, self.recompute is not Recompute.NONE
        rows: dict[str, Any] = {
            "seconds": [(1 + again) * layer.forward(samples) + layer.backward(samples) for layer in kinds],
            "fixed": [(2 + self.model.optimizer_states) * layer.weights_bytes for layer in kinds],
            "saved": [layer.saved(samples) for layer in kinds],
            "inputs": self._inputs,
        }
        return {name: np.concatenate(([0.0], np.cumsum(row))) for name, row in rows.items()}
