"""A problem in whole numbers as a model of OR-tools' CP-SAT, whose solutions are all orders at or below a
target.

Proofs are fast because the target is a constant: each op has a window, from its head to the target less its
tail, and most pairs of ops of a worker have only one possible order. The others have a literal each. Three
quantities are linear in these literals: a worker's memory when an op starts, its work before it, and its work
after it.

Invariant: the model contains every schedule of the problem whose value, in whole units, is at or below the
target. It may contain others too if durations or sizes were rounded. So if it has no solution, no schedule
exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from counterflow.schedule.modes import Sync

from ..bounds.windows import windows_of
from ..problem import CLOSE, Problem, Store, Words
from ..solver import answered, cp_model, either, one_at_a_time

MOST_UNITS = 10**7
"""Maximum units of a schedule: if costs would need more, they are rounded down."""


@dataclass(frozen=True, slots=True)
class IntegerProblem:
    """A problem whose seconds are whole numbers of a unit.

    Attributes:
        problem: the problem.
        unit: seconds of a unit.
        exact: whether nothing was rounded; otherwise durations were rounded down.
    """

    problem: Problem
    unit: Fraction
    exact: bool


def integer_problem(problem: Problem) -> IntegerProblem:
    """The problem with all seconds as whole numbers, exact if few decimals suffice.

    >>> from counterflow.schedule.placement import linear
    >>> from counterflow.schedule.workload import plain
    >>> from counterflow.simulation import Costs
    >>> from counterflow.synthesis.posing import (problem_of)
    >>> scaled = integer_problem(problem_of(plain(linear(2), 2), Costs(forward=0.3, backward=0.75)))
    >>> scaled.unit, [x.seconds for x in scaled.problem.letters]
    (Fraction(3, 20), [2.0, 5.0, 2.0, 5.0])
    """
    letters = problem.letters
    values = [x.seconds for x in letters] + [need.seconds for x in letters for need in x.needs]
    values += [sync.seconds for sync in problem.sums] + [problem.tail]
    parts = [Fraction(repr(float(value))) for value in values if value]
    total = Fraction(math.fsum(x.count * (x.seconds + sum(n.seconds for n in x.needs)) for x in letters))
    denominator = math.lcm(*(part.denominator for part in parts))
    unit = Fraction(math.gcd(*(int(part * denominator) for part in parts)) or 1, denominator)
    exact = total / unit <= MOST_UNITS
    if not exact:
        unit = total / MOST_UNITS

    def units(seconds: float) -> float:
        return float(math.floor(Fraction(repr(float(seconds))) / unit))

    return IntegerProblem(
        replace(
            problem,
            letters=tuple(
                replace(
                    x,
                    seconds=units(x.seconds),
                    needs=tuple(replace(need, seconds=units(need.seconds)) for need in x.needs),
                )
                for x in letters
            ),
            sums=tuple(replace(sync, seconds=units(sync.seconds)) for sync in problem.sums),
            tail=units(problem.tail),
        ),
        unit,
        exact,
    )


def pairs(problem: Problem) -> int:
    """Number of pairs of ops of one worker: the size of a model."""
    counts = (sum(problem.letters[n].count for n in problem.of_worker(w)) for w in range(problem.workers))
    return sum(count * (count - 1) // 2 for count in counts)


class ConstraintModel:
    """Orders of a problem whose objective is ``target`` units or less."""

    def __init__(self, problem: Problem, target: int, *, minimize: bool) -> None:
        self.problem, self.target = problem, target
        self._windows = windows_of(problem)
        self._steady = problem.steady
        self._model: Any = cp_model().CpModel()
        self._lasts = [int(x.seconds) for x in problem.letters]
        self._start: dict[tuple[int, int], Any] = {}
        self._first: list[Any] = []
        self._value = self._model.new_int_var(0, target, "value") if minimize else target
        self.refuted = not self._times()
        """Whether an op has no window at all."""
        if self.refuted:
            return
        self._before: list[_PairOrders] = []
        for worker in range(problem.workers):
            self._worker(worker)
        self._messages()
        self._sums()
        if minimize:
            self._model.minimize(self._value)

    # -- variables

    def _times(self) -> bool:
        """A start for each op within its window, and the rules between them; returns whether all have a
        window.
        """
        problem, windows = self.problem, self._windows
        horizon = self.target
        if self._steady:
            # For each pipe, the first micro-batch's forwards are in the span of its first stage's worker.
            horizon *= problem.workload.placement.pipes + 1
            self._first = [self._model.new_int_var(0, horizon, f"first {w}") for w in range(problem.workers)]
        for n, x in enumerate(problem.letters):
            for k in range(x.count):
                latest = horizon - self._lasts[n]
                if not self._steady:
                    latest -= int(windows.tails[n][k])
                if latest < windows.heads[n][k]:
                    return False
                self._start[n, k] = self._model.new_int_var(int(windows.heads[n][k]), latest, f"{x} {k}")
        for rule in windows.rules:
            waits = self._lasts[rule.before] + int(rule.seconds)
            for k in range(problem.letters[rule.before].count - rule.shift):
                self._model.add(
                    self._start[rule.after, k + rule.shift] >= self._start[rule.before, k] + waits
                )
        return True

    # -- workers

    def _worker(self, worker: int) -> None:
        problem, model = self.problem, self._model
        letters = problem.of_worker(worker)
        takes = {n: self._lasts[n] + int(self._windows.busy[n]) for n in letters}
        if self._steady:
            heads, tails = self._windows.of_span(worker)
        else:
            heads, tails = self._windows.heads, self._windows.tails
        before = _PairOrders(model, self._start, takes)
        for n in letters:
            for k, (head, tail) in enumerate(zip(heads[n], tails[n], strict=True)):
                # From its earliest start to its latest, within the span or the step.
                before.window[n, k] = int(head), self.target - int(tail) - self._lasts[n]
        self._before.append(before)
        follow = {n: self._windows.later(n).keys() for n in letters}
        before.follow = follow
        before.chains()
        ops = [(n, k) for n in letters for k in range(problem.letters[n].count)]
        one_at_a_time(model, ((self._start[op], takes[op[0]]) for op in ops))
        begin = self._first[worker] if self._steady else 0
        soonest = min((int(heads[n][0]) for n in letters), default=0)
        least = min((int(tails[n][-1] - self._windows.busy[n]) for n in letters), default=0)
        for n, k in ops:
            start = self._start[n, k]
            earlier, later = before.load(n, k)
            model.add(start >= begin + soonest + earlier)
            model.add(start + takes[n] + later + least <= begin + self._value)
            head, tail = int(heads[n][k]), int(tails[n][k])
            model.add(start >= begin + head)
            model.add(start + self._lasts[n] + tail <= begin + self._value)
        for store in problem.stores:
            self._limit(store, worker, before, ops)

    def _limit(self, store: Store, worker: int, before: _PairOrders, ops: list[tuple[int, int]]) -> None:
        if math.isinf(store.most[worker]):
            return
        letters = {n for n, _ in ops}
        starts, ends, most = _whole_sizes(store, letters, store.most[worker])
        net = {n: starts[n] + ends[n] for n in letters}
        for n, k in ops:
            more = max(starts[n], net[n], 0)
            if more:
                memory = sum(
                    net[m] * before.literal(m, j, n, k) for m, j in ops if (m, j) != (n, k) and net[m]
                )
                self._model.add(memory + more <= most)

    # -- messages and sums

    def _messages(self) -> None:
        if not self.problem.lanes:
            return
        model, letters = self._model, self.problem.letters
        sent: dict[int, list[tuple[int, int, Any, int]]] = {}
        for n, x in enumerate(letters):
            for need in x.needs:
                if need.link is None or not need.seconds:
                    continue
                maker, travels = need.letter, int(need.seconds)
                for k in range(x.count):
                    taker_start, maker_start = self._start[n, k], self._start[maker, k]
                    at = model.new_int_var(0, self._start_most(n, k), "")
                    model.add(at >= maker_start + self._lasts[maker])
                    model.add(taker_start >= at + travels)
                    sent.setdefault(need.link, []).append((maker, k, at, travels))
        for messages in sent.values():
            before = self._before[letters[messages[0][0]].worker]
            one_at_a_time(model, ((at, travels) for _, _, at, travels in messages))
            for place, (n, k, at, travels) in enumerate(messages):
                for m, j, earlier, earlier_travels in messages[:place]:
                    if (n, k) == (m, j):  # in either order
                        continue
                    literal = before.literal(n, k, m, j)
                    either(model, literal, earlier >= at + travels, at >= earlier + earlier_travels)

    def _start_most(self, n: int, k: int) -> int:
        return (
            self.target * (self.problem.workload.placement.pipes + 1)
            if self._steady
            else (self.target - int(self._windows.tails[n][k]) - self._lasts[n])
        )

    def _sums(self) -> None:
        model, problem = self._model, self.problem
        horizon = self.target * (problem.workload.placement.pipes + 1)
        lanes: dict[int, list[Any]] = {}
        for sync in problem.sums:
            seconds = int(sync.seconds)
            at = model.new_int_var(0, horizon, "")
            waits: Sequence[int] = sync.letters
            if problem.costs.sync_mode is Sync.END:
                waits = [n for worker in sync.workers for n in problem.of_worker(worker)]
            for n in waits:
                ended = self._lasts[n] + int(self._windows.busy[n])
                model.add(at >= self._start[n, problem.letters[n].count - 1] + ended)
            for worker in sync.workers:
                lanes.setdefault(worker, []).append(model.new_fixed_size_interval_var(at, seconds, ""))
                begin = self._first[worker] if self._steady else 0
                model.add(at + seconds + int(problem.tail) <= begin + self._value)
        for intervals in lanes.values():
            model.add_no_overlap(intervals)

    # -- solving

    def hint(self, words: Words) -> None:
        """Tell the solver an order to begin with; it need not be at the target."""
        for literal, value in self._hints(words):
            self._model.add_hint(literal, value)

    def _hints(self, words: Words) -> list[tuple[Any, int]]:
        hints = []
        for before, word in zip(self._before, words, strict=True):
            place: dict[tuple[int, int], int] = {}
            done = [0] * len(self.problem.letters)
            for at, n in enumerate(word):
                place[n, done[n]] = at
                done[n] += 1
            hints += [
                (literal, int(place[a, j] < place[b, k])) for (a, j, b, k), literal in before.free.items()
            ]
        return hints

    def solve(
        self,
        *,
        seconds: float,
        seed: int,
        threads: int,
        effort: float | None,
        on_solution: Callable[[Words, int], bool],
    ) -> tuple[str, int]:
        """``infeasible``, ``optimal``, ``feasible`` or ``unknown``, and units that no order goes below.

        Args:
            seconds: time limit.
            seed: seed of the search.
            threads: number of threads of the search.
            effort: maximum of the solver's own, deterministic time.
            on_solution: called with each order and the current bound; true stops the search.
        """
        if self.refuted:
            return "infeasible", self.target + 1
        outer = self

        class SolutionCallback(cp_model().CpSolverSolutionCallback):  # type: ignore[misc]
            def on_solution_callback(self) -> None:
                bound = self.best_objective_bound if isinstance(outer._value, int) is False else 0
                if on_solution(outer._words(self.value), math.ceil(bound - 1e-6)):
                    self.stop_search()

        solver, status = answered(
            self._model,
            seconds=seconds,
            threads=threads,
            seed=seed,
            effort=effort,
            callback=SolutionCallback(),
        )
        if status == "INFEASIBLE":
            return "infeasible", self.target + 1
        bound = 0
        if not isinstance(self._value, int) and status != "MODEL_INVALID":
            bound = max(0, math.ceil(solver.best_objective_bound - 1e-6))
        return status.lower(), bound

    def _words(self, value: Callable[[Any], int]) -> Words:
        words = []
        for before, worker in zip(self._before, range(self.problem.workers), strict=True):
            ops = [
                (n, k) for n in self.problem.of_worker(worker) for k in range(self.problem.letters[n].count)
            ]
            words.append(tuple(n for n, _ in before.sorted(ops, value)))
        return tuple(words)


class _PairOrders:
    """Order of each two ops of a worker: a constant, or a literal of the model."""

    def __init__(self, model: Any, start: dict[tuple[int, int], Any], takes: dict[int, int]) -> None:
        self._model, self._start, self._takes = model, start, takes
        self.window: dict[tuple[int, int], tuple[int, int]] = {}
        self.follow: dict[int, Any] = {}
        self.free: dict[tuple[int, int, int, int], Any] = {}

    def literal(self, a: int, j: int, b: int, k: int) -> Any:
        """Return whether the j-th op of letter a precedes the k-th of b."""
        if a > b:
            opposite = self.literal(b, k, a, j)
            return 1 - opposite if isinstance(opposite, int) else ~opposite
        known = self._constant(a, j, b, k)
        if known is not None:
            return known
        if (a, j, b, k) in self.free:
            return self.free[a, j, b, k]
        literal = self._model.new_bool_var("")
        first, second = self._start[a, j], self._start[b, k]
        either(self._model, literal, second >= first + self._takes[a], first >= second + self._takes[b])
        self.free[a, j, b, k] = literal
        return literal

    def _constant(self, a: int, j: int, b: int, k: int) -> int | None:
        if a == b:
            return int(j < k)
        if (b in self.follow[a] and j <= k) or (self.window[b, k][0] + self._takes[b] > self.window[a, j][1]):
            return 1
        if (a in self.follow[b] and k <= j) or (self.window[a, j][0] + self._takes[a] > self.window[b, k][1]):
            return 0
        return None

    def chains(self) -> None:
        """If an op precedes another, the earlier ops of its letter do too."""
        for b, k in self.window:
            for a, j in self.window:
                if a != b and (a, j + 1) in self.window:
                    early, late = self.literal(a, j, b, k), self.literal(a, j + 1, b, k)
                    if not isinstance(early, int) or not isinstance(late, int):
                        self._model.add(early >= late)

    def load(self, n: int, k: int) -> tuple[Any, Any]:
        """Units of the other ops that precede an op, and of those that follow it."""
        earlier, later = [], []
        for m, j in self.window:
            if (m, j) != (n, k) and self._takes[m]:
                literal = self.literal(m, j, n, k)
                earlier.append(self._takes[m] * literal)
                later.append(self._takes[m] * (1 - literal if isinstance(literal, int) else ~literal))
        return sum(earlier), sum(later)

    def sorted(self, ops: list[tuple[int, int]], value: Callable[[Any], int]) -> list[tuple[int, int]]:
        """A worker's ops in the order of a solution."""

        def place(op: tuple[int, int]) -> int:
            rows = (self.literal(*second, *op) for second in ops if second != op)
            return sum(row if isinstance(row, int) else value(row) for row in rows)

        return sorted(ops, key=place)


def _whole_sizes(store: Store, letters: set[int], most: float) -> tuple[dict[int, int], dict[int, int], int]:
    """Sizes as whole numbers of some unit, exact if few digits suffice; otherwise rounded in favour."""
    fractions = {n: (Fraction(repr(store.at_start[n])), Fraction(repr(store.at_end[n]))) for n in letters}
    denominator = math.lcm(*(part.denominator for pair in fractions.values() for part in pair))
    numerators = [int(part * denominator) for pair in fractions.values() for part in pair]
    unit = Fraction(math.gcd(*numerators) or 1, denominator)
    largest = max((abs(part) for pair in fractions.values() for part in pair), default=Fraction(0))
    if largest / unit > MOST_UNITS:
        unit = largest / MOST_UNITS
    starts = {n: math.floor(pair[0] / unit) for n, pair in fractions.items()}
    ends = {n: math.floor(pair[1] / unit) for n, pair in fractions.items()}
    return starts, ends, math.floor(Fraction(most) * (1 + Fraction(CLOSE)) / unit)
