"""The exact method: prove that no order beats the best one known, or find one that does.

It asks the model (``constraint_model.py``) for orders at or below a target, from the lower bound upwards,
since smaller targets are easier. A target that is refuted raises the bound; an order that is found ends the
search, or lowers the targets. A target without an answer in time is followed by a smaller one.

Invariant: the result is proved: the words were played with the true costs, and no order takes less than the
bound. If costs have too many decimals, durations are rounded down for the solver: bounds still hold, and an
optimum is missed by less than a millionth. With one thread, a seed and an ``effort`` but no end of
``seconds``, the result is always the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ..problem import CLOSE, Problem, Words, value_of
from .constraint_model import ConstraintModel, IntegerProblem, integer_problem, pairs

MOST_PAIRS = 60_000
"""Maximum pairs of ops of one worker in a problem that is tried."""

Report = Callable[[float, float, str], None]
"""Called with the best value, the bound, and the current activity."""


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of the exact method.

    Attributes:
        words: an order that is better than the one given; None: none was found.
        value: value of the best known order, in seconds.
        bound: lower bound of all orders, in seconds.
        stopped: whether Ctrl-C ended the search.
    """

    words: Words | None
    value: float
    bound: float
    stopped: bool = False

    @property
    def proved(self) -> bool:
        """Return whether no order is better than the best known one."""
        return self.value <= self.bound * (1 + CLOSE)


def tractable(problem: Problem) -> bool:
    """Check whether the exact method is worth trying."""
    return pairs(problem) <= MOST_PAIRS


def solve(
    problem: Problem,
    words: Words,
    least: float = 0.0,
    *,
    seconds: float = 60.0,
    effort: float | None = None,
    seed: int = 0,
    threads: int = 1,
    report: Report | None = None,
) -> Solved:
    """Prove an order, or improve it.

    Args:
        problem: the problem.
        words: an order within its limits.
        least: a known lower bound.
        seconds: time limit.
        effort: limit of the solver's deterministic time.
        seed: seed of the solver.
        threads: number of threads of the solver.
        report: called with the progress.

    Raises:
        ConfigError: OR-tools is not installed.
    """
    search = _Search(problem, words, least, (seed, threads), report)
    try:
        search.run(seconds, effort)
    except KeyboardInterrupt:
        return search.solved(stopped=True)
    return search.solved()


class _Search:
    def __init__(
        self, problem: Problem, words: Words, least: float, solver: tuple[int, int], report: Report | None
    ) -> None:
        self._problem = problem
        self._integer: IntegerProblem = integer_problem(problem)
        self._unit = self._integer.unit
        self._words, self._better = words, False
        self._value = value_of(problem, words)
        self._bound = self._raised(least)
        (self._seed, self._threads), self._report = solver, report

    def run(self, seconds: float, effort: float | None) -> None:
        """Ask for the bound, then for an order just better than the best, then from the bound upwards."""
        until = time.monotonic() + seconds
        first: int | None = self._bound
        last_target: int | None = None
        unanswered = self._below() + 1
        step = max(1, (self._below() - self._bound) // 8)
        while self._bound <= (below := self._below()) and (remaining := until - time.monotonic()) > 0.05:
            if effort is not None and effort < 0.01:
                break
            if first is not None:
                target = first
            elif last_target != below:
                target = below
            else:
                target = min(self._bound + step, unanswered - 1)
                if target < self._bound:
                    break
            last_target = below if target == below else last_target
            value, first = self._value, None
            share = 0.5 if target == below else 0.25  # of the remaining time
            status = self._solve(
                target, remaining * share, effort and effort * share, minimize=target == below
            )
            effort = effort and effort * (1 - share)
            if status == "infeasible":
                self._bound = max(self._bound, target + 1)
                step *= 2
            elif self._value < value:
                first, unanswered = (self._bound + self._below()) // 2, self._below() + 1
            else:
                unanswered = min(unanswered, target)
                step = max(1, (unanswered - self._bound) // 4)

    def solved(self, *, stopped: bool = False) -> Solved:
        """The result so far."""
        bound = min(float(self._bound * self._unit), self._value)
        return Solved(self._words if self._better else None, self._value, bound, stopped)

    def _below(self) -> int:
        return math.ceil(Fraction(self._value) / self._unit * (1 - Fraction(CLOSE))) - 1

    def _raised(self, seconds: float) -> int:
        return (
            math.ceil(Fraction(seconds) / self._unit * (1 - Fraction(CLOSE)))
            if self._integer.exact
            else math.floor(Fraction(seconds) / self._unit)
        )

    def _solve(self, target: int, seconds: float, effort: float | None, *, minimize: bool) -> str:
        begun = time.monotonic()
        model = ConstraintModel(self._integer.problem, target, minimize=minimize)
        if not model.refuted:
            model.hint(self._words)
        status, bound = model.solve(
            seconds=seconds - (time.monotonic() - begun),
            seed=self._seed,
            threads=self._threads,
            effort=effort,
            on_solution=self._accept,
        )
        if minimize and bound > self._bound:
            self._bound = min(bound, target + 1)
        self._send_report(f"orders of {float(target * self._unit):,.6g} or less: {status}")
        return status

    def _accept(self, words: Words, bound: int) -> bool:
        value = value_of(self._problem, words)
        if value < self._value * (1 - CLOSE) and self._problem.fits(words):
            self._words, self._value, self._better = words, value, True
        self._bound = max(self._bound, min(bound, self._below() + 1))
        self._send_report("found an order")
        return self._bound > self._below()

    def _send_report(self, doing: str) -> None:
        if self._report is not None:
            self._report(self._value, float(self._bound * self._unit), doing)
