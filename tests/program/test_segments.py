"""Asynchronous schedules cut at their mini-batches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.actions import Compute, StartGather, Update, WaitGather
from counterflow.program.segments import Segments, segments
from counterflow.program.shifts import shifted
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule

Make = Callable[[int], Schedule]
"""Periods to a schedule."""

SCHEMES: dict[str, Callable[[int, int], Make]] = {
    "pipedream": lambda depth, _: lambda periods: schemes.pipedream(depth, periods),
    "pipedream-2bw": lambda depth, more: lambda periods: schemes.pipedream_2bw(depth, depth + more, periods),
    "wpipe": lambda depth, more: lambda periods: schemes.wpipe(depth, depth + more, periods),
}


def _ops(found: Segments, worker: int, number: int) -> str:
    actions = found.steady[number].actions[worker]
    return " ".join(str(a.op) for a in actions if isinstance(a, Compute))


def test_2bw_segments_as_drawn() -> None:
    found = segments(schemes.pipedream_2bw(2, 2))
    assert [_ops(found, 0, k) for k in range(3)] == [
        "F0.0 F1.0 B0.0",
        "F2.0 B1.0 F3.0 B2.0",
        "F4.0v1 B3.0 F5.0v1 B4.0v1",
    ]
    assert [_ops(found, 1, k) for k in range(3)] == [
        "F0.1 B0.1 F1.1 B1.1",
        "F2.1 B2.1 F3.1 B3.1",
        "F4.1v1 B4.1v1 F5.1v1 B5.1v1",
    ]
    assert found.last == 2
    assert found.periods_in_flight == 2
    assert [str(action) for action in found.drains[2].actions[0]][-9:] == [
        "Backward B5.0v1",
        "Clip stage 0, period 2",
        "Update stage 0 to version 3",
        "StartGather loss, norm and copies of period 2",
        *(f"WaitGather loss, norm and copies of period {period}" for period in range(-2, 3)),
    ]


def test_who_waits_for_a_gather_does_not_wait_for_another_worker() -> None:
    """A step waits for what the slowest worker has reported by then, of short periods several at once."""
    for schedule, together, late in (
        (schemes.pipedream_2bw(2, 8), 1, 2),
        (schemes.pipedream_2bw(2, 2), 4, 5),
        (schemes.pipedream(3), 8, 10),
    ):
        found = segments(schedule)
        assert found.together == together
        for actions in found.steady[-1].actions:
            start, wait = actions[-2:]
            assert isinstance(start, StartGather)
            assert isinstance(wait, WaitGather)
            assert wait.loss == found.last - late
            assert start.loss is not None
            assert start.loss - wait.loss >= together


@settings(max_examples=50)
@given(st.sampled_from(sorted(SCHEMES)), st.integers(1, 6), st.integers(0, 3), st.integers(1, 2))
def test_steps_and_a_flush_are_the_scheme_with_as_many_periods(
    scheme: str, depth: int, more: int, replicas: int
) -> None:
    make = SCHEMES[scheme](depth, more)
    found = segments(make(2), replicas=replicas)  # 2 do not show what repeats: more are made
    for periods in (1, 2, found.last + 1, found.last + 3):
        program = found.program(periods)
        assert program.schedule.orders == make(periods).orders


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_versions_are_held_no_longer_than_needed(scheme: str) -> None:
    """Between updates a worker holds the versions that ops still use, and the latest one."""
    found = segments(SCHEMES[scheme](3, 1)(8))
    actions = found.program(found.last + 3).actions
    for row in actions:
        held: dict[int, set[int]] = {}
        for index, action in enumerate(row):
            if not isinstance(action, Update):
                continue
            there = held.setdefault(action.stage, {0}) | {action.version}
            held[action.stage] = there - set(action.frees)
            used = {
                later.op.version
                for later in row[index:]
                if isinstance(later, Compute) and later.op.stage == action.stage
            }
            oldest = min(used, default=action.version)
            needed = set(range(oldest, action.version + 1))
            if action.version <= found.last + 1:
                assert held[action.stage] == needed
            else:  # the last ones before the drain keep what a further period would use
                assert needed <= held[action.stage] <= needed | {oldest - 1}


def test_shifted_moves_all_numbers() -> None:
    program = segments(schemes.wpipe(2, 2)).steady[2]
    for action in program.actions[0]:
        moved = shifted(action, 3, 2)
        assert shifted(action, 0, 2) == action != moved
        if isinstance(action, Compute):
            assert isinstance(moved, Compute)
            assert moved.op.micro_batches == tuple(m + 6 for m in action.op.micro_batches)
            assert moved.op.version == action.op.version + 3


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dapple\(.*\) is synchronous"):
        segments(schemes.dapple(2, 2))
    short = schemes.pipedream(3, periods=4)
    edited = replace(short, scheme="mine")
    with pytest.raises(
        ConfigError, match="its 4 periods do not reach the part that repeats; make it with more"
    ):
        segments(edited)


def test_periods_that_do_not_begin_in_turn_are_refused() -> None:
    schedule = schemes.pipedream(1, periods=4)
    first, second, *rest = (schedule.orders[0][i : i + 2] for i in range(0, 8, 2))
    mixed = [second, first, *rest]
    order = tuple(op._replace(version=0) for pair in mixed for op in pair)
    with pytest.raises(ScheduleError):
        segments(replace(schedule, scheme="mine", orders=(order,)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_last_period_with_other_versions_is_refused(scheme: str) -> None:
    """Training repeats the periods before it, and would ignore what the last one says."""
    schedule = SCHEMES[scheme](2, 0)(8)
    segments(schedule)
    content, count, last = json.loads(dumps(schedule)), schedule.micro_batches, schedule.periods - 1

    def older(op: str) -> str:
        of_last = int(re.match(r"[A-Z]+(\d+)", op)[1]) // count == last  # type: ignore[index]
        return re.sub(r"v\d+$", "v2", op) if of_last else op

    content["orders"] = [[older(op) for op in order] for order in content["orders"]]
    content["versions"] = [[*versions[:-1], 2] for versions in content["versions"]]
    reasons = (
        r"worker \d: op \d+ is .*, where training has .*: it repeats earlier periods"
        "|do not reach the part that repeats"
    )
    with pytest.raises((ScheduleError, ConfigError), match=reasons):
        segments(loads(json.dumps(content), "other.json"))
