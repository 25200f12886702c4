"""Blocks by OR-tools: whether a block of some period exists within all limits, and the best one of that
period.

A letter starts at ``round * period + rest``. On a worker the rests do not overlap around the circle; a
worker's memory when a letter starts is a sum over rounds and the order of letters, so the model is linear.

Invariant: the solver works with whole numbers, times to about a thousandth of a period. Its solution is read
as a pattern and timed with the real numbers, so a block is right despite rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..kernel import numbers_of
from ..problem import Problem
from ..solver import answered, cp_model, either, one_at_a_time
from .modulo import ModuloBlock, least_work, pattern_of, shortest_way, timed

UNITS = 720
"""Units of time per shortest period, if times have no larger common unit."""

_WAYS = 3
"""Maximum length of a micro-batch's way, in shortest ways."""

_PARTS = 1_000_000
"""Number of parts of a limit in which bytes are counted."""


class Wanted(StrEnum):
    """Objective among the blocks of a period: of the shortest way, of the least memory, or any."""

    SHORT = "short"
    SMALL = "small"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the solver: a block, or that none exists, or neither in its time.

    Attributes:
        block: the best that was found.
        impossible: whether none exists (to the rounding of times).
    """

    block: ModuloBlock | None
    impossible: bool


def unit_of(problem: Problem) -> float:
    """Seconds per unit of the solver's time."""
    numbers = numbers_of(problem)
    most = least_work(problem)
    times = [t for t in (*numbers.keeps.tolist(), *numbers.after.tolist()) if t > 0]
    if not times:
        return 1.0
    unit = times[0]
    for t in times[1:]:
        a, b = unit, t
        while b > most * 1e-6:
            a, b = b, a % b
        unit = a
    return unit if most / unit <= 2 * UNITS else most / UNITS


def solved(
    problem: Problem,
    period: float,
    *,
    wanted: Wanted,
    seconds: float,
    hint: ModuloBlock | None = None,
    threads: int = 2,
) -> Answer:
    """A block of at most this period.

    Args:
        problem: the problem.
        period: period in seconds.
        wanted: the shortest way of a micro-batch (``short``), the least memory (``small``), or any block.
        seconds: time limit of the search.
        hint: a block to begin with.
        threads: number of threads of the solver.

    Raises:
        ConfigError: OR-tools is not installed.
    """
    model = _Model(problem, period)
    if hint is not None:
        model.hint(hint)
    if wanted is Wanted.SHORT:
        model.shortest()
    elif wanted is Wanted.SMALL:
        model.smallest()
    solver, status = answered(model.model, seconds=seconds, threads=threads)
    if status not in {"OPTIMAL", "FEASIBLE"}:
        return Answer(None, status == "INFEASIBLE")
    starts = tuple(float(solver.value(at)) for at in model.starts)
    return Answer(timed(problem, pattern_of(problem, starts, float(model.period))), impossible=False)


class _Model:
    def __init__(self, problem: Problem, period: float) -> None:
        self.problem = problem
        self.unit = unit_of(problem)
        self.numbers = numbers_of(problem)
        self.model = cp_model().CpModel()
        self.busy = [max(1, round(t / self.unit)) for t in self.numbers.keeps.tolist()]
        loads = [0] * problem.workers
        for letter, busy in zip(problem.letters, self.busy, strict=True):
            loads[letter.worker] += busy
        self.period = max(math.floor(period / self.unit + 1e-6), *loads)
        letters = range(len(problem.letters))
        self.rounds = math.ceil(_WAYS * shortest_way(problem) / (self.period * self.unit)) + 4
        self.rest = [self.model.new_int_var(0, self.period - 1, f"rest {n}") for n in letters]
        self.round = [self.model.new_int_var(0, self.rounds, f"round {n}") for n in letters]
        self.starts = [q * self.period + r for q, r in zip(self.round, self.rest, strict=True)]
        if problem.workload.placement.pipes == 1:
            first = next(n for n, x in enumerate(problem.letters) if not x.needs)
            self.model.add(self.starts[first] == 0)
        self.goes_before: dict[tuple[int, int], Any] = {}
        for n in letters:
            for edge in range(self.numbers.into[n], self.numbers.into[n + 1]):
                after = round(float(self.numbers.after[edge]) / self.unit)
                self.model.add(self.starts[n] >= self.starts[self.numbers.maker[edge]] + max(1, after))
        for worker in range(problem.workers):
            self._without_overlap(problem.of_worker(worker))
            self._within_limits(worker)

    def _without_overlap(self, letters: tuple[int, ...]) -> None:
        model, rest, busy = self.model, self.rest, self.busy
        for i, first in enumerate(letters):
            for second in letters[i + 1 :]:
                before = model.new_bool_var(f"{first} before {second}")
                self.goes_before[first, second], self.goes_before[second, first] = before, 1 - before
                either(
                    model,
                    before,
                    rest[first] + busy[first] <= rest[second],
                    rest[second] + busy[second] <= rest[first],
                )
                model.add(rest[first] + busy[first] <= rest[second] + self.period)
                model.add(rest[second] + busy[second] <= rest[first] + self.period)
        one_at_a_time(model, ((rest[n], busy[n]) for n in letters))

    def _holdings(self, store: int, worker: int, parts: float) -> list[Any]:
        letters = self.problem.of_worker(worker)
        net = {n: round(float(self.numbers.net[store, n]) / parts) for n in letters}
        takers = [n for n in letters if net[n] > 0]
        for pipe in {self.problem.letters[n].pipe for n in letters}:
            # A micro-batch frees what it takes, and rounding may not change that.
            stage = [n for n in letters if self.problem.letters[n].pipe == pipe and net[n]]
            if stage:
                net[stage[-1]] -= sum(net[n] for n in stage)
        peaks = []
        for n in letters:
            takes = math.ceil(float(self.numbers.takes[store, n]) / parts - 1e-9)
            if takes > 0 or n in takers:
                memory = takes
                for letter in letters:
                    if letter != n and net[letter]:
                        rounds = self.round[n] - self.round[letter] + self.goes_before[letter, n]
                        memory += net[letter] * rounds
                peaks.append(memory)
        return peaks

    def _parts(self, store: int, worker: int) -> float:
        values = [*self.numbers.takes[store].tolist(), *self.numbers.net[store].tolist()]
        if all(v == int(v) for v in values):
            return 1.0
        return float(self.numbers.most[store, worker]) / _PARTS

    def _within_limits(self, worker: int) -> None:
        for store in range(len(self.numbers.most)):
            most = float(self.numbers.most[store, worker])
            if math.isfinite(most):
                parts = self._parts(store, worker)
                for memory in self._holdings(store, worker, parts):
                    self.model.add(memory <= math.floor(most / parts))
                self._mean(store, worker, parts, math.floor(most / parts))

    def _mean(self, store: int, worker: int, parts: float, most: int) -> None:
        # It follows from the rest, and helps the solver a lot.
        limited = self.problem.stores[store]
        memory = 0
        net = 0
        for n in self.problem.of_worker(worker):
            takes = math.floor(limited.at_start[n] / parts)
            frees = math.floor(limited.at_end[n] / parts)
            memory -= takes * self.starts[n] + frees * (self.starts[n] + self.busy[n])
            net += takes + frees
        if not net:
            self.model.add(memory <= most * self.period)

    def shortest(self) -> None:
        """Minimise a micro-batch's way."""
        last = self.model.new_int_var(0, self.period * (self.rounds + 2), "last")
        for start, busy in zip(self.starts, self.busy, strict=True):
            self.model.add(last >= start + busy)
        self.model.minimize(last)

    def smallest(self) -> None:
        """Minimise the maximum that a worker holds of the first store."""
        parts = self._parts(0, 0)
        most = self.model.new_int_var(0, 10**12, "most")
        for worker in range(self.problem.workers):
            for memory in self._holdings(0, worker, parts):
                self.model.add(memory <= most)
        self.model.minimize(most)

    def hint(self, block: ModuloBlock) -> None:
        """Give the solver a block to begin with."""
        stretch = self.period * self.unit / block.period
        for n, at in enumerate(block.starts):
            start = round(at * stretch / self.unit)
            self.model.add_hint(self.round[n], start // self.period)
            self.model.add_hint(self.rest[n], start % self.period)
