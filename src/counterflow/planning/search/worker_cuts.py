"""Cuts for workers that hold several stages, and for stages of equal cost that do not fit into memory.

Stages of equal cost are not best if a worker holds two of them (two directions, waves, loops), because the
time at which the last worker ends counts. Layers move from a stage of the worst worker to another stage while
that is better.

Warm-up and drain of an asynchronous schedule occur once in a training, so only its steady state counts. There
the chunks (WPipe's groups) take turns on all workers, and the longest stage of a chunk sets the pace of its
turn.

Invariant: by this measure the cuts are never worse than those that balance stages, and the same inputs give
the same cuts. The measure is an estimate; the duration and memory of an order are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from counterflow.schedule.cuts import balance
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import OpKind
from counterflow.schedule.placement import Placement

from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile
from .layer_moves import Floats, Ints, Moves, OfStages

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
        synchronous: whether updates flush the pipeline.
    """

    model: Model
    profile: Profile
    placement: Placement
    passes: int
    samples: int
    recompute: Recompute
    usable_bytes: float | tuple[float, ...]
    known: dict[tuple[int, bool, bool], dict[str, Floats]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Cached sums over layers of the same model and profile, by ``samples``, whether anything is recomputed,
    and ``synchronous``.
    """
    slowness: tuple[float, ...] = ()
    synchronous: bool = True

    def balanced(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts found from these, better for the slowest worker, whatever its memory."""
        if not self.synchronous:
            cuts = self._in_two_turns(cuts)
        if len({*self.slowness}) > 1 or any(len(stages) > 1 for stages in self._table.stages):
            return self._moved(cuts, by_memory=False)
        return cuts

    def fitting(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts found from these, better for memory if all fit in the end."""
        if self._excess(cuts) == 0 or not self._may_fit:
            return cuts
        fitting = self._moved(cuts, by_memory=True)
        return fitting if self._excess(fitting) == 0 else cuts

    def _moved(self, cuts: tuple[int, ...], *, by_memory: bool) -> tuple[int, ...]:
        ends = self._ends(cuts)
        while True:
            tried = Moves(ends, self._sources(ends, by_memory=by_memory))
            best = self._best(tried, by_memory=by_memory)
            if best == 0:
                return tuple(ends[1:-1].tolist())
            ends = tried.after(best)

    def _sources(self, ends: Ints, *, by_memory: bool) -> tuple[int, ...]:
        table, now = self._table, Moves(ends)
        judged = [self._over(now)] if by_memory else self._seconds(now)
        turns = [table.holds] if by_memory else self._turns
        worst = [
            (int(judged_turn[0].argmax()), holds) for judged_turn, holds in zip(judged, turns, strict=True)
        ]
        stages = [stage for worker, holds in worst for stage in table.stages[worker] if holds[stage, worker]]
        return tuple(stage for stage in stages if ends[stage + 1] - ends[stage] > 1)

    def _in_two_turns(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts that minimise ``_period`` if there are two chunks; exact if workers are equal.

        Single moves would not find them: fewer layers in a chunk pay only if all of its longest stages have
        one less.
        """
        chunks, stages = self._table.chunks, self.placement.stages
        head = int(chunks[0].sum())
        if self.placement.pipes > 1 or len(chunks) != 2 or chunks[0][:head].sum() < head:
            return cuts
        seconds, tail = self._sums["each seconds"], stages - head
        longest = np.array([_longest(seconds, head), _longest(seconds[::-1], tail)[::-1]])
        middles = np.arange(head, len(seconds) - tail + 1)
        middles = middles[_least(self._period(longest[:, middles]))]
        middle = int(middles[np.abs(middles - cuts[head - 1]).argmin()])
        both = balance(seconds[:middle].tolist(), head), balance(seconds[middle:].tolist(), tail)
        return (*both[0], middle, *(middle + cut for cut in both[1]))

    def _best(self, moves: Moves, *, by_memory: bool) -> int:
        """The best move, the first of equal ones: by bytes too many, then by the end of the slowest worker or
        the period, then by the longest stage, which all micro-batches pass, then by the evenness of workers.
        """
        some = np.arange(len(moves))
        if by_memory:
            some = _least(np.maximum(self._over(moves).max(axis=1), 0.0))
            if len(some) == 1:
                return int(some[0])
        turns = self._seconds(moves)
        measures: tuple[Callable[[Ints], Floats], ...] = (
            lambda some: self._period(np.array([done[some].max(axis=1) for done in turns])),
            lambda some: moves.most(self._on_slowest)[some],
            lambda some: np.sum([np.linalg.norm(done[some], axis=1) for done in turns], axis=0),
        )
        for measure in measures:
            if len(some) > 1:
                some = some[_least(measure(some))]
        return int(some[0])

    def _period(self, longest: Floats) -> Floats:
        """Seconds of all turns; of a single one a multiple.

        A turn takes its longest stage once for each micro-batch. If its stages are longer than those of the
        turn before, it reaches each further worker later by the difference. So with as many micro-batches as
        workers all turns take nearly as long as the longest.

        Args:
            longest: seconds of the slowest worker in each turn, ``[turn][cuts]``.
        """
        longer = np.abs(longest - np.roll(longest, 1, axis=0)).sum(axis=0) / 2
        period: Floats = self.passes * longest.sum(axis=0) + (self.placement.workers - 1) * longer
        return period

    def _on_slowest(self, begin: Ints, end: Ints) -> Floats:
        seconds = self._of("seconds")(begin, end)
        return seconds * _slowed(self.placement, self.slowness).most if self.slowness else seconds

    def _over(self, moves: Moves) -> Floats:
        excess: Floats = self._bytes(moves) - np.array(self.usable_bytes)
        return excess

    def _ends(self, cuts: tuple[int, ...]) -> Ints:
        return np.array([0, *cuts, len(self.model.layers)], dtype=np.int64)

    def _excess(self, cuts: tuple[int, ...]) -> float:
        return max(0.0, float(self._over(Moves(self._ends(cuts))).max()))

    def _seconds(self, moves: Moves) -> list[Floats]:
        """Seconds of each worker, by move.

        If synchronous, its earliest end, after its first input, all of its work and its last gradient; if
        asynchronous, its work in the turn of each chunk.
        """
        of_stage, table = self._of("seconds"), self._table
        if not self.synchronous:
            slow = np.array(self.slowness or 1.0)
            turns = [holds * slow for holds in self._turns]
            return [moves.sums(moves.now(of_stage) @ weights, (of_stage, weights)) for weights in turns]
        if self.slowness:
            slowed = _slowed(self.placement, self.slowness)
            weights = self.passes * slowed.holds + slowed.before
            return [moves.sums(moves.now(of_stage) @ weights, (of_stage, weights))]
        until = self._sums["seconds"]
        now = self.passes * (moves.now(of_stage) @ table.holds) + until[moves.ends[table.first]]
        before: OfStages = lambda begin, _end: until[begin]  # noqa: E731 - its type
        return [moves.sums(now, (of_stage, self.passes * table.holds), (before, table.begins))]

    @property
    def _turns(self) -> list[Floats]:
        """Stages that workers run in turn, ``[stage][worker]``: all if synchronous, otherwise each chunk."""
        return [self._table.holds] if self.synchronous else self._table.chunks

    def _bytes(self, moves: Moves) -> Floats:
        ahead, holds = self._ahead, self._table.holds
        fixed, waiting = self._of("fixed"), self._waiting_bytes()

        def of_stage(begin: Ints, end: Ints) -> Floats:
            return fixed(begin, end) + ahead * waiting(begin, end)

        total = moves.sums(moves.now(of_stage) @ holds, (of_stage, holds))
        if self.recompute not in (Recompute.NONE, Recompute.LAYER):  # one at a time is computed again
            total += moves.most(self._of("saved"))[:, np.newaxis]
        total += self._buffer_bytes
        return total

    def _waiting_bytes(self) -> OfStages:
        if not self.recompute.recomputes:
            return self._of("saved")
        if self.recompute is Recompute.LAYER:
            return self._of("inputs")
        inputs = self._sums["each input"]
        return lambda begin, _end: inputs[begin]

    def _of(self, name: str) -> OfStages:
        sums = self._sums[name]
        return lambda begin, end: sums[end] - sums[begin]

    def _fixed(self, layer: LayerProfile) -> float:
        state = self.model.optimizer_states * layer.trained_bytes
        versions = 1 if self.synchronous else 2
        return versions * layer.weights_bytes + layer.buffer_bytes + layer.gradient_bytes + state

    @property
    def _may_fit(self) -> bool:
        """True if some cuts may fit, by two lower bounds of ``_bytes``.

        Each worker holds at least one layer in each of its stages. And of all workers, weighted by any
        numbers, the sum is at most the weighted sum of their memories; each layer is at least in the stage
        where it weighs least. The weights are those with which stages of average layers weigh the same.
        """
        stages, layers, holds = self.placement.stages, len(self.model.layers), self._table.holds
        ahead, usable = self._ahead, np.array(self.usable_bytes) * (1 + _ROUNDING)
        fixed = np.diff(self._sums["fixed"])
        waiting, once = np.zeros(layers), np.zeros(stages)  # of each layer, and of each stage as a whole
        extra = self._buffer_bytes
        if self.recompute in (Recompute.NONE, Recompute.LAYER):
            waiting = np.diff(self._sums["inputs" if self.recompute.recomputes else "saved"])
        else:
            once = ahead * self._sums["each input"][:layers].min()
            extra += float(self._sums["saved"][-1]) / stages  # the largest stage is at least the average
        least_bytes = fixed + ahead[:, np.newaxis] * waiting
        first = np.arange(layers) - np.arange(stages)[:, np.newaxis]  # other stages have a layer each
        least_bytes[(first < 0) | (first > layers - stages)] = math.inf
        if ((least_bytes.min(axis=1) + once) @ holds + extra > usable).any():
            return False
        weights = 1 / ((fixed.mean() + ahead * waiting.mean()) @ holds + 1)
        of_stages = holds @ weights
        least = (
            (of_stages[:, np.newaxis] * least_bytes).min(axis=0).sum()
            + of_stages @ once
            + weights.sum() * extra
        )
        return bool(least <= (weights * usable).sum())

    @property
    def _ahead(self) -> Ints:
        stages = self.placement.stages
        in_flight: Ints = np.minimum(self.passes, stages - np.arange(stages))
        return in_flight

    @property
    def _buffer_bytes(self) -> float:
        return 2 * float(self._sums["largest input"])

    @cached_property
    def _table(self) -> _StageTable:
        return _stage_table(self.placement)

    @cached_property
    def _sums(self) -> dict[str, Floats]:
        key = self.samples, self.recompute.recomputes, self.synchronous
        if key not in self.known:
            self.known[key] = self._summed()
        return self.known[key]

    def _summed(self) -> dict[str, Floats]:
        samples, recomputes = self.samples, self.recompute.recomputes
        outputs = [self.profile.layer(kind).output_bytes for kind in self.model.layers[:-1]]
        inputs = samples * np.array([self.model.input_bytes, *outputs])
        rows: dict[str, Any] = {"inputs": inputs}
        for name, of in (
            ("seconds", lambda layer: _seconds(layer, samples, recomputed=recomputes)),
            ("fixed", self._fixed),
            ("saved", lambda layer: layer.saved(samples)),
        ):
            by_kind = {kind: of(self.profile.layer(kind)) for kind in set(self.model.layers)}
            rows[name] = [by_kind[kind] for kind in self.model.layers]
        sums = {name: np.concatenate(([0.0], np.cumsum(row))) for name, row in rows.items()}
        return sums | {
            "each seconds": np.array(rows["seconds"]),
            "each input": np.append(inputs, 0.0),
            "largest input": inputs[1:].max(initial=0.0),
        }


def _seconds(layer: LayerProfile, samples: float, *, recomputed: bool) -> float:
    lines = layer.lines()
    return (1 + recomputed) * lines[OpKind.FORWARD].at(samples) + lines[OpKind.BACKWARD].at(samples)


def _longest(seconds: Floats, stages: int) -> Floats:
    """Minimum of the longest of this many stages, by the number of first layers that they contain."""
    ends = np.concatenate(([0.0], np.cumsum(seconds)))
    longest = ends
    for _ in range(stages - 1):
        # The last stage begins where it stops being longer than all before it, or a layer earlier.
        begin = np.searchsorted(longest + ends, ends)
        longest = np.minimum(longest[begin], ends - ends[np.maximum(begin - 1, 0)])
    return longest


def _least(values: Floats) -> Ints:
    return np.flatnonzero(values <= values.min() * (1 + _ROUNDING))


@dataclass(frozen=True, slots=True)
class _StageTable:
    """Stages by worker.

    Attributes:
        stages: stages of each worker.
        first: its first one.
        holds: ``[stage][worker]``: how often the worker holds the stage.
        begins: ``[stage][worker]``: 1 for its first stage.
        chunks: ``holds`` of each chunk.
    """

    stages: list[list[int]]
    first: list[int]
    holds: Floats
    begins: Floats
    chunks: list[Floats]


@lru_cache(maxsize=256)
def _stage_table(placement: Placement) -> _StageTable:
    stages: list[list[int]] = [[] for _ in range(placement.workers)]
    chunks: list[Floats] = []
    for pipe in placement.pipes_stages:
        earlier = [0] * placement.workers
        for stage, worker in enumerate(pipe):
            stages[worker].append(stage)
            if earlier[worker] == len(chunks):
                chunks.append(np.zeros((placement.stages, placement.workers)))
            chunks[earlier[worker]][stage, worker] += 1
            earlier[worker] += 1
    holds = np.sum(chunks, axis=0)
    first = [min(pipe) for pipe in stages]
    begins = np.zeros_like(holds)
    begins[first, np.arange(placement.workers)] = 1.0
    return _StageTable(stages, first, holds, begins, chunks)


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
    first = _stage_table(placement).first
    slow = np.array(slowness)
    before = np.zeros((placement.stages, placement.workers))
    most = np.zeros(placement.stages)
    for holders in placement.pipes_stages:
        most = np.maximum(most, slow[list(holders)])
        for stage, worker in enumerate(holders):
            if stage == first[worker]:
                before[:stage, worker] = slow[list(holders[:stage])]
    return _Slowed(_stage_table(placement).holds * slow, before, most)
