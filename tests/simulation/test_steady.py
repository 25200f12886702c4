"""The steady step against the same order repeated many times, and against what can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import Costs
from counterflow.program.shifts import shifted_op
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.simulation import simulate
from counterflow.simulation.periods import period_ops

SCHEDULES = [
    schemes.gpipe(1, 2),
    schemes.gpipe(3, 4),
    schemes.dapple(4, 6),
    schemes.interleaved(4, 8, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 4),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.hanayo(4, 4, waves=2),
    schemes.zb_h1(4, 8),
    schemes.zb_h2(4, 8),
    schemes.zb_v(4, 8),
    schemes.dualpipe_v(4, 8),
]


def repeated(schedule: Schedule, steps: int) -> Schedule:
    """The order so many times, one after another: each op of step k on version k."""
    count = schedule.micro_batches
    orders = tuple(
        tuple(shifted_op(op, k, count) for k in range(steps) for op in order) for order in schedule.orders
    )
    once = replace(schedule.workload, synchronous=False, versions=tuple((0,) for _ in range(schedule.stages)))
    return replace(schedule, workload=once.of_periods(steps), orders=orders)


@given(
    schedule=st.sampled_from(SCHEDULES),
    times=st.tuples(*(st.floats(0.1, 3) for _ in range(3))),
    p2p=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    link=st.sampled_from(["one-at-a-time", "infinite"]),
    overlap=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_it_is_what_many_steps_take(
    schedule: Schedule, times: tuple[float, float, float], p2p: float, link: str, overlap: bool
) -> None:
    forward, inputs, weights = times
    costs = Costs(forward, inputs + weights, inputs, weights, p2p=p2p, link=link, overlap=overlap)
    found = simulate(schedule, costs).steady_step
    steps = 24
    whole = simulate(repeated(schedule, steps), costs)
    length = len(schedule.orders[0])
    ends = [float(whole.end[k * length - 1]) for k in (steps // 2, steps)]
    expected = (ends[1] - ends[0]) / (steps - steps // 2)
    assert found is not None
    if schedule.pipes == 1:
        assert found == pytest.approx(expected, rel=1e-6)
    else:  # a worker updates all of its stages before it goes on, there each when it needs it
        assert expected * (1 - 1e-6) <= found <= simulate(schedule, costs).makespan * (1 + 1e-9)


def test_one_forward_one_backward_gains_nothing() -> None:
    """Worker 0 ends last and begins first."""
    result = simulate(schemes.dapple(4, 8))
    assert result.steady_step == result.makespan == 33.0


@pytest.mark.parametrize(("depth", "count"), [(4, 8), (8, 16)])
def test_zb_v_has_no_bubble(depth: int, count: int) -> None:
    thirds = Costs(forward=0.5, backward=1.0)
    result = simulate(schemes.zb_v(depth, count), thirds)
    work = 3.0 * count
    assert result.makespan > work
    assert result.steady_step == pytest.approx(work)
    assert max(result.spans) == pytest.approx(work)


def test_updates_wait_for_their_sums_and_with_clipping_for_all() -> None:
    alone = simulate(schemes.zb_v(4, 8), Costs(0.5, 1.0))
    wide = simulate(schemes.zb_v(4, 8), Costs(0.5, 1.0, replicas=2, sync=0.25, agreement=0.5))
    assert alone.steady_step is not None
    assert alone.steady_step_clipped == pytest.approx(alone.makespan)
    # Of a worker's two stages the second one's sum is left when its ops are over.
    assert wide.steady_step is not None
    assert alone.steady_step + 0.25 <= wide.steady_step <= alone.steady_step + 0.5
    assert wide.steady_step_clipped == pytest.approx(wide.makespan)


def test_without_a_flush_it_is_a_period() -> None:
    assert simulate(schemes.pipedream(4, periods=1)).steady_step is None
    result = simulate(schemes.pipedream(4, periods=16))
    assert result.steady_step == result.steady_step_clipped == 3.0


def means(schedule: Schedule, costs: Costs, skipped: int) -> float:
    """The mean over many periods after the first ones: it comes near the steady step, and is not exact."""
    start = simulate(schedule, costs).start
    assert schedule.steady is not None
    length = period_ops(schedule, 0)
    begin, stop = schedule.steady[0]
    periods = (stop - begin) // length - 1
    first, last = begin + skipped * length, begin + periods * length
    return float(start[last] - start[first]) / (periods - skipped)


@pytest.mark.parametrize("periods", [7, 12, 30])
def test_without_a_flush_it_is_the_mean_of_what_repeats_however_few_periods_are_played(periods: int) -> None:
    """D=4, F + B = 3, messages of 1.5: four micro-batches go round in 21."""
    for forward in (0.75, 1.0, 1.5):
        costs = Costs(forward, 3 - forward, p2p=1.5)
        assert simulate(schemes.pipedream(4, periods), costs).steady_step == pytest.approx(5.25)


@given(
    name=st.sampled_from(["pipedream", "pipedream-2bw", "wpipe"]),
    times=st.tuples(*(st.floats(0.1, 3) for _ in range(4))),
    p2p=st.sampled_from([0.0, 0.4, 2.0, 5.0]),
    sync=st.sampled_from([0.0, 0.7, 8.0]),
    overlap=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_without_a_flush_it_is_what_many_periods_take(
    name: str, times: tuple[float, ...], p2p: float, sync: float, overlap: bool
) -> None:
    makes: dict[str, Callable[[int], Schedule]] = {
        "pipedream": lambda n: schemes.pipedream(4, n),
        "pipedream-2bw": lambda n: schemes.pipedream_2bw(3, 4, n),
        "wpipe": lambda n: schemes.wpipe(2, 4, n),
    }
    make = makes[name]
    count = make(8).stages
    costs = Costs(times[:1] * (count - 1) + (times[1],), times[2:3] * count, p2p=p2p, overlap=overlap)
    costs = replace(costs, sync=sync, replicas=2)
    found = simulate(make(8), costs).steady_step
    assert found is not None
    assert found == pytest.approx(means(make(80), costs, skipped=30), rel=0.03)
    assert found == pytest.approx(simulate(make(20), costs).steady_step)


def test_sums_of_all_stages_fill_the_way_out_that_they_share() -> None:
    costs = Costs(sync=2.0, replicas=2)
    alone = simulate(schemes.pipedream(4, 16), costs).steady_step
    shared = replace(costs, sync_crossings=[((0, 1), 2.0)] * 4)
    assert alone == 5.0
    assert simulate(schemes.pipedream(4, 16), shared).steady_step == 8.0
