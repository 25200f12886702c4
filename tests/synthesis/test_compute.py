"""``cf.synthesize``: what it returns, and what it never does."""

from __future__ import annotations

import pytest

import counterflow as cf
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.orders.slices import sliced_workload
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave
from counterflow.schedule.workload import Workload, plain
from counterflow.synthesis.compute import one_by_one
from counterflow.synthesis.named import named
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import peaks

from .exhaustive import least


def directions(placement: Placement, count: int) -> Workload:
    return plain(placement, count, split=True, pipe_of=lambda m: m % placement.pipes)


@pytest.mark.parametrize(
    "workload",
    [plain(linear(3), 5), directions(bidirectional(4), 7), plain(wave(2, 2), 3), plain(looped(3, 2), 4)],
    ids=["straight", "two ways", "waves", "loop"],
)
def test_one_micro_batch_after_another_fits_every_limit(workload: Workload) -> None:
    problem = problem_of(workload, peak=1 if workload.placement.stages == 3 else 4)
    words = one_by_one(problem)
    assert problem.fits(words)
    schedule = problem.schedule(words)
    cf.check(schedule)
    assert max(peaks(problem.stores[0], words)) == max(
        workload.placement.pipes_stages[0].count(worker) for worker in range(workload.placement.workers)
    )


def test_named_schemes_with_other_numbers_of_micro_batches_on_pipes_are_others() -> None:
    problem = problem_of(directions(bidirectional(4), 8))
    assert {name.partition("(")[0] for name, _ in named(problem)} == {"chimera", "gems", "mixpipe"}
    one_way = plain(bidirectional(4), 8, split=True)
    assert not list(named(problem_of(one_way)))


def test_each_scheme_has_a_turn_before_one_has_its_next_and_begins_with_most_memory() -> None:
    """So that where there is time for a few only, they are different ones, and good ones."""
    problem = problem_of(directions(bidirectional(6), 12))
    names = [name.partition("(")[0] for name, _ in named(problem)]
    assert set(names[:3]) == {"chimera", "gems", "mixpipe"}
    first = next(name for name, _ in named(problem) if name.startswith("mixpipe"))
    assert "injected=max" in first
    assert len(names) > 3
    assert [name.partition("(")[0] for name, _ in named(problem, lambda: False)] == names[:3]


def test_a_named_scheme_at_the_bound_is_returned_at_once() -> None:
    result = cf.synthesize(plain(linear(4), 8, split=True), peak=4)
    assert [result.makespan, result.lower_bound, result.gap] == [27, 27, 0]
    assert result.proved
    assert result.method == "zb-h1(stages=4, micro_batches=8)"
    assert result.gain == 0
    assert set(result.peak) == {4}
    assert set(result.idle) == {3}


def test_it_is_never_worse_than_the_best_named_scheme_within_the_limits() -> None:
    uneven = cf.Costs(forward=(1, 2, 1, 3), backward=(2, 4, 2, 5), p2p=0.3)
    result = cf.synthesize(plain(linear(4), 6, split=True), uneven, peak=(4, 4, 3, 3), moves=200)
    assert result.named is not None
    name, seconds = result.named
    assert name.startswith(("zb-h1", "dapple"))
    assert result.lower_bound <= result.value <= seconds
    assert result.value == cf.simulate(result.schedule, uneven).makespan
    assert all(peak <= most for peak, most in zip(result.peak, (4, 4, 3, 3), strict=True))
    cf.check(result.schedule)
    repeated = cf.synthesize(plain(linear(4), 6, split=True), uneven, peak=(4, 4, 3, 3), moves=200)
    assert repeated.schedule == result.schedule
    assert repeated.bound == result.bound


@pytest.mark.parametrize(("peak", "makespan"), [(2, 9), (3, 7.5), (4, 7.5)])
def test_the_best_order_of_slices_at_each_memory(peak: int, makespan: float) -> None:
    """Two stages, two micro-batches of two slices: Seq1F1B holds 3 slices, and there it is the best."""
    pytest.importorskip("ortools")
    workload = sliced_workload(plain(linear(2), 2), 2)
    result = cf.synthesize(workload, peak=peak / 2, moves=100)
    assert (result.makespan, result.lower_bound, result.proved) == (makespan, makespan, True)
    best, _ = least(problem_of(workload, peak=peak / 2))
    assert best == makespan
    assert max(result.peak) <= peak / 2
    cf.check(result.schedule)
    assert loads(dumps(result.schedule), "mine.json") == result.schedule
    if peak > 2:
        assert result.method == "dapple(stages=2, micro_batches=2, slices=2)"


def test_the_best_order_of_slices_of_growing_cost() -> None:
    """Attention makes the second of two equal slices longer; the exact search finds no better order."""
    pytest.importorskip("ortools")
    costs = cf.Costs(attention=0.5)
    for slices, makespan in ((2, 7.875), ("5+3", 7.5234375)):
        workload = sliced_workload(plain(linear(2), 2), slices)
        result = cf.synthesize(workload, costs, peak=2, moves=100)
        best, _ = least(problem_of(workload, costs, peak=2))
        assert result.makespan == pytest.approx(makespan)
        assert best == pytest.approx(makespan)
        assert cf.simulate(result.schedule, costs).makespan == pytest.approx(makespan)
        assert loads(dumps(result.schedule), "mine.json") == result.schedule


def test_an_order_of_slices_is_searched_for_between_the_memories_of_seq1f1b() -> None:
    """Four stages hold 5 of two slices each with Seq1F1B, in 16.5; with 4 the best takes 18."""
    workload = sliced_workload(plain(linear(4), 4), 2)
    result = cf.synthesize(workload, peak=4 / 2, moves=20_000)
    assert (result.makespan, result.lower_bound, result.proved) == (18, 18, True)
    assert result.named is None
    cf.check(result.schedule)


def test_the_steady_step_is_improved_and_proved_by_the_solver() -> None:
    pytest.importorskip("ortools")
    reports: list[tuple[float, float, str]] = []

    def report(best: float, bound: float, doing: str) -> None:
        reports.append((best, bound, doing))

    result = cf.synthesize(
        plain(linear(2), 4, split=True), peak=3, objective="steady", moves=1000, report=report
    )
    assert result.steady == result.lower_bound == 12
    assert result.proved
    assert [best for best, _, _ in reports] == sorted((best for best, _, _ in reports), reverse=True)
    assert all(bound <= best for best, bound, _ in reports)


def test_ctrl_c_keeps_the_best() -> None:
    def report(_best: float, _bound: float, doing: str) -> None:
        if doing.startswith("dapple"):
            raise KeyboardInterrupt

    result = cf.synthesize(plain(linear(4), 8, split=True), peak=4, report=report)
    assert result.stopped
    assert result.makespan == 30
    assert not result.proved


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match="this workload is asynchronous"):
        cf.synthesize(cf.schemes.pipedream(stages=2, periods=3).workload)
    with pytest.raises(cf.ConfigError, match="may hold 1 activations"):
        cf.synthesize(plain(wave(2, 1), 3), peak=1)
