"""Schedules that are wrong, as edited files and dragged ops make them: played, or refused in a sentence."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.errors import CounterflowError, ScheduleError
from counterflow.program.checker import check
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.simulation import ByteCosts, Costs, lower, simulate

COSTS = Costs(p2p=0.5, sync=0.2, memory=ByteCosts(weights=1.0, activations=1.0))
TOLD = ("needs", "slack", "gaps", "bubbles", "messages", "steady_step", "weight_copies", "timeline", "memory")
"""What the page and the commands show of a play."""

SCHEDULES = (
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.gpipe(2, 4, groups=2),
    schemes.zb_h1(2, 3),
    schemes.pipedream(3, 3),
    schemes.wpipe(2, 2),
)


def _with(schedule: Schedule, worker: int, place: int, **changes: Any) -> Schedule:
    orders = [list(order) for order in schedule.orders]
    orders[worker][place] = orders[worker][place]._replace(**changes)
    return replace(schedule, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize("changes", [{"stage": 7}, {"pipe": 3}])
def test_an_op_of_no_stage_or_pipe_is_refused(changes: dict[str, int]) -> None:
    wrong = _with(schemes.zb_h1(2, 3), 1, -1, **changes)
    assert wrong.orders[1][-1].kind is OpKind.WEIGHT_GRADIENTS  # no other op waits for it
    for work in (simulate, lower):
        with pytest.raises(ScheduleError, match="belongs to none of its 1 pipe of 2 stages; run the checker"):
            work(wrong)


def test_nothing_is_promised_beyond_the_last_period() -> None:
    wrong = loads(dumps(schemes.wpipe(2, 2)).replace('"micro_batches": 2,\n', '"micro_batches": 1,\n'), "x")
    with pytest.raises(ScheduleError, match=r"F8\.0v3 is not one of"):
        check(wrong)


def test_an_op_that_is_none_of_the_workload_needs_nothing() -> None:
    wrong = _with(schemes.pipedream(3, 3), 0, 4, micro_batches=(9,), kind=OpKind.WEIGHT_GRADIENTS)
    assert simulate(wrong).needs[4] == ()


def test_a_wrong_worker_is_refused_before_actions_are_made() -> None:
    schedule = schemes.gpipe(2, 2)
    first, second = schedule.orders
    with pytest.raises(ScheduleError, match="but worker 0 holds stage 0"):
        lower(replace(schedule, orders=(first[:-1], (*second, first[-1]))))


@st.composite
def _changed(draw: st.DrawFn) -> Schedule:
    schedule = draw(st.sampled_from(SCHEDULES))
    orders = [list(order) for order in schedule.orders]
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.sampled_from(orders))
        place = draw(st.integers(0, len(order) - 1))
        op = order.pop(place)
        if draw(st.booleans()):
            op = Op(
                draw(st.sampled_from(OpKind)),
                draw(st.integers(0, 4)),
                (draw(st.integers(0, 9)),),
                draw(st.integers(0, 2)),
                version=draw(st.integers(0, 2)),
            )
        order.insert(draw(st.integers(0, len(order))), op)
    workload = schedule.workload
    if draw(st.booleans()):
        workload = replace(workload, micro_batches=draw(st.integers(1, 5)))
    return replace(schedule, workload=workload, orders=tuple(map(tuple, orders)))


@given(_changed())
def test_no_change_breaks_what_looks_at_it(schedule: Schedule) -> None:
    with suppress(CounterflowError):
        check(schedule)
    with suppress(CounterflowError):
        lower(schedule, COSTS)
    with suppress(CounterflowError):
        played = simulate(schedule, COSTS)
        assert all(hasattr(played, name) for name in TOLD)
