"""Gradient syncs: which replicas of a stage are summed, when each may begin, and what waits for it.

Invariant: two workers that take part in the same two syncs start them in the same order, so collectives of
different process groups cannot block each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from counterflow.schedule.ir import Product, Schedule
from counterflow.schedule.modes import Sync

_ROUNDING = 1e-9
"""Share of all ops' time up to which an idle time is a difference of rounded sums."""


@dataclass(frozen=True, slots=True)
class GradientSync:
    """The sum of one stage's gradients of one period over all its replicas.

    ``last`` has, for each worker that holds a copy, its last backward of the stage in the period as an index
    into the worker's order; None if no micro-batch of the period passes that replica (there are fewer
    micro-batches than pipes), which then takes part with zeros.
    """

    period: int
    stage: int
    last: tuple[tuple[int, int | None], ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that take part, ascending."""
        return tuple(worker for worker, _ in self.last)


@dataclass(frozen=True, slots=True)
class PlannedSync:
    """A sync with its place: ``starts`` has (worker, ops run before it starts there).

    ``ready`` is the moment at which the last worker starts its part.
    """

    sync: GradientSync
    ready: float
    starts: tuple[tuple[int, int], ...]


def needs_sync(schedule: Schedule, replicas: int) -> bool:
    """True if stages have several replicas, so their gradients have to be summed."""
    return replicas > 1 or schedule.pipes > 1


def gradient_syncs(schedule: Schedule) -> tuple[GradientSync, ...]:
    """The syncs of every stage and period, by period, then stage, whatever the number of copies."""
    last: dict[tuple[int, int, int], int] = {}
    for worker, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            if Product.WEIGHT_GRADIENTS in op.kind.makes:
                last[schedule.period_of(op), op.stage, worker] = index
    holders = [
        sorted({worker for _, worker in schedule.placement.copies(stage)}) for stage in range(schedule.stages)
    ]
    return tuple(
        GradientSync(period, stage, tuple((w, last.get((period, stage, w))) for w in holders[stage]))
        for period in range(schedule.periods)
        for stage in range(schedule.stages)
    )


def by_last_backward(schedule: Schedule) -> list[GradientSync]:
    """The syncs by period; within a period in the order of their last backwards."""

    def place(sync: GradientSync) -> tuple[int, int, int]:
        return sync.period, max((last for _, last in sync.last if last is not None), default=-1), sync.stage

    return sorted(gradient_syncs(schedule), key=place)


def plan_syncs(
    schedule: Schedule,
    mode: Sync,
    start: Sequence[float],
    end: Sequence[float],
    syncs: Sequence[GradientSync] | None = None,
) -> list[PlannedSync]:
    """The syncs of a synchronous schedule in the one order in which all workers start them.

    Args:
        schedule: a synchronous schedule.
        mode: ``eager-opt`` starts a worker's part early only if the worker idles between its last
            backward of the stage and its last op; the given times decide.
        start: start of each op, worker by worker in order; for ``eager-opt`` if messages take no time, so
            that waiting for one is no bubble.
        end: end of each op, in the same unit; including its message if the worker is busy with it.
        syncs: result of ``gradient_syncs`` for the schedule, if it is known already.

    Source: Chimera section 3.2, Figure 4.
    """
    planned = []
    begins = [0, *accumulate(map(len, schedule.orders))]
    gaps = _last_gaps(begins, start, end) if mode is Sync.EAGER_OPT else []
    for sync in gradient_syncs(schedule) if syncs is None else syncs:
        starts, ready = [], 0.0
        for worker, last in sync.last:
            first, stop = begins[worker : worker + 2]
            before = stop - first
            # Eager-opt: a worker that idles before one of its remaining ops starts its part at once.
            eager = mode is Sync.EAGER or (
                mode is Sync.EAGER_OPT and last is not None and gaps[worker] > last
            )
            if last is not None and eager:
                before = last + 1
            starts.append((worker, before))
            if before:
                ready = max(ready, float(end[first + before - 1]))
        planned.append(PlannedSync(sync, ready, tuple(starts)))
    # By the moment at which all replicas are ready; at equal moments later stages first, as backwards do.
    planned.sort(key=lambda p: (p.ready, -p.sync.stage))
    return _in_one_order(planned)


def _last_gaps(begins: Sequence[int], start: Sequence[float], end: Sequence[float]) -> list[int]:
    """The last place of each worker's order before which the worker idles; 0 if it never idles after its
    first op.
    """
    gaps = []
    rounding = _ROUNDING * max(end, default=0.0)
    for first, stop in pairwise(begins):
        node = stop - 1
        while node > first and start[node] <= end[node - 1] + rounding:
            node -= 1
        gaps.append(max(0, node - first))
    return gaps


def _in_one_order(planned: list[PlannedSync]) -> list[PlannedSync]:
    at: dict[int, int] = {}
    ordered = []
    for item in planned:
        starts = []
        for worker, before in item.starts:
            at[worker] = max(before, at.get(worker, 0))
            starts.append((worker, at[worker]))
        ordered.append(PlannedSync(item.sync, item.ready, tuple(starts)))
    return ordered


def first_users(schedule: Schedule) -> dict[tuple[int, int, int], int]:
    """For each (worker, stage, update): the first op of the worker's order that must wait for it.

    Update t of a stage applies the gradients of period t and makes version t + 1. It must be done before an
    op that uses that version or a later one, and before the first backward of a later period, which needs the
    gradients' memory. Updates that nothing waits for are omitted.
    """
    users: dict[tuple[int, int, int], int] = {}
    for worker, order in enumerate(schedule.orders):
        done: dict[int, int] = {}
        for index, op in enumerate(order):
            needed = op.version
            if Product.WEIGHT_GRADIENTS in op.kind.makes:
                needed = max(needed, schedule.period_of(op))
            for update in range(done.get(op.stage, 0), needed):
                users[worker, op.stage, update] = index
            done[op.stage] = max(needed, done.get(op.stage, 0))
    return users
