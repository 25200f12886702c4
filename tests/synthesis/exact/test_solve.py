"""The exact method against every order there is, and against what is known."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest

import counterflow as cf
from counterflow.schedule import schemes
from counterflow.schedule.orders.slices import sliced_workload
from counterflow.schedule.placement import bidirectional, linear, wave
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import ByteCosts
from counterflow.synthesis.bounds.lower import lower_bound
from counterflow.synthesis.exact.constraint_model import ConstraintModel, integer_problem
from counterflow.synthesis.exact.solve import solve
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Words, value_of

from ..bounds.test_lower import SCHEDULES, uneven
from ..exhaustive import least

pytest.importorskip("ortools")


TINY = {
    "sliced": sliced_workload(plain(linear(2), 2), 2),
    "sliced and split": sliced_workload(plain(linear(2), 1, split=True), 2),
    "sliced vee": sliced_workload(plain(wave(2, 1), 1), 2),
    "straight": plain(linear(3), 2, split=True),
    "straight, whole": plain(linear(2), 3),
    "vee": plain(wave(2, 1), 1, split=True),
    "two ways": plain(bidirectional(2), 2, split=True, pipe_of=lambda m: m % 2),
}


@pytest.mark.parametrize("workload", TINY.values(), ids=TINY)
def test_it_finds_the_best_of_all_orders(workload: Workload) -> None:
    draw = random.Random(len(workload.passes) + workload.placement.stages)
    stages = workload.placement.stages

    def drawn() -> tuple[float, ...]:
        return tuple(draw.choice([1, 1.5, 2, 3.25]) for _ in range(stages))

    memory = ByteCosts(activations=drawn(), kept_for_weights=0.5)
    costs = cf.Costs(
        drawn(), drawn(), drawn(), drawn(), p2p=0.75, sync=drawn(), sync_mode="eager", memory=memory
    )
    tight = 16 + 4 * stages
    for objective, memory_bytes in (("makespan", None), ("makespan", tight), ("steady", tight)):
        problem = problem_of(workload, costs, objective=objective, memory_bytes=memory_bytes)
        best, worst = least(problem)
        bound = lower_bound(problem)
        assert bound.seconds <= best * (1 + 1e-9)
        result = solve(problem, worst, bound.seconds, seconds=20)
        assert result.bound <= best * (1 + 1e-9)
        if objective == "makespan":  # links carry on from step to step, which the model leaves out
            assert result.proved
            assert result.value == pytest.approx(best)
        if result.words is not None:
            assert problem.fits(result.words)
            assert value_of(problem, result.words) == pytest.approx(result.value)


def test_without_an_answer_nothing_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the solver is asked again and again, and what it says of the bound is nothing."""
    targets: list[int] = []

    def unknown(model: ConstraintModel, **_: Any) -> tuple[str, int]:
        targets.append(model.target)
        return "unknown", 0

    h1 = schemes.zb_h1(2, 4)
    problem = problem_of(h1.workload, cf.Costs(backward=2.0), peak=3, objective="steady")
    words = problem.words_of(h1)
    assert words is not None
    monkeypatch.setattr(ConstraintModel, "solve", unknown)
    monkeypatch.setattr(ConstraintModel, "refuted", False, raising=False)
    result = solve(problem, words, 10.0, seconds=20)
    assert (result.value, result.bound, result.proved, result.words) == (13, 10, False, None)
    assert targets


def test_a_longer_span_is_improved_and_proved() -> None:
    """With room for one more forward zb-h1 need not wait."""
    h1 = schemes.zb_h1(2, 4)
    problem = problem_of(h1.workload, cf.Costs(backward=2.0), peak=3, objective="steady")
    words = problem.words_of(h1)
    assert words is not None
    assert value_of(problem, words) == 13
    reports: list[tuple[float, float]] = []

    def report(best: float, bound: float, _doing: str) -> None:
        reports.append((best, bound))

    result = solve(problem, words, seconds=60, effort=5.0, report=report)
    assert (result.value, result.bound, result.proved) == (12, 12, True)
    best, bound = reports[-1]
    assert best == bound == 12
    repeated = solve(problem, words, seconds=60, effort=5.0)
    assert repeated.words == result.words


def test_a_target_below_the_least_value_is_refuted() -> None:
    """V, four workers, F, I, W = 3, 4, 2, a peak of 4: 187 is a bound that can be proved by hand."""
    costs = cf.Costs(forward=3, input_gradient=4, weight_gradients=2)
    problem = problem_of(plain(wave(4, 1), 8, split=True), costs, peak=4)
    assert lower_bound(problem).seconds == 187
    model = ConstraintModel(integer_problem(problem).problem, 186, minimize=False)
    status, bound = model.solve(seconds=20, seed=0, threads=1, effort=None, on_solution=lambda *_: False)
    assert (status, bound) == ("infeasible", 187)


@pytest.mark.parametrize("seed", range(12))
def test_the_model_has_every_schedule_that_can_be_played(seed: int) -> None:
    """With its order given it is at its own value: with messages, sums, limits of bytes and busy senders."""
    draw = random.Random(seed)
    small = [candidate for candidate in SCHEDULES if sum(map(len, candidate.orders)) < 110]
    schedule = draw.choice(
        [candidate for candidate in small if problem_of(candidate.workload).words_of(candidate)]
    )
    costs = uneven(schedule, draw)
    played = cf.simulate(schedule, costs)
    problem = problem_of(
        schedule.workload,
        costs,
        peak=played.peak_activations if seed % 3 == 0 else None,
        memory_bytes=played.peak_bytes if seed % 3 == 1 else None,
        objective="steady" if seed % 2 else "makespan",
    )
    words = problem.words_of(schedule)
    assert words is not None
    units = integer_problem(problem)
    model = ConstraintModel(
        units.problem, math.ceil(value_of(problem, words) / float(units.unit)), minimize=False
    )
    assert not model.refuted
    for literal, value in model._hints(words):
        model._model.add(literal == value)
    solutions: list[Words] = []

    def keep(found_words: Words, _bound: int) -> bool:
        solutions.append(found_words)
        return False

    status, _ = model.solve(seconds=60, seed=0, threads=1, effort=None, on_solution=keep)
    assert status == "optimal"
    assert solutions[0] == words


def test_durations_with_many_decimals_are_rounded_down() -> None:
    costs = cf.Costs(forward=1 / 3, backward=0.1234567890123)
    scaled = integer_problem(problem_of(plain(linear(2), 40), costs))
    assert not scaled.exact
    for was, is_now in zip(
        problem_of(plain(linear(2), 40), costs).letters, scaled.problem.letters, strict=True
    ):
        assert 0 <= was.seconds - is_now.seconds * float(scaled.unit) <= float(scaled.unit) * (1 + 1e-6)


def test_without_or_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        """No ortools here."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "ortools":
                raise ModuleNotFoundError(name, name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    problem = problem_of(plain(linear(2), 2))
    words = ((0, 0, 1, 1), (2, 2, 3, 3))
    with pytest.raises(cf.ConfigError, match=r"pip install .counterflow\[synthesize\]"):
        solve(problem, words)
