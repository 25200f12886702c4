"""An asynchronous schedule cut into segments at its mini-batches; a trainer runs one segment per step.

Segment k contains what every worker can do once it has mini-batch k: its ops up to the first one of period k
+ 1. From some k on the segments differ only in their numbers, so training can continue without limit. A drain
is the rest of the work after segment k if no mini-batch follows.

Invariant: segments 0 to k and the drain after k, one after another, are a program of the same scheme with k +
1 periods, which the checker accepts; this is checked here, up to one repetition of the last segment. A
message is sent and its receive posted in the same segment, so nothing is awaited from a period that may never
begin.

At a segment's end a worker reports loss and norm of the period whose last update is made by then, and waits
for the reports of a period so much older that the slowest worker has reported it too, so nobody really waits.
The steps of a synchronous schedule are segments as well (``steps``): all are the same list.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from counterflow.errors import ConfigError, ScheduleError
from counterflow.schedule import registry
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, Schedule

from .actions import (
    Action,
    ClipStage,
    Compute,
    GatherAction,
    GradientAction,
    Matching,
    Message,
    Program,
    Receive,
    Send,
    StartGather,
    StartSync,
    Summed,
    SyncAction,
    Update,
    WaitGather,
    WaitSync,
)
from .lowering import (
    NOTHING_SHARED,
    Ends,
    Shared,
    compute_actions,
    freeing,
    messages,
    statistics_sums,
    unit_times,
    with_syncs,
    with_updates,
)
from .rules import (
    AGREED,
    COMPUTES,
    DEADLOCK_HOLDING,
    DEADLOCK_RENDEZVOUS,
    MESSAGES,
    POSTED,
    PROMISED,
    RULES,
    SUMS,
    SYNCS,
    VERSIONS,
    Subject,
    require,
)

TOGETHER = 8
"""Micro-batches whose loss and norm are gathered at once: a gather costs as much as an op's messages."""

Tagged = tuple[int, Action]
"""The segment an action belongs to, and the action."""

Gaps = list[dict[int, list[Tagged]]]
"""For each worker, the actions before its op number i (i = number of ops: at the end)."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments that workers run as mini-batches arrive.

    Attributes:
        schedule: the schedule that was cut.
        steady: the segments, by mini-batches since the pipeline was empty; the last one repeats.
        drains: the drain after each segment; empty if nothing is ever left.
        together: number of periods whose loss and norm are gathered at once.
    """

    schedule: Schedule
    steady: tuple[Program, ...]
    drains: tuple[Program, ...]
    together: int = 1

    @property
    def last(self) -> int:
        """The number of the segment that repeats."""
        return len(self.steady) - 1

    @property
    def periods_in_flight(self) -> int:
        """Maximum number of periods with unfinished work at once, including the newest."""
        return 1 + max(
            number - self.schedule.period_of(op)
            for programs in (self.steady, self.drains)
            for number, program in enumerate(programs)
            for actions in program.actions
            for op in _ops(actions)
        )

    def program(self, periods: int) -> Program:
        """All actions of a training of some periods, including the drain at its end.

        >>> from counterflow.schedule.schemes import pipedream
        >>> print(*segments(pipedream(stages=2)).program(1).actions[0], sep="; ")
        Forward F0.0; SendActivation F0.0 to worker 1; ReceiveGradient B0.1 from worker 1; \
Backward B0.0; Clip stage 0, period 0; Update stage 0 to version 1; \
StartGather loss, norm and copies of period 0; WaitGather loss, norm and copies of period 0
        """
        parts = [self.steady[min(k, self.last)] for k in range(periods)]
        shifts = [max(0, k - self.last) for k in range(periods)]
        parts.append(self.drains[min(periods - 1, self.last)])
        shifts.append(shifts[-1])
        count = self.schedule.micro_batches
        actions = tuple(
            tuple(
                moved
                for part, shift in zip(parts, shifts, strict=True)
                for action in part.actions[worker]
                if not _of_nothing(moved := shifted(action, shift, count))
            )
            for worker in range(self.schedule.workers)
        )
        orders = tuple(tuple(_ops(row)) for row in actions)
        workload = self.schedule.workload.of_periods(periods)
        whole = replace(self.schedule, workload=workload, orders=orders, steady=None)
        return replace(parts[0], schedule=whole, actions=actions)


def segments(
    schedule: Schedule,
    *,
    replicas: int = 1,
    matching: Matching = Matching.ORDER,
    shared: Shared = NOTHING_SHARED,
) -> Segments:
    """Cut an asynchronous schedule, and check every training that its segments can make.

    Args:
        schedule: an asynchronous schedule that the checker accepts. A hand-made one needs enough periods to
            show the repeating part; those of schemes are made longer as needed.
        replicas: number of pipeline groups that sum each stage's gradients, 1 or more.
        matching: how the transport matches messages.
        shared: the stages whose running statistics are averaged at the end of a drain.

    Raises:
        ConfigError: the schedule has too few periods, or is synchronous.
        ScheduleError: the schedule, or a segment of it, breaks a rule of the checker.
    """
    if schedule.synchronous:
        raise ConfigError(
            f"{schedule} is synchronous: each mini-batch runs the whole order; choose an asynchronous one"
        )
    require(Subject(schedule), (rule for rule in RULES if not rule.lowered))
    cut = _Cut(schedule, replicas, matching, shared)
    last = cut.repeats_from()
    while last is None:
        longer = _longer(cut.schedule)
        if longer is None:
            raise ConfigError(
                f"{schedule}: its {schedule.periods} periods do not reach the part that repeats; "
                "make it with more periods"
            )
        cut = _Cut(longer, replicas, matching, shared)
        last = cut.repeats_from()
    together = math.ceil(TOGETHER / schedule.micro_batches)
    lag = cut.update_lag(last)
    late = lag + cut.spread(last) + together - 1
    steady = tuple(
        _gathering(part, range(k - lag, k - lag + 1), range(k - late, k - late + 1))
        for k, part in enumerate(cut.segments[: last + 1])
    )
    drains = tuple(
        _gathering(cut.drain(k), range(k - lag + 1, k + 1), range(k - late + 1, k + 1))
        for k in range(last + 1)
    )
    found = Segments(cut.schedule, steady, drains, together)
    for periods in range(1, last + 3):
        program = found.program(periods)
        rules = (
            PROMISED,
            COMPUTES,
            MESSAGES,
            DEADLOCK_RENDEZVOUS,
            POSTED,
            DEADLOCK_HOLDING,
            VERSIONS,
            SYNCS,
            SUMS,
            AGREED,
        )
        require(Subject(program.schedule, program), rules)
    return found


def steps(program: Program, ends: Ends) -> Segments:
    """The steps of a synchronous schedule, one after another.

    Without a barrier the drain after the last step gathers its norm, and all workers end there.

    Args:
        program: program of each step.
        ends: how a step ends.
    """
    last = StartGather(None, None if ends.wait_for_norm else 0, copies=0)
    rest = tuple((last, WaitGather(*last.periods)) for _ in program.actions)
    drains = () if ends.barrier else (replace(program, actions=rest),)
    return Segments(program.schedule, (program,), drains)


def _gathering(program: Program, reported: range, known: range) -> Program:
    """The lists with reports of loss and norm of some periods at their end, and waits for those of others."""
    gathers: list[Action] = [StartGather(k, k, k) for k in reported]
    gathers += [WaitGather(k, k, k) for k in known]
    return replace(program, actions=tuple((*row, *gathers) for row in program.actions))


def _of_nothing(action: Action) -> bool:
    """Whether it gathers only periods before the first one."""
    return isinstance(action, GatherAction) and all(period is None or period < 0 for period in action.periods)


def without_update(program: Program) -> Program:
    """The lists of a step whose gradients are accumulated, so they are not summed, clipped or used in an
    update.
    """
    return replace(program, actions=tuple(tuple(filter(_kept, row)) for row in program.actions))


def _kept(action: Action) -> bool:
    if isinstance(action, SyncAction):
        return action.what is Summed.STATISTICS
    return not isinstance(action, GradientAction | Update)


def _longer(schedule: Schedule) -> Schedule | None:
    """The same schedule with more periods, within reason, if it is just as its scheme makes it."""
    options = dict(schedule.options)
    known = registry.find(schedule.scheme)
    if known is None or "periods" not in options or schedule.periods > 4 * schedule.stages + 16:
        return None
    skips = schedule.workload.skips
    if registry.build(schedule.scheme, options).with_skips(skips) != schedule:
        return None
    return registry.build(schedule.scheme, options | {"periods": 2 * schedule.periods}).with_skips(skips)


def shifted(action: Action, periods: int, micro_batches: int) -> Action:
    """The same action, some periods of ``micro_batches`` later."""
    if not periods:
        return action
    match action:
        case Compute(op):
            return Compute(shifted_op(op, periods, micro_batches))
        case Update(stage, version, frees):
            return Update(stage, version + periods, tuple(v + periods for v in frees))
        case Send() | Receive():
            return _shifted_message(action, periods, micro_batches)
        case StartGather() | WaitGather():
            return type(action)(*(None if period is None else period + periods for period in action.periods))
        case _:
            return replace(action, period=action.period + periods)


def _shifted_message(message: Message, periods: int, micro_batches: int) -> Message:
    return replace(message, output=shifted_op(message.output, periods, micro_batches))


def shifted_op(op: Op, periods: int, micro_batches: int) -> Op:
    """The same op, some periods of ``micro_batches`` later."""
    moved = tuple(m + periods * micro_batches for m in op.micro_batches)
    return op._replace(micro_batches=moved, version=op.version + periods)


def _ops(actions: Iterable[Action]) -> Iterator[Op]:
    return (action.op for action in actions if isinstance(action, Compute))


class _Cut:
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
            for index, action in _beside_ops(actions):
                number = self._number_of(worker, index, action, program.needs_sync)
                gaps[worker][index].append((number, action))
        self.segments = [self._segment(gaps, number) for number in range(schedule.periods)]
        """What every worker runs when it has each mini-batch; the last one includes the drain."""

    def _updated(self, graph: OpGraph, times: tuple[list[int], list[int]]) -> Program:
        """Ops, syncs and updates without messages."""
        program = replace(self.empty, schedule=graph.schedule, actions=compute_actions(graph.schedule))
        return with_updates(with_syncs(program, times))

    def _bounds(self, order: Sequence[Op]) -> list[int]:
        """Where each segment begins in an order, and its end."""
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
            after.actions == tuple(tuple(shifted(a, 1, count) for a in row) for row in one.actions)
            for one, after in pairwise(self.segments[:-1])
        ]
        found = len(same)
        while found and same[found - 1]:
            found -= 1
        return found if found < len(same) else None

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
            for index, action in _beside_ops(actions):
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
    """The messages of all segments, in their places."""
    gaps: Gaps = [defaultdict(list) for _ in bounds]
    for worker, index, number, action in messages(graph, ends, bounds, matching):
        gaps[worker][index].append((number, action))
    return gaps


def _beside_ops(actions: Iterable[Action]) -> Iterator[tuple[int, Action]]:
    """The actions that are not ops, each with the number of ops before it."""
    index = 0
    for action in actions:
        if isinstance(action, Compute):
            index += 1
        else:
            yield index, action


def _woven(
    order: Sequence[Op], gaps: dict[int, list[Tagged]], start: int, stop: int, number: int
) -> Iterator[Action]:
    """The ops ``start`` to ``stop`` of an order with all actions in the gaps that belong to segment
    ``number``.
    """
    for index in range(start, stop + 1):
        yield from (action for tag, action in gaps.get(index, ()) if tag == number)
        if index < stop:
            op = order[index]
            yield Compute(op)


def _named(action: Action) -> tuple[type[Action], int, int] | None:
    """Key that identifies a sync or an update, whatever an update frees."""
    match action:
        case Update(stage, version, _):
            return Update, stage, version
        case StartSync(stage, period) | WaitSync(stage, period) | ClipStage(stage, period):
            return type(action), stage, period
        case _:
            return None
