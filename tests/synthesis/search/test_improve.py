"""Orders by local moves."""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import counterflow as cf
from counterflow.schedule import schemes
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave
from counterflow.schedule.workload import plain
from counterflow.simulation import Link
from counterflow.synthesis.blocks.candidates import candidates
from counterflow.synthesis.blocks.squeeze import Lateness, Squeezer
from counterflow.synthesis.compute import one_by_one
from counterflow.synthesis.kernel import flat_of, words_of
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Problem, Words, value_of
from counterflow.synthesis.search import improve as module
from counterflow.synthesis.search.improve import Search, improve
from counterflow.synthesis.search.moves import anneal

UNIT = cf.Costs(forward=1, input_gradient=1, weight_gradients=1)
UNEVEN = cf.Costs(forward=3, input_gradient=4, weight_gradients=2)


def problem(
    placement: Placement, micro_batches: int, peak: float, costs: cf.Costs = UNIT, objective: str = "makespan"
) -> Problem:
    workload = plain(placement, micro_batches, split=True, pipe_of=lambda m: m % placement.pipes)
    return problem_of(workload, costs, peak=peak, objective=objective)


def starts_of(posed: Problem) -> list[Words]:
    """One micro-batch after another, and that squeezed."""
    first = one_by_one(posed)
    _, squeezed = Squeezer(posed).flat_squeezed(flat_of(first), Lateness())
    return [first, words_of(squeezed)]


def best(posed: Problem, starts: Iterable[Words] = (), **how: Any) -> Words:
    """The last order that is yielded, which is the best."""
    *_, (_, words) = improve(posed, starts or starts_of(posed), **how)
    return words


@pytest.mark.parametrize(
    ("placement", "costs", "peak", "proved"),
    [
        pytest.param(linear(4), UNIT, 4, 27, id="straight"),
        pytest.param(wave(4, 1), UNIT, 6, 53, id="vee-6"),
        pytest.param(wave(4, 1), UNIT, 4, 59, id="vee-4"),
        pytest.param(bidirectional(4), UNIT, 4, 25, id="two-way"),
        pytest.param(wave(4, 1), UNEVEN, 8, 156, id="uneven"),
    ],
)
def test_proved_least_makespans_are_found(
    placement: Placement, costs: cf.Costs, peak: float, proved: float
) -> None:
    """Eight micro-batches; what takes longer is in benchmarks."""
    posed = problem(placement, 8, peak, costs)
    words = best(posed, moves=200_000, seed=1, goal=proved)
    schedule = posed.schedule(words)
    cf.check(schedule)
    assert cf.simulate(schedule, costs).makespan == proved
    assert max(cf.simulate(schedule).peak_activations) <= peak


def test_least_spans_are_found() -> None:
    for peak, span in ((5, 26), (7, 24)):
        posed = problem(linear(4), 8, peak, objective="steady")
        words = best(posed, moves=200_000, seed=1, goal=span)
        assert cf.simulate(posed.schedule(words), UNIT).steady_step == span


PLACEMENTS = [
    linear(3),
    linear(4),
    wave(2, 2),
    wave(3, 1),
    looped(3, 2),
    bidirectional(4),
    bidirectional(4, 2),
]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_compiled_play_is_the_simulator(data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS))
    stages = placement.stages
    seconds = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    costs = cf.Costs(
        forward=data.draw(seconds),
        input_gradient=data.draw(seconds),
        weight_gradients=data.draw(seconds),
        p2p=data.draw(st.sampled_from([0, 0.5, 2])),
        link=data.draw(st.sampled_from(list(Link))),
        overlap=data.draw(st.booleans()),
        sync=data.draw(st.sampled_from([0, 3])),
        sync_mode="eager",
    )
    workload = plain(
        placement,
        data.draw(st.integers(1, 6)),
        split=data.draw(st.booleans()),
        pipe_of=lambda m: m % placement.pipes,
    )
    peak = max(data.draw(st.integers(1, 8)), stages * placement.pipes // placement.workers)
    posed = problem_of(workload, costs, peak=peak)
    search = Search(posed)
    for words in (*starts_of(posed), *candidates(posed, seconds=0, turns=1, moves=1)):
        assert posed.fits(words)
        schedule = posed.schedule(words)
        cf.check(schedule)
        simulated = cf.simulate(schedule, costs).makespan
        if costs.sync:  # the search lets sums begin in any order, the program has one
            assert search.seconds(words) <= simulated * 1.001
        else:
            assert search.seconds(words) == pytest.approx(simulated, rel=1e-3)


def test_moves_give_the_same_orders_again() -> None:
    posed = problem(wave(3, 1), 5, 5, UNEVEN, "steady")
    first, second = (list(improve(posed, starts_of(posed), moves=20_000, seed=3)) for _ in range(2))
    assert first == second


def test_known_orders_are_never_made_worse() -> None:
    schedule = schemes.zb_h2(stages=4, micro_batches=12)
    posed = problem_of(schedule.workload, UNIT, peak=8, objective="steady")
    words = posed.words_of(schedule)
    assert words is not None
    step = cf.simulate(schedule, UNIT).steady_step
    assert step is not None
    assert value_of(posed, best(posed, [words], moves=1_000, seed=0)) <= step


def test_each_order_is_better_than_all_before() -> None:
    posed = problem(linear(3), 6, 3)
    (first, words), *more = improve(posed, starts_of(posed), moves=5_000)
    assert first == "a start"
    assert {how for how, _ in more} <= {"local moves"}
    values = [Fraction(value_of(posed, words)) for words in (words, *(words for _, words in more))]
    assert values == sorted(set(values), reverse=True)


def test_at_ctrl_c_the_best_order_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        anneal(*given)
        raise KeyboardInterrupt

    posed = problem(linear(3), 6, 3)
    monkeypatch.setattr(module, "anneal", interrupted)
    orders = improve(posed, [one_by_one(posed)], moves=5_000)
    assert [how for how, _ in (next(orders), next(orders))] == ["a start", "local moves"]
    with pytest.raises(KeyboardInterrupt):
        next(orders)
