"""Gradient syncs: which are there, when each worker starts its part, and what waits for updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.program.sync import (
    GradientSync,
    PlannedSync,
    _in_one_order,
    by_last_backward,
    first_users,
    gradient_syncs,
    needs_sync,
    plan_syncs,
)
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync

CROSSED = schemes.chimera(2, 2)
"""Worker 0: F0.0 F1.1p1 B1.1p1 B0.0; worker 1: F1.0p1 F0.1 B0.1 B1.0p1."""


def planned(
    schedule: Schedule, mode: Sync, start: list[float], end: list[float]
) -> list[tuple[int, float, tuple[tuple[int, int], ...]]]:
    """The syncs as (stage, ready, starts)."""
    return [(p.sync.stage, p.ready, p.starts) for p in plan_syncs(schedule, mode, start, end)]


def test_a_sum_is_needed_where_a_stage_has_several_copies() -> None:
    one, two = schemes.dapple(2, 2), schemes.chimera(2, 2)
    assert [needs_sync(one, 1), needs_sync(one, 2), needs_sync(two, 1)] == [False, True, True]


def test_every_stage_and_period_has_a_sync_with_the_last_backwards_of_its_copies() -> None:
    assert gradient_syncs(CROSSED) == (
        GradientSync(0, 0, ((0, 3), (1, 3))),
        GradientSync(0, 1, ((0, 2), (1, 2))),
    )
    assert gradient_syncs(CROSSED)[1].workers == (0, 1)
    # One micro-batch passes one pipe; the other copies take part with zeros.
    assert gradient_syncs(schemes.chimera(2, 1)) == (
        GradientSync(0, 0, ((0, 1), (1, None))),
        GradientSync(0, 1, ((0, None), (1, 1))),
    )
    assert gradient_syncs(schemes.pipedream(2, periods=2)) == (
        GradientSync(0, 0, ((0, 2),)),
        GradientSync(0, 1, ((1, 1),)),
        GradientSync(1, 0, ((0, 3),)),
        GradientSync(1, 1, ((1, 3),)),
    )


def test_the_last_weight_gradients_count_where_a_backward_is_split() -> None:
    (sync,) = gradient_syncs(schemes.zb_h1(1, 2))
    order = schemes.zb_h1(1, 2).orders[0]
    assert sync.last == ((0, len(order) - 1),)
    assert str(order[-1]) == "W1.0"


def test_syncs_by_period_then_last_backward_then_stage() -> None:
    assert [(s.period, s.stage) for s in by_last_backward(schemes.pipedream_2bw(2, 2, periods=2))] == [
        (0, 1),
        (0, 0),
        (1, 0),  # both at the last place of their worker
        (1, 1),
    ]
    none = replace(CROSSED, orders=((), ()))
    assert [s.stage for s in by_last_backward(none)] == [0, 1]
    # A stage of which nothing is there stands before one whose last backward is its worker's first op.
    only = replace(CROSSED, orders=((CROSSED.orders[0][3],), ()))
    assert [s.stage for s in by_last_backward(only)] == [1, 0]


def test_at_the_end_after_each_backward_or_where_there_is_a_wait() -> None:
    # Worker 0 waits before its last op, and worker 1 never does after its first one.
    start, end = [0.0, 1, 2, 7, 1, 2, 3, 5], [1.0, 2, 4, 9, 2, 3, 5, 7]
    assert planned(CROSSED, Sync.END, start, end) == [
        (1, 9.0, ((0, 4), (1, 4))),
        (0, 9.0, ((0, 4), (1, 4))),
    ]
    assert planned(CROSSED, Sync.EAGER, start, end) == [
        (1, 5.0, ((0, 3), (1, 3))),
        (0, 9.0, ((0, 4), (1, 4))),
    ]
    assert planned(CROSSED, Sync.EAGER_OPT, start, end) == [
        (1, 7.0, ((0, 3), (1, 4))),
        (0, 9.0, ((0, 4), (1, 4))),
    ]


def test_a_wait_before_the_last_backward_itself_is_no_time_for_its_sum() -> None:
    # Both wait just before their backward of stage 1, and do not wait again.
    start, end = [0.0, 1, 5, 7, 0, 1, 5, 7], [1.0, 2, 7, 9, 1, 2, 7, 9]
    assert planned(CROSSED, Sync.EAGER_OPT, start, end) == [
        (1, 9.0, ((0, 4), (1, 4))),
        (0, 9.0, ((0, 4), (1, 4))),
    ]


def test_copies_without_micro_batches_take_part_at_the_end() -> None:
    start, end = [0.0, 4, 1, 2], [1.0, 6, 2, 4]
    for mode in Sync:
        assert planned(schemes.chimera(2, 1), mode, start, end) == [
            (1, 6.0, ((0, 2), (1, 2))),
            (0, 6.0, ((0, 2), (1, 2))),
        ]


def test_a_worker_without_ops_is_ready_from_the_first() -> None:
    idle = replace(CROSSED, orders=((), ()))
    (found,) = plan_syncs(idle, Sync.END, [], [], [GradientSync(0, 0, ((0, None), (1, None)))])
    assert (found.ready, found.starts) == (0.0, ((0, 0), (1, 0)))


def test_no_worker_starts_a_sync_before_one_that_stands_earlier() -> None:
    one, other = GradientSync(0, 1, ((0, 4), (1, 2))), GradientSync(0, 0, ((0, 3), (2, 7)))
    found = _in_one_order(
        [PlannedSync(one, 5.0, ((0, 4), (1, 2))), PlannedSync(other, 6.0, ((0, 3), (1, 1), (2, 7)))]
    )
    assert found == [
        PlannedSync(one, 5.0, ((0, 4), (1, 2))),
        PlannedSync(other, 6.0, ((0, 4), (1, 2), (2, 7))),
    ]


@pytest.mark.parametrize("sync", list(Sync))
def test_given_syncs_are_those_of_the_schedule(sync: Sync) -> None:
    start, end = [0.0, 1, 2, 7, 1, 2, 3, 5], [1.0, 2, 4, 9, 2, 3, 5, 7]
    given = plan_syncs(CROSSED, sync, start, end, gradient_syncs(CROSSED))
    assert given == plan_syncs(CROSSED, sync, start, end)
    assert plan_syncs(CROSSED, sync, start, end, []) == []


def test_the_first_op_that_waits_for_an_update() -> None:
    # Worker 0: F0.0 F1.0 B0.0 F2.0v1 B1.0 B2.0v1; worker 1: F0 B0 F1v1 B1v1 F2v2 B2v2.
    assert first_users(schemes.pipedream(2, periods=3)) == {
        (0, 0, 0): 3,  # F2.0v1
        (0, 0, 1): 5,  # B2.0v1 needs the room of period 1's gradients
        (1, 1, 0): 2,
        (1, 1, 1): 4,
    }
    assert first_users(schemes.dapple(2, 2)) == {}


def test_an_op_that_needs_two_updates_waits_for_both() -> None:
    schedule = schemes.pipedream(1, periods=3)
    # F0 B0 F1v1 B1v1 F2v2 B2v2, with the second period left out.
    order = schedule.orders[0]
    assert first_users(replace(schedule, orders=((*order[:2], *order[4:]),))) == {(0, 0, 0): 2, (0, 0, 1): 2}


def test_the_first_op_counts_whatever_later_ones_need() -> None:
    schedule = schemes.pipedream(1, periods=3)
    forward = schedule.orders[0][0]
    order = tuple(forward._replace(version=version) for version in (2, 1, 2))
    assert first_users(replace(schedule, orders=(order,))) == {(0, 0, 0): 0, (0, 0, 1): 0}


def test_a_wait_anywhere_after_the_last_backward_is_enough() -> None:
    """Workers 0 and 3 have stage 3's last backward at place 5 and wait before place 6; then they go on."""
    waits, works = [0.0, 1, 2, 3, 5, 6, 10, 12], [0.0, 1, 2, 3, 4, 6, 8, 10]
    ends = [1.0, 2, 3, 5, 6, 8, 12, 14], [1.0, 2, 3, 4, 6, 8, 10, 12]
    start, end = waits + works + works + waits, ends[0] + ends[1] + ends[1] + ends[0]
    found = planned(schemes.chimera(4, 4), Sync.EAGER_OPT, start, end)
    assert found[0] == (3, 8.0, ((0, 6), (3, 6)))
    assert [(stage, starts[0][1]) for stage, _, starts in found[1:]] == [(2, 8), (1, 8), (0, 8)]
