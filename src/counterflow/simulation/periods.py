"""The time that an update adds in an asynchronous scheme: the duration of a period once all are alike.

The steady part of a schedule repeats one period. It determines which op, message or sync of a period waits
for which one of the same or an earlier period. The duration of a period is the largest ratio of a circle of
these waits (``cycle_ratio.py``), so it is exact however few periods are played, and independent of their
beginning.

Invariant: except for measured timelines nothing is derived from times, because a play has a beginning and an
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from counterflow.program.player import Floats, Ints
from counterflow.schedule.ir import Schedule

from .cycle_ratio import largest_cycle_ratio
from .waits import Waits, waits_of

if TYPE_CHECKING:
    from .costs import Costs
    from .timed_schedule import Played, TimedSchedule

_NONE = -1_000_000
"""Period of ops that belong to no whole period."""


def period_ops(schedule: Schedule, worker: int) -> int:
    """Number of ops of a worker in a period; asynchronous schemes have no doubled or halved ops."""
    ops = 3 if schedule.workload.recomputes else 2
    return ops * schedule.micro_batches * sum(1 for _ in schedule.placement.stages_on(worker))


def whole_periods(schedule: Schedule) -> int:
    """Number of whole periods in the steady part of an asynchronous schedule, on the worker with the
    fewest.
    """
    if schedule.steady is None:
        return 0
    return min(
        (stop - begin) // period_ops(schedule, worker) for worker, (begin, stop) in enumerate(schedule.steady)
    )


def period_seconds(model: TimedSchedule, costs: Costs, played: Played) -> float | None:
    """Seconds from one update to the next in the steady state.

    If gradient syncs share a way out of a node, a period takes at least the sum of their times on it; other
    traffic on it is not counted.

    Returns:
        None: there are too few whole periods to see a repetition, or the steady part does not repeat.
    """
    schedule = model.schedule
    if whole_periods(schedule) < 3:
        return None
    slowed = costs.sync_slowdown and len(played.syncs)
    ready = model.ready(costs, played.end - played.start if slowed else model.seconds(costs))
    waits = waits_of(ready.lists, ready.lasting)
    syncs = model.awaited.syncs if model.synced(costs) else []
    of_ops = _of_ops(schedule, model.first)
    of_messages = _of_messages(model.messages.makers, *of_ops) if ready.links else _of_none()
    ends = [model.first[sync.last[0][0]] + (sync.last[0][1] or 0) for sync in syncs]
    last_slot = max(int(of_ops[1].max(initial=0)), int(of_messages[1].max(initial=0)))
    stages = np.array([sync.stage for sync in syncs], dtype=np.int64)
    of_syncs = of_ops[0][np.array(ends, dtype=np.int64)], last_slot + 1 + stages
    period, slot = map(np.concatenate, zip(of_ops, of_syncs, of_messages, strict=True))
    lasts = _mean(waits.lasts, period, slot) if slowed else waits.lasts
    repeated = _repeated(waits, period, slot, whole_periods(schedule) - 1)
    if repeated is None:
        return None
    source, taker, lag, which = repeated
    seconds = lasts[waits.source[which]] + waits.delay[which]
    least = largest_cycle_ratio(source, taker, seconds, lag)
    carried: dict[int, float] = {}
    for ways, crossing in (costs.sync_crossings or ()) if len(syncs) else ():
        for way in ways:
            carried[way] = carried.get(way, 0.0) + crossing
    return max([least, *carried.values()])


def measured_period_seconds(schedule: Schedule, start: Floats) -> float | None:
    """The duration of a period in measured ops: on the slowest worker, the mean over the periods after the
    first.
    """
    if whole_periods(schedule) < 3:
        return None
    assert schedule.steady is not None
    slowest, first = 0.0, 0
    for worker, (begin, stop) in enumerate(schedule.steady):
        length = period_ops(schedule, worker)
        periods = (stop - begin) // length - 2
        node = first + begin + length
        slowest = max(slowest, float(start[node + periods * length] - start[node]) / periods)
        first += len(schedule.orders[worker])
    return slowest


def _of_ops(schedule: Schedule, first: list[int]) -> tuple[Ints, Ints]:
    """The period of each op, and its number among the ops of a period of all workers."""
    assert schedule.steady is not None
    period = np.full(first[-1], _NONE, dtype=np.int64)
    slot = np.zeros(first[-1], dtype=np.int64)
    before = 0
    for worker, (begin, stop) in enumerate(schedule.steady):
        length = period_ops(schedule, worker)
        place = np.arange((stop - begin) // length * length)
        nodes = slice(first[worker] + begin, first[worker] + begin + len(place))
        period[nodes] = place // length
        slot[nodes] = before + place % length
        before += length
    return period, slot


def _of_messages(makers: Ints, period: Ints, slot: Ints) -> tuple[Ints, Ints]:
    """The period of each message, which is its op's, and its number among the messages of a period."""
    number = np.arange(len(makers))
    if len(makers):
        begins = np.concatenate(([True], makers[1:] != makers[:-1]))
        number -= number[begins][np.cumsum(begins) - 1]
    ops = int(slot.max()) + 1
    return period[makers], ops + number * ops + slot[makers]


def _of_none() -> tuple[Ints, Ints]:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


def _mean(lasts: Floats, period: Ints, slot: Ints) -> Floats:
    inside = period >= 0
    # Over all periods: in the first ones ops overlap with other syncs.
    total = np.bincount(slot[inside], weights=lasts[inside], minlength=int(slot.max()) + 1)
    count = np.bincount(slot[inside], minlength=len(total))
    means = lasts.copy()
    means[inside] = (total / np.maximum(count, 1))[slot[inside]]
    return means


def _repeated(waits: Waits, period: Ints, slot: Ints, last: int) -> tuple[Ints, Ints, Ints, Ints] | None:
    """For each wait in a period: slots of source and taker, periods between them, and its number.

    They are read from the last period that all workers have, if it is like the one before.
    """
    rows = []
    for at in (last - 1, last):
        which = np.flatnonzero(period[waits.taker] == at)
        source, taker = waits.source[which], waits.taker[which]
        if (period[source] == _NONE).any():
            return None
        lag = at - period[source]
        order = np.lexsort((lag, slot[source], slot[taker]))
        rows.append((slot[source][order], slot[taker][order], lag[order], which[order]))
    same = all(np.array_equal(row, previous) for row, previous in zip(rows[0][:3], rows[1][:3], strict=True))
    return rows[1] if same else None
