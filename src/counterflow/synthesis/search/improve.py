"""Search: known orders, improved by local moves. It works at any size, without a proof.

The best of them are annealed (``moves.py``), fewer from round to round.

Invariant: the result is never worse than the best start that keeps the limits. The same seed and number of
moves give the same orders on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from math import inf
from threading import Event
from time import monotonic

import numpy as np

from ..kernel import (
    NEVER,
    FlatWords,
    Numbers,
    Scratch,
    flat_of,
    numbers_of,
    scratch_of,
    settle,
    words_of,
    worth,
)
from ..problem import CLOSE, Problem, Words, value_of
from .moves import AnnealingPlan, anneal, start, state_of

SETTLED = 4
"""Number of steps played until the offsets of workers at the border of two steps have settled."""

_ROUNDS = (8, 4, 2, 2)
"""Number of orders annealed in each round; all rounds have the same number of moves in total."""

_WARM, _COLD = 0.1, 0.003
"""Loss by a move that is accepted at first and at last, in mean seconds of an op."""

_SLICE_MOVES_OPS = 4_000_000
"""Moves times ops between two checks of the clock: about a tenth of a second."""

_THREADS = 2


class Search:
    """State shared by moves on orders of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.numbers: Numbers = numbers_of(problem)
        self.steady = problem.steady
        self.unit = float(np.average(self.numbers.seconds, weights=self.numbers.ops))
        """Mean seconds of an op."""
        self._scratch: Scratch = scratch_of(self.numbers, problem.workers)

    def seconds(self, words: Words) -> float:
        """The makespan or steady step of words, by the compiled play; infinite if they deadlock."""
        flat, begin = flat_of(words), np.zeros(self.problem.workers)
        if self.steady:
            settle(self.numbers, self._scratch, flat, begin, SETTLED)
        return float(worth(self.numbers, self._scratch, flat, begin, self.steady))


def improve(
    problem: Problem,
    starts: Iterable[Words],
    *,
    seconds: float = 10.0,
    moves: int | None = None,
    seed: int = 0,
    goal: float = 0.0,
) -> Iterator[tuple[str, Words]]:
    """Orders found by moves, each better than all before, with the method that found it.

    Ctrl-C is raised again after the best order was yielded.

    Args:
        problem: the problem.
        starts: orders to begin with; at least one has to keep the limits, others are ignored.
        seconds: time limit; without ``moves`` as many are made as time allows.
        moves: total number of moves. With it the result does not depend on the machine.
        seed: seed of the random numbers.
        goal: seconds that cannot be beaten; reaching them ends the search.
    """
    began = monotonic()
    search = Search(problem)
    least = inf

    def better(how: str, orders: Sequence[Words]) -> Iterator[tuple[str, Words]]:
        """The best of some orders, if it is better. Only this one is simulated, because simulation is
        slow.
        """
        nonlocal least
        if orders:
            words = min(orders, key=search.seconds)
            value = value_of(problem, words)
            if value < least * (1 - _BETTER):
                least = value
                yield how, words

    known = [words for words in starts if problem.fits(words)]
    yield from better("a start", known)
    remaining = max(0.0, began + seconds - monotonic())
    ordered = sorted({words: search.seconds(words) for words in known}.items(), key=lambda item: item[1])
    climbers = [
        _Climber(search, words, seed * 1_000_003 + number)
        for number, (words, value) in enumerate(ordered[: _ROUNDS[0]])
        if value < NEVER
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, wanted in enumerate(_ROUNDS if search.unit else ()):
            climbers = sorted(climbers, key=lambda climber: climber.best)[:wanted]
            if not climbers or least <= goal * (1 + CLOSE):
                return
            threads = 1 if moves is not None else min(_THREADS, len(climbers))
            share = threads / (len(_ROUNDS) * len(climbers))
            budget = None if moves is None else int(moves * share), remaining * share
            warm = _WARM / 2 ** max(0, number - 1)
            stop = Event()
            jobs = [pool.submit(climber.climb, *budget, warm, stop) for climber in climbers]
            try:
                for job in jobs:
                    job.result()
            finally:  # orders that were found until Ctrl-C count
                stop.set()
                wait(jobs)
                yield from better("local moves", [climber.words for climber in climbers])


_BETTER = 1e-12
"""Improvement below which two values count as equal."""


class _Climber:
    def __init__(self, search: Search, words: Words, seed: int) -> None:
        self._search, self._numbers = search, search.numbers
        self._flat = flat_of(words)
        self._state = state_of(search.numbers, self._flat, seed)
        self._scratch = scratch_of(search.numbers, search.problem.workers)
        self._restart()

    @property
    def best(self) -> float:
        """Value of the best order so far."""
        return float(self._state.worth[1])

    @property
    def words(self) -> Words:
        """The best order so far."""
        return words_of(FlatWords(self._state.best, self._flat.first))

    def _restart(self) -> None:
        self._flat.word[:] = self._state.best
        self._state.begin[:] = 0.0
        if self._search.steady:
            settle(self._numbers, self._scratch, self._flat, self._state.begin, SETTLED)
        start(self._numbers, self._scratch, self._flat, self._state, self._search.steady)

    def climb(self, moves: int | None, seconds: float, warm: float, stop: Event) -> None:
        """Anneal the order, from its best, in slices.

        Args:
            moves: number of moves; None: as many as time allows.
            seconds: time limit.
            warm: loss that is accepted at first, in mean seconds of an op.
            stop: returns whether to end.
        """
        self._restart()
        unit = self._search.unit
        warm, cold = warm * unit, _COLD * unit
        slice_moves = max(1, int(_SLICE_MOVES_OPS / self._search.problem.ops))
        completed, began = 0, monotonic()

        def used(completed: int) -> float:
            now, all_of_it = (monotonic() - began, seconds) if moves is None else (completed, moves)
            return now / all_of_it if all_of_it else 1.0

        while not stop.is_set() and (done := used(completed)) < 1:
            if moves is not None:
                count = min(slice_moves, moves - completed)
            else:  # a short slice first, then none that is longer than the time left
                count_left = int(completed / done * (1 - done)) if done and completed else slice_moves // 16
                count = max(1, min(slice_moves, count_left))
            until = done if moves is None else used(completed + count)
            from_heat, to_heat = (warm * (cold / warm) ** share for share in (done, until))
            plan = AnnealingPlan(count, from_heat, to_heat, self._search.steady)
            anneal(self._numbers, self._scratch, self._flat, self._state, plan)
            completed += count
