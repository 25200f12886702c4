"""Bounds against what is proved by hand or elsewhere, and against everything that can be played."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import counterflow as cf
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.slices import sliced_workload
from counterflow.schedule.placement import Placement, bidirectional, linear, wave
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import ByteCosts
from counterflow.simulation.costs import PerLink
from counterflow.synthesis.bounds.lower import bounds, lower_bound, most_within, one_machine
from counterflow.synthesis.compute import one_by_one
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Problem

from ..exhaustive import least

LEAST = [  # placement, N, (F, I, W), cap, makespan, span: what solvers proved
    (linear(4), 8, (1, 1, 1), 4, 27, 27),
    (linear(4), 8, (1, 1, 1), 5, 27, 26),
    (linear(4), 8, (1, 1, 1), 7, 27, 24),
    (wave(4, 1), 8, (1, 1, 1), 8, 51, 48),
    (wave(4, 1), 8, (1, 1, 1), 6, 53, None),
    (wave(4, 1), 8, (1, 1, 1), 4, 59, None),
    (bidirectional(4), 8, (1, 1, 1), 4, 25, 24),
    (linear(8), 16, (1, 1, 1), 8, 55, None),
    (wave(8, 1), 16, (1, 1, 1), 16, 103, 96),
    (bidirectional(8), 16, (1, 1, 1), 8, 51, 48),
    (wave(4, 1), 8, (3, 4, 2), 8, 156, None),
    (wave(4, 1), 8, (3, 4, 2), 6, 169, None),
]


def split_problem(
    placement: Placement, count: int, times: tuple[float, float, float], cap: float, objective: str
) -> Problem:
    forward, inputs, weights = times
    work = plain(placement, count, split=True, pipe_of=lambda m: m % placement.pipes)
    costs = cf.Costs(forward=forward, input_gradient=inputs, weight_gradients=weights)
    return problem_of(work, costs, peak=cap, objective=objective)


Case = tuple[Placement, int, tuple[float, float, float], float, float, float | None]


@pytest.mark.parametrize("case", LEAST)
def test_the_least_makespans_need_no_solver(case: Case) -> None:
    placement, count, times, cap, makespan, span = case
    bound = lower_bound(split_problem(placement, count, times, cap, "makespan"))
    assert bound.seconds == pytest.approx(makespan, rel=1e-9)
    if span is not None:
        steady = lower_bound(split_problem(placement, count, times, cap, "steady"))
        assert steady.seconds == pytest.approx(span, rel=1e-9)


@pytest.mark.parametrize("forwards", [8, 10, 12, 14, 16])
def test_the_papers_bound_of_memory_and_what_it_leaves_out(forwards: int) -> None:
    """(p-1)(I+2c) + (p-n)F with n forwards before the first I; 6.2B with p=8, m=32.

    After the last forward its gradient travels as far, and fewer backwards are left: at the memory of 1F1B
    that makes zb-h1 the best there is.
    """
    p, m, f, i, w, c = 8, 32, 29.802, 29.428, 19.530, 0.577
    costs = cf.Costs(forward=f, input_gradient=i, weight_gradients=w, p2p=c, link="infinite")
    work = plain(linear(p), m, split=True)
    problem = problem_of(work, costs, peak=forwards, objective="steady")
    head = max((p - 1) * (i + 2 * c) + (p - forwards) * f, 0)
    tail = max((p - 1) * (f + i + 2 * c) - (forwards - 1) * (i + w), 0)
    bound = lower_bound(problem)
    assert bound.seconds == pytest.approx(m * (f + i + w) + head + tail, rel=1e-9)
    if forwards == p:
        h1 = cf.simulate(schemes.zb_h1(p, m), costs)
        assert h1.spans[0] == pytest.approx(bound.seconds, rel=1e-9)
        assert (h1.spans[0] - m * (f + i + w)) / h1.spans[0] == pytest.approx(0.1045, abs=5e-5)


H1_IS_BEST = [
    # h, a, p, m, F, I, W, message, bubble rate of zb-h1: Tables 9 and 5 of the paper
    (2304, 24, 8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585),
    (2304, 24, 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242),
    (2304, 24, 8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674),
    (4096, 32, 8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323),
    (4096, 32, 8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554),
    (5120, 40, 16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397),
    (5120, 40, 16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088),
]


@pytest.mark.parametrize("row", H1_IS_BEST)
def test_no_order_in_the_memory_of_1f1b_is_better_than_zb_h1(row: tuple[float, ...]) -> None:
    """In bytes: input gradients free what weight gradients do not need."""
    h, a, p, m, f, i, w, c, rate = row
    memory = ByteCosts(activations=34 * h + 5 * a * 1024, kept_for_weights=32 * h, gradients=0.0)
    costs = cf.Costs(f, i + w, i, w, p2p=c, link="infinite", memory=memory)
    work = plain(linear(int(p)), int(m), split=True)
    limit = p * (34 * h + 5 * a * 1024)
    bound = lower_bound(problem_of(work, costs, memory_bytes=limit, objective="steady"))
    assert 1 - m * (f + i + w) / bound.seconds == pytest.approx(rate, abs=5.1e-5)


SCHEDULES = [
    schemes.gpipe(3, 4),
    schemes.dapple(4, 3),
    schemes.dapple(5, 12),
    schemes.interleaved(2, 6, chunks=3),
    schemes.gems(4, 4),
    schemes.chimera(4, 8),
    schemes.chimera(4, 5, split=True),
    schemes.chimera(8, 8, pairs=2),
    schemes.hanayo(4, 4, waves=2),
    schemes.mixpipe(4, 10),
    schemes.zb_h1(4, 9),
    schemes.zb_h2(4, 12),
    schemes.zb_v(4, 8),
    schemes.v_half(4, 9),
    schemes.v_min(4, 12),
    schemes.interleaved_zb(4, 8, chunks=2),
    schemes.dapple(stages=4, micro_batches=3, slices=2),
    schemes.gpipe(stages=3, micro_batches=1, slices=5),
    schemes.zb_h1(stages=3, micro_batches=4, slices=3),
    schemes.zb_v(workers=2, micro_batches=3, slices=2),
    schemes.interleaved(workers=2, micro_batches=4, chunks=2, slices=2),
    schemes.chimera(stages=4, micro_batches=4, slices=2),
]


def uneven(schedule: Schedule, draw: random.Random) -> cf.Costs:
    """Costs of everything that a bound might forget."""

    def drawn(count: int) -> tuple[float, ...]:
        return tuple(draw.choice([1.0, 1.0, draw.uniform(0.2, 3.0)]) for _ in range(count))

    stages, workers = schedule.stages, schedule.workers
    links: PerLink = (
        0.0
        if draw.random() < 0.3
        else tuple(tuple(draw.choice([0.0, 0.3, 2.0]) for _ in range(workers)) for _ in range(workers))
    )
    return cf.Costs(
        forward=drawn(stages),
        backward=drawn(stages),
        input_gradient=drawn(stages),
        weight_gradients=drawn(stages),
        p2p=links,
        link=draw.choice(["one-at-a-time", "infinite"]),
        overlap=draw.random() < 0.7,
        sync=0.0 if draw.random() < 0.4 else drawn(stages),
        replicas=draw.choice([1, 2]),
        agreement=draw.choice([0.0, 1.0]),
        recompute=draw.choice(["none", "stage"]),
        memory=ByteCosts(activations=drawn(stages), kept_for_weights=draw.choice([None, 0.5])),
    )


@given(place=st.integers(0, len(SCHEDULES) - 1), seed=st.integers(0, 10_000), kinds=st.sampled_from("pbn"))
@settings(max_examples=60, deadline=None)
def test_no_schedule_beats_a_bound(place: int, seed: int, kinds: str) -> None:
    schedule = SCHEDULES[place]
    costs = uneven(schedule, random.Random(seed))
    played = cf.simulate(schedule, costs)
    assert played.peak_bytes is not None
    peak = played.peak_activations if kinds == "p" else None
    memory = played.peak_bytes if kinds == "b" else None
    bound = lower_bound(problem_of(schedule.workload, costs, peak=peak, memory_bytes=memory))
    assert bound.seconds <= played.makespan * (1 + 1e-9), bound
    bound = lower_bound(
        problem_of(schedule.workload, costs, peak=peak, memory_bytes=memory, objective="steady")
    )
    assert played.steady_step is not None
    assert bound.seconds <= played.steady_step * (1 + 1e-9), bound


SCARCE = [  # workload, and limits below two micro-batches of a worker
    (sliced_workload(plain(linear(2), 2), 2), (1, 1.5)),
    (sliced_workload(plain(linear(2), 2), 3), (1,)),
    (sliced_workload(plain(linear(3), 2), 2), (1,)),
    (plain(linear(2), 3, split=True), (1,)),
    (plain(wave(2, 1), 2), (2,)),
    (plain(bidirectional(2), 4, pipe_of=lambda m: m % 2), (1,)),
]


@pytest.mark.parametrize("case", SCARCE, ids=range(len(SCARCE)))
def test_no_order_beats_a_bound_where_memory_is_scarce(case: tuple[Workload, tuple[float, ...]]) -> None:
    """Of all that there are, with unequal work, messages and sums."""
    workload, limits = case
    draw = random.Random(len(workload.passes) * workload.slices)
    unlimited = problem_of(workload)
    any_order = unlimited.schedule(one_by_one(unlimited))
    for peak, objective in product(limits, ("makespan", "steady")):
        costs = replace(uneven(any_order, draw), recompute="none")  # else there are too many orders
        problem = problem_of(workload, costs, peak=peak, objective=objective)
        best, _ = least(problem)
        results = list(bounds(problem))
        assert any("round trips" in bound.reason for bound in results)
        assert max(bound.seconds for bound in results) <= best * (1 + 1e-9)


def test_no_order_beats_a_bound_where_stages_are_recomputed() -> None:
    """A recomputation may be anywhere between its forward and its backward, as far as memory allows."""
    for workload, seed in product(
        (plain(linear(2), 2), plain(linear(3), 2), sliced_workload(plain(linear(2), 1), 2)), range(4)
    ):
        schedule = problem_of(workload).schedule(one_by_one(problem_of(workload)))
        draw = random.Random(seed)
        memory = ByteCosts(activations=2.0, inputs=0.5, beyond_inputs=draw.choice([0.5, 1.5, 3.0]))
        costs = replace(uneven(schedule, draw), recompute="stage", memory=memory)
        needed = max(cf.simulate(schedule, costs).peak_bytes or ())
        for room, objective in product((0.0, 0.6, 2.1), ("makespan", "steady")):
            problem = problem_of(workload, costs, memory_bytes=needed + room, objective=objective)
            best, _ = least(problem)
            assert lower_bound(problem).seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("share", [1.0, 1 - 9e-10])
@pytest.mark.parametrize("split", [True, False])
def test_a_limit_that_is_met_but_for_rounding_bounds_no_more(share: float, split: bool) -> None:
    """What is left beside some slices is a small difference, and rounding a larger share of it."""
    scheme = schemes.zb_h1 if split else schemes.dapple
    for stages, slices in ((2, 3), (2, 7), (3, 6), (4, 3)):
        schedule = scheme(stages=stages, micro_batches=4, slices=slices)
        played = cf.simulate(schedule)
        problem = problem_of(schedule.workload, peak=[most * share for most in played.peak_activations])
        words = problem.words_of(schedule)
        assert words is not None
        assert problem.fits(words)
        assert lower_bound(problem).seconds <= played.makespan * (1 + 1e-9)


SLICED = [  # D, slices held, and the makespan that computed orders reach (results/sliced_orders.txt)
    (2, 4, 14),
    (3, 4, 16),
    (3, 5, 13.75),
    (4, 4, 18),
    (4, 5, 15.75),
    (4, 6, 13.5),
]


@pytest.mark.parametrize(("stages", "held", "makespan"), SLICED)
def test_the_least_makespans_of_four_slices_in_little_memory(stages: int, held: int, makespan: float) -> None:
    workload = sliced_workload(plain(linear(stages), 4, split=True), 4)
    bound = lower_bound(problem_of(workload, peak=held / 4))
    assert bound.seconds == pytest.approx(makespan, rel=1e-12)


def test_one_machine_runs_the_longest_tail_first() -> None:
    assert one_machine([(0, 3, 0), (1, 1, 5)]) == 7
    assert one_machine([(0, 3, 0), (1, 1, 0), (9, 1, 2)]) == 12
    assert one_machine([]) == 0


def test_what_fits_into_a_limit() -> None:
    assert most_within(5, [(2, 2, 9)]) == 4
    assert most_within(5, [(2, 2, 9), (0, 3, 1), (7, 3, 0)]) == 4  # what is worth nothing takes no room
    assert most_within(1, [(3, 1, 1), (4, 2, 1)]) == pytest.approx(3)  # what is worth most for its size
    assert most_within(3, [(2, 1, 1), (1, 2, 1)]) >= 3  # a limit that is just filled
    assert most_within(-1, [(2, 2, 9)]) == 0
    assert most_within(0, [(2, 0, 3), (1, 1, 5)]) == 6
