"""Repeating blocks, and the orders made of them."""

import signal
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

import counterflow as cf
from counterflow.schedule import schemes
from counterflow.schedule.op import OpKind
from counterflow.schedule.orders.v_pattern import Starts
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave
from counterflow.schedule.schemes.v_half import _starts as v_half_starts
from counterflow.schedule.schemes.v_min import _starts as v_min_starts
from counterflow.schedule.workload import plain
from counterflow.simulation import ByteCosts
from counterflow.synthesis.blocks import candidates as module
from counterflow.synthesis.blocks.candidates import candidates, way_of
from counterflow.synthesis.blocks.modulo import least_work, pattern_of, timed, unrolled
from counterflow.synthesis.blocks.pattern_moves import first_pattern, improved
from counterflow.synthesis.blocks.pattern_solver import Wanted, solved, unit_of
from counterflow.synthesis.blocks.squeeze import Squeezer, reversed_problem
from counterflow.synthesis.blocks.wander import Wanderer
from counterflow.synthesis.bounds.lower import lower_bound
from counterflow.synthesis.compute import one_by_one
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Objective, Problem, peaks

from .checking import faults, held, mirrored

V4, V8 = wave(4, 1), wave(8, 1)
STRAIGHT4, STRAIGHT8 = linear(4), linear(8)
TWO4, TWO8 = bidirectional(4), bidirectional(8)
UNIT, UNEVEN = (1, 1, 1), (3, 4, 2)


def _problem(
    placement: Placement,
    micro_batches: int,
    times: tuple[float, float, float] = UNIT,
    peak: float | None = None,
    objective: str = "makespan",
    **costs: Any,
) -> Problem:
    forward, inputs, weights = times
    workload = plain(placement, micro_batches, pipe_of=lambda m: m % placement.pipes, split=True)
    unequal = cf.Costs(forward=forward, input_gradient=inputs, weight_gradients=weights, **costs)
    return problem_of(workload, unequal, peak=peak, objective=objective)


def _uneven(workers: int, micro_batches: int, peak: float) -> Problem:
    """Stages that differ by a third, and messages of a quarter of one."""
    forward = [1 + (7 * stage % 5) / 15 for stage in range(2 * workers)]
    costs = cf.Costs(
        forward=forward,
        input_gradient=[1.1 * f for f in forward],
        weight_gradients=[0.8 * f for f in forward],
        p2p=0.25,
    )
    return problem_of(plain(wave(workers, 1), micro_batches, split=True), costs, peak=peak)


def _best(problem: Problem, goal: float, turns: int = 4) -> float:
    """The least seconds of candidates; ends where they are no more than the goal."""
    squeezer, best = Squeezer(problem), inf
    for words in candidates(problem, seconds=0, turns=turns):
        best = min(best, squeezer.seconds(words))
        if best <= goal:
            break
    return best


def _published(problem: Problem, rule: Callable[[int, int], Starts]) -> tuple[float, ...]:
    """The starts of a published block, its weight gradients in the times that are left."""
    workers, starts_of_letters = problem.workers, [0.0] * len(problem.letters)
    for worker in range(workers):
        down, back = worker, 2 * workers - 1 - worker
        number = {(x.kind, x.stage): n for n, x in enumerate(problem.letters) if x.worker == worker}
        f0, f1, i1, i0 = rule(worker, workers)
        placed = {
            number[OpKind.FORWARD, down]: f0,
            number[OpKind.FORWARD, back]: f1,
            number[OpKind.INPUT_GRADIENT, back]: i1,
            number[OpKind.INPUT_GRADIENT, down]: i0,
        }
        places = {at % 6 for at in placed.values()}
        for stage, after in ((back, i1), (down, i0)):
            at = next(t for t in range(after + 1, after + 7) if t % 6 not in places)
            places.add(at % 6)
            placed[number[OpKind.WEIGHT_GRADIENTS, stage]] = at
        for n, at in placed.items():
            starts_of_letters[n] = float(at)
    return tuple(starts_of_letters)


@pytest.mark.table
@pytest.mark.parametrize(
    ("build", "rule"), [(schemes.v_half, v_half_starts), (schemes.v_min, v_min_starts)], ids=["half", "min"]
)
@pytest.mark.parametrize("workers", range(4, 17))
def test_published_blocks_are_blocks(
    build: Callable[[int, int], cf.Schedule], rule: Callable[[int, int], Starts], workers: int
) -> None:
    peak = max(cf.simulate(build(workers, 3 * workers)).peak_activations)
    problem = _problem(wave(workers, 1), 3 * workers, peak=peak)
    starts = _published(problem, rule)
    assert not list(faults(problem, starts, 6.0))
    assert least_work(problem) == 6
    block = timed(problem, pattern_of(problem, starts, 6.0))
    assert block is not None
    assert block.period == 6
    assert all(a <= b for a, b in zip(block.starts, starts, strict=True))  # as early as it can be


def test_what_is_wrong_with_a_block_is_said() -> None:
    problem = _problem(linear(1), 4, peak=1)
    assert list(faults(problem, (0, 1, 2), 3)) == []
    assert list(faults(problem, (0, 0.5, 2), 3)) == [
        "I.0 starts before what it takes from F.0 is there",
        "worker 0: I.0 starts while F.0 runs",
    ]
    assert list(faults(problem, (0, 1, 4), 3)) == [
        "worker 0: W.0 starts while I.0 runs",
        "worker 0 holds 2 activations, 1 are allowed",
    ]
    assert list(faults(problem, (0, 1, 2), 2.5)) == ["worker 0: F.0 starts while W.0 runs"]


@pytest.mark.parametrize(
    ("placement", "peak"),
    [(STRAIGHT4, 4), (V4, 8), (V4, 5), (TWO4, 4), (looped(3, 2), 7)],
    ids=str,
)
def test_what_a_block_holds_is_what_its_words_hold(placement: Placement, peak: float) -> None:
    problem = _problem(placement, 40, UNEVEN, peak=peak, p2p=0.5)
    block = timed(problem, first_pattern(problem))
    assert block is not None
    block = improved(problem, block, times=9, moves=500, seed=3)
    assert not list(faults(problem, block.starts, block.period))
    words = unrolled(problem, block)
    assert peaks(problem.stores[0], words) == held(problem, block.pattern)[0]
    # What a block promises is what its words take, where messages meet no others.
    free = _problem(placement, 40, UNEVEN, peak=peak, p2p=0.5, link="infinite")
    count = max(x.count for x in problem.letters)
    assert Squeezer(free).seconds(words) <= (count - 1) * block.period + way_of(problem, block) + 1e-9


def test_pipes_with_fewer_micro_batches_run_the_first_rounds() -> None:
    problem = _problem(TWO4, 7, peak=4)
    assert {x.count for x in problem.letters} == {3, 4}
    words = next(candidates(problem, seconds=0))
    assert problem.fits(words)
    cf.check(problem.schedule(words))


def test_one_micro_batch_for_each_pipe() -> None:
    """There is no period then, only the way of a micro-batch."""
    problem = _problem(bidirectional(4, 2), 3, UNEVEN, peak=4)
    assert {x.count for x in problem.letters} == {1}
    results = list(candidates(problem, seconds=0, turns=1, moves=100))
    assert all(problem.fits(words) for words in results)
    cf.check(problem.schedule(results[-1]))


def test_moves_are_the_same_for_a_seed() -> None:
    problem = _uneven(4, 8, peak=6)
    first = timed(problem, first_pattern(problem))
    assert first is not None
    block, repeated = (improved(problem, first, times=7, moves=300, seed=5) for _ in range(2))
    assert block == repeated
    assert improved(problem, first, times=7, moves=300, seed=6) != block


def test_least_period_under_a_limit_is_proved() -> None:
    problem = _problem(V4, 8, UNEVEN, peak=4)
    pytest.importorskip("ortools")
    first = timed(problem, first_pattern(problem))
    assert first is not None
    block = improved(problem, first, times=7, moves=5000, seed=0)
    assert block.period == 21
    assert unit_of(problem) == 1
    assert solved(problem, 20, wanted=Wanted.ANY, seconds=60).impossible
    result = solved(problem, 21, wanted=Wanted.ANY, seconds=60, hint=block)
    assert result.block is not None
    assert result.block.period == 21


@pytest.mark.parametrize("workers", [4, 5, 6, 7])
def test_a_block_without_bubbles_in_v_mins_memory(workers: int) -> None:
    """Found, not given, with F = I = W."""
    peak = max(cf.simulate(schemes.v_min(workers, 3 * workers)).peak_activations)
    problem = _problem(wave(workers, 1), 3 * workers, peak=peak)
    first = timed(problem, first_pattern(problem))
    assert first is not None
    assert min(improved(problem, first, times=99, moves=4000, seed=s).period for s in range(3)) == 6


def test_least_memory_of_a_block_without_bubbles() -> None:
    pytest.importorskip("ortools")
    problem = _problem(V4, 8, peak=8)
    result = solved(problem, 6, wanted=Wanted.SMALL, seconds=60).block
    assert result is not None
    assert result.period == 6
    assert max(held(problem, result.pattern)[0]) == 4


def test_reversed_problem_is_the_same_problem() -> None:
    problem = _uneven(3, 5, peak=6)
    block = timed(problem, first_pattern(problem))
    assert block is not None
    words = unrolled(problem, block)
    back = reversed_problem(problem)
    twice = reversed_problem(back)
    assert [set(x.needs) for x in twice.letters] == [set(x.needs) for x in problem.letters]
    assert twice.stores == problem.stores
    assert peaks(back.stores[0], mirrored(words)) == peaks(problem.stores[0], words)
    assert Squeezer(back).seconds(mirrored(words)) < inf


@pytest.mark.parametrize(
    ("placement", "micro_batches", "times", "peak", "least"),
    [
        (STRAIGHT4, 8, UNIT, 4, 27),
        (STRAIGHT4, 8, UNIT, 5, 27),
        (V4, 8, UNIT, 8, 51),
        (V4, 8, UNIT, 6, 53),
        (V4, 8, UNIT, 4, 59),
        (TWO4, 8, UNIT, 4, 25),
        (STRAIGHT8, 16, UNIT, 8, 55),
        (V8, 16, UNIT, 16, 103),
        (TWO8, 16, UNIT, 8, 51),
        (V4, 8, UNEVEN, 8, 156),
        (V4, 8, UNEVEN, 6, 169),
    ],
)
def test_proved_least_makespans(
    placement: Placement, micro_batches: int, times: tuple[float, float, float], peak: float, least: float
) -> None:
    """Of `docs` part C: blocks, unrolled and squeezed, without any search in the whole order."""
    problem = _problem(placement, micro_batches, times, peak)
    assert _best(problem, least) == least


def test_squeezed_words_keep_limits_in_bytes_and_end() -> None:
    costs = cf.Costs(
        forward=(2, 1, 1, 3),
        input_gradient=1.5,
        weight_gradients=1,
        p2p=0.3,
        memory=ByteCosts(activations=(5, 3, 4, 2), kept_for_weights=(3, 2, 2, 1)),
    )
    problem = problem_of(plain(STRAIGHT4, 10, split=True), costs, memory_bytes=(17, 9.5, 9, 4))
    words = next(candidates(problem, seconds=0))
    assert problem.fits(words)
    schedule = problem.schedule(words)
    cf.check(schedule)
    assert cf.simulate(schedule, costs).makespan == pytest.approx(Squeezer(problem).seconds(words))


def test_steady_steps_of_the_zero_bubble_paper() -> None:
    """6.2B, p = 8, m = 32: the bounds at 1 and 1.75 p M_B; the best known rates are 0.1045 and 0.0142."""
    costs = cf.Costs(
        forward=29.802,
        input_gradient=29.428,
        weight_gradients=19.530,
        p2p=0.577,
        link="infinite",
        memory=ByteCosts(activations=1, kept_for_weights=32 * 4096 / (34 * 4096 + 5 * 32 * 1024)),
    )
    work = 32 * (29.802 + 29.428 + 19.530)
    for limit, rate in ((8, 0.1045), (14, 0.0138)):
        problem = problem_of(
            plain(STRAIGHT8, 32, split=True), costs, memory_bytes=limit, objective=Objective.STEADY
        )
        bound = lower_bound(problem).seconds
        seconds = _best(problem, bound * (1 + 1e-9), turns=1)
        assert round(1 - work / seconds, 4) == rate
        assert seconds >= bound * (1 - 1e-9)


def test_words_wander_to_better_ones_the_same_for_a_seed() -> None:
    problem = _uneven(4, 8, peak=5)
    squeezer = Squeezer(problem)
    starts = [next(candidates(problem, seconds=0, turns=1)), one_by_one(problem)]
    results, repeated = (list(Wanderer(problem, starts, seed=2).wandered(turns=40)) for _ in range(2))
    assert results == repeated
    seconds = [squeezer.seconds(words) for words in results]
    assert seconds == sorted(seconds, reverse=True)
    assert min(seconds) < min(squeezer.seconds(words) for words in starts)
    assert all(problem.fits(words) for words in results)


def test_how_late_the_next_op_may_be_is_drawn_for_each_side() -> None:
    """The 28.3B row of the zero-bubble paper: with one lateness for both sides nothing is below 0.0055."""
    costs = cf.Costs(
        forward=10.419,
        input_gradient=10.207,
        weight_gradients=7.715,
        p2p=0.408,
        link="infinite",
        memory=ByteCosts(activations=1, kept_for_weights=32 * 6144 / (34 * 6144 + 5 * 48 * 1024)),
    )
    work = 96 * (10.419 + 10.207 + 7.715)
    problem = problem_of(plain(linear(32), 96, split=True), costs, memory_bytes=64, objective="steady")
    starts = [problem.words_of(build(32, 96)) for build in (schemes.zb_h1, schemes.zb_h2)]
    words = list(Wanderer(problem, [x for x in starts if x is not None]).wandered(turns=20))
    assert 1 - work / Squeezer(problem).seconds(words[-1]) < 0.005


def test_without_a_solver_blocks_come_from_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _uneven(3, 6, peak=4)
    monkeypatch.setattr(module, "solver_is_there", lambda: False)
    words = list(candidates(problem, seconds=0.5))
    assert words
    assert len(set(words)) == len(words)


def test_synthesize_takes_blocks() -> None:
    costs = cf.Costs(forward=3, input_gradient=4, weight_gradients=2)
    result = cf.synthesize(plain(V4, 8, split=True), costs, peak=6, moves=10_000)
    assert (result.makespan, result.proved, result.method) == (169, True, "repeating blocks")


def test_ctrl_c_is_pythons_after_the_solver() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        solved(_uneven(3, 6, peak=4), 30, wanted=Wanted.ANY, seconds=5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
