"""Workers that share cores: literal cases, a simulation in small steps of time, and bounds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, simulate
from counterflow.simulation.shared_cores import SharedCores, core_wait_seconds
from counterflow.simulation.timed_cache import timed


def one_node(workers: int, cores: int, copies: int = 1) -> SharedCores:
    return SharedCores((0,) * workers, (cores,), ((copies,),) * workers)


def end_in_small_steps(schedule: Schedule, costs: dict[str, int], shared: SharedCores) -> float:
    """End of the last op, if messages take no time: each op progresses step by step of 1/840 second.

    Nodes have one core for up to eight threads, or as many as threads, so all speeds are multiples of 1/840.
    """
    step = 840
    needs = {}
    done: set[object] = set()
    for order in schedule.orders:
        for op in order:
            needs[op] = [*schedule.workload.needs(op)]
    at = [0] * schedule.workers
    left: list[Fraction | None] = [None] * schedule.workers
    ticks = 0
    seconds = {"F": costs["forward"], "B": costs["backward"]}
    while any(at[w] < len(order) for w, order in enumerate(schedule.orders)):
        for worker, order in enumerate(schedule.orders):
            if left[worker] is None and at[worker] < len(order):
                op = order[at[worker]]
                if all(need in done for need in needs[op]):
                    left[worker] = Fraction(seconds["F" if op.kind.is_forward else "B"] * step)
        computing = [w for w in range(schedule.workers) if left[w] is not None]
        speeds = {}
        for worker in computing:
            node = shared.node[worker]
            threads = sum(shared.threads[other][node] for other in computing)
            speeds[worker] = min(Fraction(1), Fraction(shared.cores[node], threads))
        ticks += 1
        for worker, speed in speeds.items():
            rest = left[worker]
            assert rest is not None
            left[worker] = rest - speed
        for worker in computing:
            rest = left[worker]
            assert rest is not None
            if rest <= 0:
                assert rest == 0  # steps are fine enough for these durations
                done.add(schedule.orders[worker][at[worker]])
                at[worker] += 1
                left[worker] = None
    return ticks / step


def ends(schedule: Schedule, costs: Costs, shared: SharedCores) -> float:
    return simulate(schedule, costs).makespan + core_wait_seconds(timed(schedule), costs, shared)


def test_two_workers_on_one_core() -> None:
    # F0 | F1 F0 | F1 and B0 at half speed …: a core that is never idle until the last backward.
    schedule = schemes.gpipe(2, 2)
    assert ends(schedule, Costs(), one_node(2, 2)) == simulate(schedule).makespan == 9
    assert ends(schedule, Costs(), one_node(2, 1)) == 12  # all work on one core


def test_two_replicas_of_a_worker_share_a_core() -> None:
    schedule = schemes.dapple(1, 3)
    assert ends(schedule, Costs(), one_node(1, 1, copies=2)) == 2 * 9
    assert ends(schedule, Costs(), one_node(1, 2, copies=2)) == 9


def test_messages_are_work_of_both_workers() -> None:
    schedule = schemes.gpipe(2, 1)  # F0, a message, F1 and B1, a message, B0
    one_core = replace(one_node(2, 1), message_seconds=0.5)
    assert ends(schedule, Costs(), one_core) == 6 + 2 * 0.5
    assert ends(schedule, Costs(p2p=1), one_core) == 6 + 2 * 0.5 + 2 * 1


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "schedule",
    [schemes.dapple(4, 4), schemes.gpipe(3, 4), schemes.chimera(4, 4), schemes.interleaved(2, 4, chunks=2)],
    ids=str,
)
def test_ends_are_those_of_small_steps(schedule: Schedule, cores: int) -> None:
    costs = {"forward": 2, "backward": 4}
    shared = one_node(schedule.workers, cores)
    expected = end_in_small_steps(schedule, costs, shared)
    assert ends(schedule, Costs(forward=2, backward=4), shared) == pytest.approx(expected)


def test_a_node_waits_for_its_own_cores() -> None:
    schedule = schemes.dapple(4, 4)
    shared = SharedCores((0, 0, 1, 1), (2, 1), ((1, 0), (1, 0), (0, 1), (0, 1)))
    expected = end_in_small_steps(schedule, {"forward": 1, "backward": 2}, shared)
    assert ends(schedule, Costs(), shared) == pytest.approx(expected) == 30


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    seconds=st.tuples(st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 2)),
)
def test_the_step_is_between_its_bounds(
    sizes: tuple[int, int, int], seconds: tuple[float, float, float]
) -> None:
    stages, micro_batches, cores = sizes
    schedule = schemes.dapple(stages, micro_batches)
    costs = Costs(forward=seconds[0], backward=seconds[1], p2p=seconds[2])
    alone = simulate(schedule, costs)
    result, work = ends(schedule, costs, one_node(stages, cores)), sum(alone.busy)
    slack = 1e-9 * alone.makespan
    assert max(alone.makespan, work / cores) - slack <= result <= alone.makespan + work / cores + slack
    if cores >= stages:
        assert result == pytest.approx(alone.makespan)
