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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from counterflow.errors import ConfigError, ScheduleError
from counterflow.schedule import registry
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.recompute_ops import with_recomputations

from .actions import (
    Action,
    Compute,
    GatherAction,
    GradientAction,
    Matching,
    Program,
    StartGather,
    Summed,
    SyncAction,
    Update,
    WaitGather,
)
from .lowering import NOTHING_SHARED, Ends, Shared
from .mini_batch_cuts import MiniBatchCuts
from .player import accelerated
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
    CheckSubject,
    require,
)
from .shifts import shifted

TOGETHER = 8
"""Micro-batches whose loss and norm are gathered at once: a gather costs as much as an op's messages."""


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
        schedule = replace(self.schedule, workload=workload, orders=orders, steady=None)
        return replace(parts[0], schedule=schedule, actions=actions)


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
    require(CheckSubject(schedule), (rule for rule in RULES if not rule.lowered))
    cut = MiniBatchCuts(schedule, replicas, matching, shared)
    last = cut.repeats_from()
    while last is None:
        longer = _longer(cut.schedule)
        if longer is None:
            raise ConfigError(
                f"{schedule}: its {schedule.periods} periods do not reach the part that repeats; "
                "make it with more periods"
            )
        cut = MiniBatchCuts(longer, replicas, matching, shared)
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
    parts = Segments(cut.schedule, steady, drains, together)
    _refuse_other_end(cut.schedule, parts)
    for periods in range(1, last + 3):
        program = parts.program(periods)
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
        require(CheckSubject(program.schedule, program), rules)
    return parts


def _refuse_other_end(schedule: Schedule, parts: Segments) -> None:
    # The last periods of the schedule belong to no segment.
    expected = parts.program(schedule.periods).schedule
    for worker, (order, ops) in enumerate(zip(schedule.orders, expected.orders, strict=True)):
        for place, (op, repeated) in enumerate(zip_longest(order, ops)):
            if op != repeated:
                raise ScheduleError(
                    f"{schedule}: worker {worker}: op {place} is {op or 'missing'}, where training has "
                    f"{repeated or 'none'}: it repeats earlier periods, and runs what is left at the end"
                )


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
    gathers: list[Action] = [StartGather(k, k, k) for k in reported]
    gathers += [WaitGather(k, k, k) for k in known]
    return replace(program, actions=tuple((*row, *gathers) for row in program.actions))


def _ops(actions: Iterable[Action]) -> Iterator[Op]:
    return (action.op for action in actions if isinstance(action, Compute))


def _of_nothing(action: Action) -> bool:
    return isinstance(action, GatherAction) and all(period is None or period < 0 for period in action.periods)


def without_update(program: Program) -> Program:
    """The lists of a step whose gradients are accumulated, so they are not summed, clipped or used in an
    update.
    """
    return replace(program, actions=tuple(tuple(filter(_remains, row)) for row in program.actions))


def _remains(action: Action) -> bool:
    if isinstance(action, SyncAction):
        return action.what is Summed.STATISTICS
    return not isinstance(action, GradientAction | Update)


def _longer(schedule: Schedule) -> Schedule | None:
    options = dict(schedule.options)
    known = registry.find(schedule.scheme)
    if known is None or "periods" not in options or schedule.periods > 4 * schedule.stages + 16:
        return None
    skips, recomputes = schedule.workload.skips, schedule.workload.recomputes

    def of_periods(periods: int) -> Schedule:
        longer = registry.build(schedule.scheme, options | {"periods": periods}, accelerated).with_skips(
            skips
        )
        return with_recomputations(longer) if recomputes else longer

    return of_periods(2 * schedule.periods) if of_periods(schedule.periods) == schedule else None
