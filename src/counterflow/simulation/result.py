"""Result of a simulation: times, bubbles, activations, weight copies, memory.

Invariant: everything here follows from the schedule, its costs, and the start and end of each op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np

from counterflow.program.player import Floats, Ints
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.residency import weight_copies

from .costs import ByteCosts, Costs
from .memory import MemoryUse, memory_use, peaks_of
from .periods import measured_period_seconds, period_ops, period_seconds
from .slack import slack_of
from .steady import steady_step_seconds, with_statistics, with_ties
from .timed_schedule import Played, TimedSchedule


@dataclass(frozen=True, slots=True)
class Span:
    """One op as it ran. Times in seconds."""

    worker: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """A gradient sync as it ran in parallel with the compute of a worker, in the unit of the costs."""

    worker: int
    stage: int
    period: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """A message from ``maker`` to ``taker``, on its link from ``start`` to ``end``, in seconds."""

    maker: Op
    taker: Op
    sender: int
    receiver: int
    start: float
    end: float


class Cause(Enum):
    """Cause of a time in which a worker has no op to run; ``Bubbles`` describes each."""

    WARM_UP = "warm-up"
    DEPENDENCY = "dependency"
    MESSAGE = "message"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which a worker has no op to run, for one reason. Times in seconds."""

    worker: int
    start: float
    end: float
    cause: Cause


@dataclass(frozen=True, slots=True)
class Bubbles:
    """A worker's idle time by cause; together they are its ``idle``.

    Attributes:
        warm_up: before its first op.
        dependency: between ops, until the input of the next op is computed.
        message: between ops, until that input is received, or while the worker is busy sending.
        drain: after its last op, until the makespan.
    """

    warm_up: float
    dependency: float
    message: float
    drain: float


class Simulation:
    """A schedule simulated with costs by ``simulate``, or with measured times."""

    _repr_svg_: ClassVar[Callable[[Simulation], str | None]]
    """The timeline in a notebook; ``drawing``, which imports this module, defines it."""

    def __init__(
        self,
        model: TimedSchedule,
        costs: Costs,
        played: Played,
        *,
        measured: bool = False,
        makespan: float | None = None,
    ) -> None:
        self.schedule: Schedule = model.schedule
        self.costs = costs
        self.start = played.start
        """Start of each op, worker by worker in order, in seconds."""
        self.end = played.end
        """End of each op, worker by worker in order, in seconds."""
        self.model = model
        """The schedule prepared for timing, shared by simulations of one schedule."""
        self._played = played
        self._measured = measured
        self._makespan = makespan
        self._syncs = played.syncs
        self._sent, self._arrived, self._released = played.sent, played.arrived, played.released

    def __repr__(self) -> str:
        return (
            f"<Simulation of {self.schedule}: makespan {self.makespan:.6g}, bubbles {self.bubble_ratio:.1%}>"
        )

    @cached_property
    def makespan(self) -> float:
        """From the start to the end of the last op or sum, with the agreement after it; seconds."""
        if self._makespan is not None:
            return self._makespan
        last = max(float(self.end.max()), 0.0) if len(self.end) else 0.0
        summed = max(last, float(self._syncs[:, 3].max()) if len(self._syncs) else 0.0)
        if not self.schedule.synchronous:
            return summed
        if not self.costs.ties and self.costs.statistics == 0.0:
            return summed + self.costs.agreement
        tied = with_ties(self.schedule, self.costs, self._end_times)
        agreed = np.full_like(tied, tied.max() + self.costs.agreement)
        return float(with_statistics(self.schedule, self.costs, agreed).max())

    @property
    def _end_times(self) -> Floats:
        first = self.model.first
        ends = np.array([self.end[stop - 1] if stop > begin else 0.0 for begin, stop in pairwise(first)])
        for _, stage, _, until in self._syncs.tolist():
            members = [worker for _, worker in self.schedule.placement.copies(int(stage))]
            ends[members] = np.maximum(ends[members], until)
        return ends

    @cached_property
    def gradients_made(self) -> tuple[float, ...]:
        """Time at which the last copy of each stage of a synchronous schedule has its gradients."""
        first, released = self.model.first, self._released
        return tuple(
            max((float(released[first[w] + last]) for w, last in sync.last if last is not None), default=0.0)
            for sync in self.model.gradient_syncs
        )

    @cached_property
    def op_times(self) -> tuple[list[float], list[float]]:
        """Start of every op and the time when its worker continues, by which gradient syncs are placed; with
        ``eager-opt`` as if messages took no time.
        """
        if self._measured:
            return self.start.tolist(), self._released.tolist()
        return self.model.placing_times(
            self.costs, self.model.seconds(self.costs), self.start, self._released
        )

    @property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """For each op the ops whose products it takes, numbered among all ops, worker by worker in order."""
        return self.model.needs

    @cached_property
    def slack(self) -> tuple[float, ...] | None:
        """Seconds by which each op could end later without delaying the last op; 0: it is critical.

        None if unknown: for a measured timeline, or if ops wait for gradient syncs.
        """
        seconds = None if self._measured else slack_of(self.model, self.costs, self._played)
        return None if seconds is None else tuple(seconds.tolist())

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Seconds from each worker's first start to its last end."""
        spans = []
        for first, stop in pairwise(self.model.first):
            spans.append(float(self.end[stop - 1] - self.start[first]) if stop > first else 0.0)
        return tuple(spans)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Periods in which each worker has no op to run, and why, by worker and time."""
        pieces = (
            Gap(worker, start, end, cause)
            for worker, (first, stop) in enumerate(pairwise(self.model.first))
            for start, end, cause in self._pieces(first, stop)
        )
        return tuple(gap for gap in pieces if gap.end > gap.start)

    def _pieces(self, first: int, stop: int) -> Iterator[tuple[float, float, Cause]]:
        """The gaps of the worker whose ops are those from ``first`` to ``stop``; some have no length."""
        if stop == first:
            yield 0.0, self.makespan, Cause.WARM_UP
            return
        yield 0.0, float(self.start[first]), Cause.WARM_UP
        computed, received = self._input_times
        nodes = self._computed[(self._computed >= first) & (self._computed < stop)]
        waits = np.flatnonzero(self.start[nodes[1:]] > self.end[nodes[:-1]])
        for last, node in zip(nodes[waits].tolist(), nodes[waits + 1].tolist(), strict=True):
            before, begins = float(self.end[last]), float(self.start[node])
            sent = min(max(before, float(self._released[last])), begins)
            departed = min(max(sent, float(computed[node])), begins)
            arrived = min(max(departed, float(received[node])), begins)
            yield before, sent, Cause.MESSAGE
            yield sent, departed, Cause.DEPENDENCY
            yield departed, arrived, Cause.MESSAGE
            # A wait on its own worker's lanes is for an update.
            yield arrived, begins, Cause.DEPENDENCY
        yield float(self.end[stop - 1]), self.makespan, Cause.DRAIN

    @cached_property
    def _input_times(self) -> tuple[Floats, Floats]:
        """For each op, when its inputs from messages were computed and when they were received; 0 if it has
        none.
        """
        messages = self.model.messages
        computed, received = np.zeros(len(self.start)), np.zeros(len(self.start))
        np.maximum.at(computed, messages.needed_by, self.end[messages.sent_after])
        np.maximum.at(received, messages.needed_by, self._arrived)
        return computed, received

    @cached_property
    def bubbles(self) -> tuple[Bubbles, ...]:
        """Each worker's idle time by cause: the sums of ``gaps``."""
        sums = [dict.fromkeys(Cause, 0.0) for _ in range(self.schedule.workers)]
        for gap in self.gaps:
            sums[gap.worker][gap.cause] += gap.end - gap.start
        return tuple(Bubbles(*(by_cause[cause] for cause in Cause)) for by_cause in sums)

    @cached_property
    def messages(self) -> tuple[MessageSpan, ...]:
        """Every message between two workers, in the order of the ops that make them."""
        messages, ops = self.model.messages, self.model.ops
        rows = zip(
            messages.makers.tolist(),
            messages.takers.tolist(),
            messages.senders.tolist(),
            messages.receivers.tolist(),
            self._sent.tolist(),
            self._arrived.tolist(),
            strict=True,
        )
        return tuple(MessageSpan(ops[m], ops[t], s, r, start, end) for m, t, s, r, start, end in rows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each worker computes."""
        nodes = self._computed
        seconds = np.bincount(
            self.model.worker[nodes],
            weights=self.end[nodes] - self.start[nodes],
            minlength=self.schedule.workers,
        )
        return tuple(seconds.tolist())

    @cached_property
    def _computed(self) -> Ints:
        nodes = np.arange(len(self.model.ops))
        lanes = self.model.lane_lists
        return nodes if lanes is None else np.delete(nodes, lanes.ops)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds until the makespan in which each worker has no op to run."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble_ratio(self) -> float:
        """Idle time over makespan, averaged over workers."""
        if not self.makespan:
            return 0.0
        return sum(self.idle) / (self.makespan * self.schedule.workers)

    @cached_property
    def steady_bubble_ratio(self) -> float | None:
        """Bubble ratio over whole steady periods of an asynchronous schedule; None if it has none.

        If they are too few to determine the steady step, the ratio is that of the played periods.
        """
        if self.schedule.steady is None:
            return None
        first = self.model.first
        idle = total = 0.0
        if self.steady_step is not None and not self._measured:
            for worker, (begin, _) in enumerate(self.schedule.steady):
                nodes = slice(
                    first[worker] + begin, first[worker] + begin + period_ops(self.schedule, worker)
                )
                idle += self.steady_step - float((self.end[nodes] - self.start[nodes]).sum())
            total = self.steady_step * self.schedule.workers
            return max(0.0, idle / total) if total else 0.0
        for worker, (begin, stop) in enumerate(self.schedule.steady):
            nodes = slice(first[worker] + begin, first[worker] + stop)
            window = float(self.end[nodes][-1] - self.start[nodes][0])
            total += window
            idle += window - float((self.end[nodes] - self.start[nodes]).sum())
        return max(0.0, idle / total) if total else 0.0

    @cached_property
    def steady_step(self) -> float | None:
        """Seconds that a step adds if steps follow each other without a barrier.

        Updates wait only for their own stages' gradients (``steady_step_clipped``: for those of all stages).
        In asynchronous schemes None if there are too few periods to determine it.
        """
        if not self.schedule.synchronous:
            if self._measured:
                return measured_period_seconds(self.schedule, self.start)
            return period_seconds(self.model, self.costs, self._played)
        return steady_step_seconds(self.model, self.costs, self._played)

    @cached_property
    def steady_step_clipped(self) -> float | None:
        """The steady step if every update waits for the gradient norm of all stages, which clipping needs.

        In asynchronous schemes each stage is clipped by its own norm, and nothing waits.
        """
        if not self.schedule.synchronous:
            return self.steady_step
        return steady_step_seconds(self.model, self.costs, self._played, norm=True)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Maximum forwards stashed at once on each worker, in (stage x micro-batch) units."""
        return self.model.peak_activations

    @cached_property
    def weight_copies(self) -> tuple[int, ...]:
        """Maximum stages that each worker holds at once, versions counted."""
        return weight_copies(self.schedule)

    @cached_property
    def timeline(self) -> tuple[Span, ...]:
        """Every op with its times, worker by worker in order."""
        start, end = self.start.tolist(), self.end.tolist()
        rows = zip(self.model.worker.tolist(), self.model.ops, start, end, strict=True)
        return tuple(Span(*row) for row in rows)

    @cached_property
    def syncs(self) -> tuple[SyncSpan, ...]:
        """The gradient syncs that took time, once for every worker that takes part."""
        return tuple(
            SyncSpan(worker, int(stage), int(period), start, end)
            for period, stage, start, end in self._syncs.tolist()
            for worker in sorted({w for _, w in self.schedule.placement.copies(int(stage))})
        )

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...] | None:
        """Each worker's memory over time; None if no byte costs were given."""
        if self.costs.memory is None:
            return None
        return self._memory_use(self.costs)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Maximum memory of each worker in bytes; None if no byte costs were given."""
        if self.costs.memory is None:
            return None
        return peaks_of(self.model.first, self.model.changes(self.costs))

    @cached_property
    def activations_over_time(self) -> tuple[MemoryUse, ...]:
        """Stashed forwards of each worker over time, in (stage x micro-batch) units, not bytes."""
        units = Costs(memory=ByteCosts(activations=1.0))
        return self._memory_use(units)

    def _memory_use(self, costs: Costs) -> tuple[MemoryUse, ...]:
        changes = self.model.changes(costs)
        return memory_use(self.model.first, changes, self.start.tolist(), self.end.tolist())
