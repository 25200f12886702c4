"""Cuts for workers that hold several stages, and for stages of equal cost that do not fit into memory.

Stages of equal cost are not best if a worker holds two of them (two directions, waves, loops), because the
time at which the last worker ends counts. Layers move from a stage of the worst worker to another stage while
that is better.

Invariant: by this measure the cuts are never worse than those that balance stages, and the same inputs give
the same cuts. The measure is an estimate; the duration and memory of an order are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement

from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDING = 1e-9
"""Difference of a measure below which values are equal."""


@dataclass(frozen=True)
class Balance:
    """The measure of cuts.

    Attributes:
        model: the layers.
        profile: costs of the layers.
        placement: which worker holds which stage.
        passes: number of micro-batches of an update through each pipe.
        samples: samples of a micro-batch.
        recompute: what a backward computes again.
        usable_bytes: memory of a worker, or of each.
        slowness: factor of seconds by worker; empty: all workers are alike.
    """

    model: Model
    profile: Profile
    placement: Placement
    passes: int
    samples: int
    recompute: Recompute
    usable_bytes: float | tuple[float, ...]
    known: dict[tuple[int, bool], dict[str, Floats]] = field(default_factory=dict, compare=False, repr=False)
    """Cached sums over layers of the same model and profile, by ``samples`` and whether anything is
    recomputed.
    """
    slowness: tuple[float, ...] = ()

    def balanced(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts found from these, better for the slowest worker, whatever its memory."""
        if len({*self.slowness}) > 1 or any(len(held) > 1 for held in self._table.held):
            return self._moved(cuts, by_memory=False)
        return cuts

    def fitting(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts found from these, better for memory if all fit in the end."""
        if self._excess(cuts) == 0 or not self._may_fit:
            return cuts
        fitting = self._moved(cuts, by_memory=True)
        return fitting if self._excess(fitting) == 0 else cuts

    def _moved(self, cuts: tuple[int, ...], *, by_memory: bool) -> tuple[int, ...]:
        """Move one layer after another, each time by the best move, while one improves."""
        ends = self._ends(cuts)
        while True:
            judged = self._over(ends) if by_memory else self._seconds(ends, self._of_stages("seconds", ends))
            worst = int(judged[0].argmax())
            tried = self._moves(ends, worst)
            best = self._best(tried, by_memory=by_memory)
            if best == 0:
                return tuple(ends[0, 1:-1].tolist())
            ends = tried[best : best + 1]

    def _best(self, ends: Ints, *, by_memory: bool) -> int:
        """The best cuts, the first of equal ones: by bytes too many, then by the end of the slowest worker,
        then by the longest stage, which all micro-batches have to pass, then by the evenness of workers.
        """
        left = np.arange(len(ends))
        if by_memory:
            left = _least(np.maximum(self._over(ends).max(axis=1), 0.0))
        each = self._of_stages("seconds", ends[left])
        done = self._seconds(ends[left], each)
        measures: tuple[Callable[[Ints], Floats], ...] = (
            lambda some: done[some].max(axis=1),
            lambda some: self._on_slowest(each[some]).max(axis=1),
            lambda some: np.square(done[some]).sum(axis=1),
        )
        some = np.arange(len(left))
        for measure in measures:
            if len(some) > 1:
                some = some[_least(measure(some))]
        return int(left[some[0]])

    def _on_slowest(self, each: Floats) -> Floats:
        """Seconds of stages on the slowest of their holders."""
        return each * _slowed(self.placement, self.slowness).most if self.slowness else each

    def _over(self, ends: Ints) -> Floats:
        """Approximate bytes that each worker has too many."""
        found: Floats = self._bytes(ends) - np.array(self.usable_bytes)
        return found

    def _moves(self, ends: Ints, worker: int) -> Ints:
        """The cuts unchanged, then with a layer moved from each stage of a worker to each other stage; layers
        between move up by one.
        """
        may = [stage for stage in self._table.held[worker] if ends[0, stage + 1] - ends[0, stage] > 1]
        return ends + _shifts(self.placement.stages, tuple(may))

    def _ends(self, cuts: tuple[int, ...]) -> Ints:
        return np.array([[0, *cuts, len(self.model.layers)]], dtype=np.int64)

    def _excess(self, cuts: tuple[int, ...]) -> float:
        return max(0.0, float(self._over(self._ends(cuts)).max()))

    def _seconds(self, ends: Ints, each: Floats) -> Floats:
        """Earliest end of each worker: its first input, all of its work, its last gradient.

        ``each``: the seconds of each stage.
        """
        if self.slowness:
            slowed = _slowed(self.placement, self.slowness)
            found: Floats = each @ (self.passes * slowed.holds + slowed.before)
            return found
        return self.passes * self._by_worker(each) + self._sums["seconds"][ends[:, self._table.first]]

    def _bytes(self, ends: Ints) -> Floats:
        """Approximate memory of each worker."""
        stages = self.placement.stages
        ahead = np.minimum(self.passes, stages - np.arange(stages))  # from a forward to its backward
        working: Floats | float = 0.0
        if self.recompute is Recompute.NONE:
            kept = self._of_stages("saved", ends)
        elif self.recompute is Recompute.LAYER:
            kept = self._of_stages("inputs", ends)
        else:
            kept = self._sums["each input"][ends[:, :-1]]
            working = self._of_stages("saved", ends).max(axis=1, keepdims=True)
        buffers = 2 * float(self._sums["largest input"])
        found: Floats = self._by_worker(self._of_stages("fixed", ends) + ahead * kept) + working + buffers
        return found

    def _of_stages(self, name: str, ends: Ints) -> Floats:
        """A number of each layer, summed over each stage."""
        before = self._sums[name][ends]
        found: Floats = before[:, 1:] - before[:, :-1]
        return found

    def _fixed(self, layer: LayerProfile) -> float:
        state = self.model.optimizer_states * layer.trained_bytes
        return layer.weights_bytes + layer.gradient_bytes + state

    def _by_worker(self, stages: Floats) -> Floats:
        """A number of each stage, summed over each worker."""
        found: Floats = stages @ self._table.holds
        return found

    @property
    def _may_fit(self) -> bool:
        """Whether any cuts may fit: all workers together need at least one stash of each stage they hold."""
        sums, copies = self._sums, self.placement.pipes
        kept = 0.0
        if self.recompute is Recompute.NONE:
            kept = sums["saved"][-1]
        elif self.recompute is Recompute.LAYER:
            kept = sums["inputs"][-1]
        least = copies * (sums["fixed"][-1] + kept)
        if isinstance(self.usable_bytes, tuple):
            usable = sum(self.usable_bytes)
        else:
            usable = self.placement.workers * self.usable_bytes
        return bool(least <= usable * (1 + _ROUNDING))

    @cached_property
    def _table(self) -> _Held:
        return _held(self.placement)

    @cached_property
    def _sums(self) -> dict[str, Floats]:
        """Cumulative sums over layers, and the input of each."""
        key = self.samples, self.recompute is not Recompute.NONE
        if key not in self.known:
            self.known[key] = self._summed()
        return self.known[key]

    def _summed(self) -> dict[str, Floats]:
        samples, again = self.samples, self.recompute is not Recompute.NONE
        outputs = [self.profile.layer(kind).output_bytes for kind in self.model.layers[:-1]]
        inputs = samples * np.array([self.model.input_bytes, *outputs])
        rows: dict[str, Any] = {"inputs": inputs}
        for name, of in (
            ("seconds", lambda layer: (1 + again) * layer.forward(samples) + layer.backward(samples)),
            ("fixed", self._fixed),
            ("saved", lambda layer: layer.saved(samples)),
        ):
            each = {kind: of(self.profile.layer(kind)) for kind in set(self.model.layers)}
            rows[name] = [each[kind] for kind in self.model.layers]
        found = {name: np.concatenate(([0.0], np.cumsum(row))) for name, row in rows.items()}
        return found | {"each input": inputs, "largest input": inputs[1:].max(initial=0.0)}


def _least(values: Floats) -> Ints:
    """Indices of the minimum of some values."""
    return np.flatnonzero(values <= values.min() * (1 + _ROUNDING))


@dataclass(frozen=True, slots=True)
class _Held:
    """The stages that a placement's workers hold: the stages of each, its first one, and the number of
    holders of each stage.
    """

    held: list[list[int]]
    first: list[int]
    holds: Floats


@lru_cache(maxsize=256)
def _held(placement: Placement) -> _Held:
    held: list[list[int]] = [[] for _ in range(placement.workers)]
    holds = np.zeros((placement.stages, placement.workers))
    for stages in placement.pipes_stages:
        for stage, worker in enumerate(stages):
            held[worker].append(stage)
            holds[stage, worker] += 1
    return _Held(held, [min(stages) for stages in held], holds)


@dataclass(frozen=True, slots=True)
class _Slowed:
    """Factors of a stage's seconds on workers that differ, ``[stage][worker]``.

    ``holds``: for ops of the stages that it holds; ``before``: on the way from stage 0 to the first of these,
    on the holders of the stages in between. ``most``: by stage, on the slowest of its holders.
    """

    holds: Floats
    before: Floats
    most: Floats


@lru_cache(maxsize=256)
def _slowed(placement: Placement, slowness: tuple[float, ...]) -> _Slowed:
    first = _held(placement).first
    slow = np.array(slowness)
    before = np.zeros((placement.stages, placement.workers))
    most = np.zeros(placement.stages)
    for holders in placement.pipes_stages:
        most = np.maximum(most, slow[list(holders)])
        for stage, worker in enumerate(holders):
            if stage == first[worker]:
                before[:stage, worker] = slow[list(holders[:stage])]
    return _Slowed(_held(placement).holds * slow, before, most)


@lru_cache(maxsize=1024)
def _shifts(stages: int, may: tuple[int, ...]) -> Ints:
    """What no move, then a layer's from some stages to each other one, adds to where stages begin, by row."""
    none = np.zeros((1, stages + 1), dtype=np.int64)
    return np.concatenate((none, *(_shifts_from(stages, stage) for stage in may)))


@lru_cache(maxsize=1024)
def _shifts_from(stages: int, stage: int) -> Ints:
    """What a layer's move from a stage to each other one adds to where stages begin, by row."""
    to, begin = np.delete(np.arange(stages), stage)[:, np.newaxis], np.arange(stages + 1)
    down = (stage < begin) & (begin <= to)
    up = (to < begin) & (begin <= stage)
    return up.astype(np.int64) - down
