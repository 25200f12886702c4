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
    found = cf.synthesize(plain(linear(4), 8, split=True), peak=4)
    assert [found.makespan, found.lower_bound, found.gap] == [27, 27, 0]
    assert found.proved
    assert found.method == "zb-h1(stages=4, micro_batches=8)"
    assert found.gain == 0
    assert set(found.peak) == {4}
    assert set(found.idle) == {3}


def test_it_is_never_worse_than_the_best_named_scheme_within_the_limits() -> None:
    uneven = cf.Costs(forward=(1, 2, 1, 3), backward=(2, 4, 2, 5), p2p=0.3)
    found = cf.synthesize(plain(linear(4), 6, split=True), uneven, peak=(4, 4, 3, 3), moves=200)
    assert found.named is not None
    name, seconds = found.named
    assert name.startswith(("zb-h1", "dapple"))
    assert found.lower_bound <= found.value <= seconds
    assert found.value == cf.simulate(found.schedule, uneven).makespan
    assert all(peak <= most for peak, most in zip(found.peak, (4, 4, 3, 3), strict=True))
    cf.check(found.schedule)
    again = cf.synthesize(plain(linear(4), 6, split=True), uneven, peak=(4, 4, 3, 3), moves=200)
    assert again.schedule == found.schedule
    assert again.bound == found.bound


@pytest.mark.parametrize(("peak", "makespan"), [(2, 9), (3, 7.5), (4, 7.5)])
def test_the_best_order_of_slices_at_each_memory(peak: int, makespan: float) -> None:
    """Two stages, two micro-batches of two slices: Seq1F1B holds 3 slices, and there it is the best."""
    pytest.importorskip("ortools")
    workload = sliced_workload(plain(linear(2), 2), 2)
    found = cf.synthesize(workload, peak=peak / 2, moves=100)
    assert (found.makespan, found.lower_bound, found.proved) == (makespan, makespan, True)
    best, _ = least(problem_of(workload, peak=peak / 2))
    assert best == makespan
    assert max(found.peak) <= peak / 2
    cf.check(found.schedule)
    assert loads(dumps(found.schedule), "mine.json") == found.schedule
    if peak > 2:
        assert found.method == "dapple(stages=2, micro_batches=2, slices=2)"


def test_the_best_order_of_slices_of_growing_cost() -> None:
    """Attention makes the second of two equal slices longer; the exact search finds no better order."""
    pytest.importorskip("ortools")
    costs = cf.Costs(attention=0.5)
    for slices, makespan in ((2, 7.875), ("5+3", 7.5234375)):
        workload = sliced_workload(plain(linear(2), 2), slices)
        found = cf.synthesize(workload, costs, peak=2, moves=100)
        best, _ = least(problem_of(workload, costs, peak=2))
        assert found.makespan == pytest.approx(makespan)
        assert best == pytest.approx(makespan)
        assert cf.simulate(found.schedule, costs).makespan == pytest.approx(makespan)
        assert loads(dumps(found.schedule), "mine.json") == found.schedule


def test_an_order_of_slices_is_searched_for_between_the_memories_of_seq1f1b() -> None:
    """Four stages hold 5 of two slices each with Seq1F1B, in 16.5; with 4 the best takes 18."""
    workload = sliced_workload(plain(linear(4), 4), 2)
    found = cf.synthesize(workload, peak=4 / 2, moves=20_000)
    assert (found.makespan, found.lower_bound, found.proved) == (18, 18, True)
    assert found.named is None
    cf.check(found.schedule)


def test_the_steady_step_is_improved_and_proved_by_the_solver() -> None:
    pytest.importorskip("ortools")
    told: list[tuple[float, float, str]] = []

    def report(best: float, bound: float, doing: str) -> None:
        told.append((best, bound, doing))

    found = cf.synthesize(
        plain(linear(2), 4, split=True), peak=3, objective="steady", moves=1000, report=report
    )
    assert found.steady == found.lower_bound == 12
    assert found.proved
    assert [best for best, _, _ in told] == sorted((best for best, _, _ in told), reverse=True)
    assert all(bound <= best for best, bound, _ in told)


def test_ctrl_c_keeps_the_best() -> None:
    def report(_best: float, _bound: float, doing: str) -> None:
        if doing.startswith("dapple"):
            raise KeyboardInterrupt

    found = cf.synthesize(plain(linear(4), 8, split=True), peak=4, report=report)
    assert found.stopped
    assert found.makespan == 30
    assert not found.proved


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match="this workload is asynchronous"):
        cf.synthesize(cf.schemes.pipedream(stages=2, periods=3).workload)
    with pytest.raises(cf.ConfigError, match="may hold 1 activations"):
        cf.synthesize(plain(wave(2, 1), 3), peak=1)
