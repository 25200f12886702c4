"""Boundaries of the mini-batches of an asynchronous schedule on each worker, and the segments between.

Invariant: a message is sent and its receive posted in the same segment, so nothing is awaited from a period
that may never begin.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from counterflow.errors import ScheduleError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, Schedule

from .actions import Action, ClipStage, Compute, Matching, Program, StartSync, Update, WaitSync
from .lowering import (
    Shared,
    compute_actions,
    freeing,
    messages,
    statistics_sums,
    unit_times,
    with_syncs,
    with_updates,
)
from .shifts import shifted

Tagged = tuple[int, Action]
"""The segment an action belongs to, and the action."""

Gaps = list[dict[int, list[Tagged]]]
"""For each worker, the actions before its op number i (i = number of ops: at the end)."""


class MiniBatchCuts:
    """A schedule, and where its mini-batches begin on each worker."""

    def __init__(self, schedule: Schedule, replicas: int, matching: Matching, shared: Shared) -> None:
        self.schedule = schedule
        self.empty = Program(schedule, (), replicas, matching=matching)
        self.shared = shared
        self.bounds = [self._bounds(order) for order in schedule.orders]
        self.graph = OpGraph(schedule)
        _, self.ends = times = unit_times(self.graph)
        gaps = _posted(self.graph, self.ends, self.bounds, matching)
        program = self._updated(self.graph, times)
        for worker, actions in enumerate(program.actions):
            for index, action in _other_actions(actions):
                number = self._number_of(worker, index, action, program.needs_sync)
                gaps[worker][index].append((number, action))
        self.segments = [self._segment(gaps, number) for number in range(schedule.periods)]
        """What every worker runs when it has each mini-batch; the last one includes the drain."""

    def _updated(self, graph: OpGraph, times: tuple[list[int], list[int]]) -> Program:
        program = replace(self.empty, schedule=graph.schedule, actions=compute_actions(graph.schedule))
        return with_updates(with_syncs(program, times))

    def _bounds(self, order: Sequence[Op]) -> list[int]:
        first: dict[int, int] = {}
        for index, op in enumerate(order):
            first.setdefault(self.schedule.period_of(op), index)
        bounds = [first[period] for period in range(self.schedule.periods)]
        if bounds[0] or bounds != sorted(bounds):
            raise ScheduleError(
                f"{self.schedule}: periods must begin one after another on every worker; in one order they "
                "begin at the "
                f"ops {', '.join(map(str, bounds))}"
            )
        return [*bounds, len(order)]

    def _number_of(self, worker: int, index: int, action: Action, needs_sync: bool) -> int:
        """The segment of a sync or an update before op ``index``.

        At the end of a segment, waits belong to the next segment and everything else to this one.
        """
        number = bisect_right(self.bounds[worker], index) - 1
        if number == self.schedule.periods:  # at the end of all
            return number - 1
        waits = needs_sync and not isinstance(action, StartSync)
        return number - (index == self.bounds[worker][number] and not waits)

    # -- segments

    def _segment(self, gaps: Gaps, number: int) -> Program:
        rows = []
        for worker, order in enumerate(self.schedule.orders):
            start, stop = self.bounds[worker][number : number + 2]
            rows.append(tuple(_woven(order, gaps[worker], start, stop, number)))
        return self._program(rows)

    def _program(self, rows: Sequence[tuple[Action, ...]]) -> Program:
        return replace(self.empty, actions=tuple(rows))

    def repeats_from(self) -> int | None:
        """The first segment that all later ones repeat; None if no segment does in these periods."""
        count = self.schedule.micro_batches
        same = [
            after.actions == tuple(tuple(shifted(a, 1, count) for a in row) for row in segment.actions)
            for segment, after in pairwise(self.segments[:-1])
        ]
        first = len(same)
        while first and same[first - 1]:
            first -= 1
        return first if first < len(same) else None

    def drain(self, number: int) -> Program:
        """The rest of the work after segment ``number`` if nothing follows."""
        count = number + 1
        orders = tuple(
            tuple(op for op in order if self.schedule.period_of(op) < count) for order in self.schedule.orders
        )
        workload = self.schedule.workload.of_periods(count)
        short = replace(self.schedule, workload=workload, orders=orders, steady=None)
        graph = OpGraph(short)
        times = unit_times(graph)
        begins = [self.bounds[worker][count] for worker in range(short.workers)]
        cut = [[*bounds[: count + 1], len(order)] for bounds, order in zip(self.bounds, orders, strict=True)]
        gaps = _posted(graph, times[1], cut, self.empty.matching)
        rows = []
        for worker, actions in enumerate(self._updated(graph, times).actions):
            before = [action for program in self.segments[:count] for action in program.actions[worker]]
            done = {_named(action) for action in before}
            for index, action in _other_actions(actions):
                if _named(action) not in done:
                    gaps[worker][index].append((count, action))
            row = _woven(orders[worker], gaps[worker], begins[worker], len(orders[worker]), count)
            averages = statistics_sums(self.empty, worker, self.shared, period=number)
            rows.append((*freeing(before, list(row)), *averages))
        return self._program(rows)

    # -- what is known of all segments

    def update_lag(self, number: int) -> int:
        """Number of segments from a period's own to the one with its last update."""
        rows = self.segments[number].actions
        return max(number + 1 - a.version for row in rows for a in row if isinstance(a, Update))

    def spread(self, number: int) -> int:
        """Number of segments until the slowest worker has ended what the fastest has."""
        first, second = (
            [self.ends[self.graph.first[w] + bounds[k + 1] - 1] for w, bounds in enumerate(self.bounds)]
            for k in (number, number + 1)
        )
        period = max(late - early for early, late in zip(first, second, strict=True))
        return max(1, math.ceil((max(first) - min(first)) / period))


def _posted(graph: OpGraph, ends: Sequence[int], bounds: Sequence[Sequence[int]], matching: Matching) -> Gaps:
    gaps: Gaps = [defaultdict(list) for _ in bounds]
    for worker, index, number, action in messages(graph, ends, bounds, matching):
        gaps[worker][index].append((number, action))
    return gaps


def _other_actions(actions: Iterable[Action]) -> Iterator[tuple[int, Action]]:
    index = 0
    for action in actions:
        if isinstance(action, Compute):
            index += 1
        else:
            yield index, action


def _woven(
    order: Sequence[Op], gaps: dict[int, list[Tagged]], start: int, stop: int, number: int
) -> Iterator[Action]:
    for index in range(start, stop + 1):
        yield from (action for tag, action in gaps.get(index, ()) if tag == number)
        if index < stop:
            op = order[index]
            yield Compute(op)


def _named(action: Action) -> tuple[type[Action], int, int] | None:
    match action:
        case Update(stage, version, _):
            return Update, stage, version
        case StartSync(stage, period) | WaitSync(stage, period) | ClipStage(stage, period):
            return type(action), stage, period
        case _:
            return None
