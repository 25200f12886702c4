"""Blocks by annealing: a first pattern is built letter by letter, then changed move by move.

It serves for many workers, and if no solver is installed. A move puts a letter at another place of its
worker's order, perhaps a round earlier or later; or it moves all letters from one on, along a micro-batch's
way through its pipe, a round earlier or later. A worker's memory depends only on its own letters, so a move
that needs too much memory is detected at once.

Invariant: the same seed and number of moves give the same block; every pattern kept is within all limits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..kernel import NEVER, Chance, Floats, Ints, Numbers, chance_of, compiled, numbers_of, random, shift
from ..problem import Problem
from .modulo import (
    ModuloBlock,
    Pattern,
    PatternArrays,
    Ways,
    cut_of,
    has_room,
    least_period,
    least_work,
    pattern_of,
    shortest_way,
    timed,
    ways_of,
)

_STRETCHES = (*(1.02**i for i in range(40)), *(2.2 * 1.25**i for i in range(40)))
"""Periods that are tried for the first pattern, relative to the lower bound."""


def first_pattern(problem: Problem) -> Pattern:
    """A pattern within all limits: letters as early as possible, in the shortest period that allows it."""
    numbers = numbers_of(problem)
    sequence = np.lexsort((numbers.pipe, numbers.chain))
    for stretch in _STRETCHES:
        period = least_work(problem) * stretch
        start = np.full(len(sequence), -1.0)
        if _placed(numbers, sequence, period, start):
            pattern = pattern_of(problem, tuple(start.tolist()), period)
            cut = cut_of(pattern)
            if all(has_room(numbers, cut, w) for w in range(problem.workers)):
                return pattern
    orders = tuple(tuple(int(n) for n in sequence if numbers.worker[n] == w) for w in range(problem.workers))
    return Pattern(orders, (0,) * len(sequence))  # one micro-batch after the other


def improved(problem: Problem, block: ModuloBlock, *, times: float, moves: int, seed: int) -> ModuloBlock:
    """The best block that this many moves find.

    Args:
        problem: the problem.
        block: block to begin with, within all limits.
        times: number of periods in the objective, to which one micro-batch's time from first to last is
            added.
        moves: number of moves to try.
        seed: seed of the random numbers.
    """
    numbers, ways = numbers_of(problem), ways_of(len(problem.letters))
    x = _state_of(block, ways, seed)
    plan = _PatternAnnealing(
        least_work(problem), shortest_way(problem), times, moves, _WARM * float(numbers.keeps.mean())
    )
    _anneal(numbers, x, ways, plan)
    result = timed(problem, _pattern(numbers, x.best))
    assert result is not None  # every pattern that is kept has a period
    return result


_WARM = 0.5
"""Deterioration of a pattern that is accepted now and then at first, in ops."""


class _PatternAnnealing(NamedTuple):
    """Parameters of ``_anneal``.

    Attributes:
        floor: lower bound of the period.
        way: lower bound of a micro-batch's way.
        times: see ``improved``.
        moves: number of moves to try.
        warm: deterioration of a pattern that is accepted at first, in seconds.
    """

    floor: float
    way: float
    times: float
    moves: int
    warm: float


class _PatternState(NamedTuple):
    """Patterns: the one that is tried, the current one, the best; and the critical letters of the current
    one.
    """

    cut: PatternArrays
    saved: PatternArrays
    best: PatternArrays
    critical: Ints
    random: Chance


def _state_of(block: ModuloBlock, ways: Ways, seed: int) -> _PatternState:
    cuts = [cut_of(block.pattern) for _ in range(3)]
    return _PatternState(cuts[0], cuts[1], cuts[2], ways.critical.copy(), chance_of(seed))


def _pattern(numbers: Numbers, cut: PatternArrays) -> Pattern:
    cuts = zip(numbers.of[:-1], numbers.of[1:], strict=True)
    return Pattern(tuple(tuple(cut.order[a:b].tolist()) for a, b in cuts), tuple(cut.rounds.tolist()))


# Letter by letter


@compiled
def _placed(numbers: Any, sequence: Ints, period: float, start: Floats) -> bool:
    """Place letters one by one, each where its worker is first free modulo the period; return whether all
    found a place.

    ``start`` is negative if a letter has no place yet.
    """
    for n in sequence:
        at = 0.0
        for edge in range(numbers.into[n], numbers.into[n + 1]):
            at = max(at, start[numbers.maker[edge]] + numbers.after[edge])
        for _ in range(_TRIES):
            later = _free_from(numbers, period, start, n, at)
            if later == at:
                start[n] = at
                break
            at = later
        if start[n] < 0:
            return False
    return True


_TRIES = 40


@compiled
def _free_from(numbers: Any, period: float, start: Floats, n: int, at: float) -> float:
    close = 1e-9 * period
    for m in range(len(start)):
        if start[m] >= 0 and numbers.worker[m] == numbers.worker[n]:
            gone = (at - start[m]) % period  # since m started last
            if gone < numbers.keeps[m] - close:
                return float(at + numbers.keeps[m] - gone)
            if period - numbers.keeps[n] + close < gone < period - close:
                return float(at + period - gone + numbers.keeps[m])
    return at


# Moves


@compiled
def _worth(numbers: Any, x: Any, ways: Any, plan: Any, most: float) -> float:
    period = least_period(numbers, x.cut, plan.floor, (most - plan.way) / plan.times, ways)
    if period == NEVER:
        return NEVER
    way = 0.0
    for n in range(len(ways.start)):
        way = max(way, ways.start[n] + numbers.keeps[n])
    return float(plan.times * period + way)


@compiled
def _copy(source: Any, target: Any) -> None:
    target.order[:] = source.order
    target.rounds[:] = source.rounds


@compiled
def _keep(x: Any, ways: Any) -> None:
    _copy(x.cut, x.saved)
    x.critical[:] = ways.critical
    # They were nearly in order, so insertion is fast.
    for i in range(1, len(ways.sequence)):
        n, j = ways.sequence[i], i
        while j > 0 and ways.start[ways.sequence[j - 1]] > ways.start[n]:
            ways.sequence[j] = ways.sequence[j - 1]
            j -= 1
        ways.sequence[j] = n


@compiled
def _chosen(x: Any) -> int:
    letters = len(x.critical)
    if random(x.random) < 0.5:
        count = 0
        while count < letters and x.critical[count] >= 0:
            count += 1
        return int(x.critical[int(random(x.random) * count)])
    return int(random(x.random) * letters)


@compiled
def _moved(numbers: Any, x: Any, n: int) -> bool:
    worker, order, rounds = numbers.worker[n], x.cut.order, x.cut.rounds
    a, b = numbers.of[worker], numbers.of[worker + 1]
    i, j = a, a + int(random(x.random) * (b - a))
    while order[i] != n:
        i += 1
    if random(x.random) < 0.5:
        j = i + 1 if random(x.random) < 0.5 else i - 1
    by = 0
    if j >= b:  # past the end: it opens the next period
        j, by = a, 1
    elif j < a:  # before the first: it closes the previous period
        j, by = b - 1, -1
    elif j == i:
        by = 1 if random(x.random) < 0.5 else -1
    elif random(x.random) < 0.3:
        by = 1 if j < i else -1
    shift(order, i, j)
    rounds[n] += by
    return bool(has_room(numbers, x.cut, worker))


@compiled
def _shifted(numbers: Any, x: Any, n: int) -> bool:
    by = 1 if random(x.random) < 0.4 else -1
    for m in range(len(numbers.chain)):
        if numbers.pipe[m] == numbers.pipe[n] and numbers.chain[m] >= numbers.chain[n]:
            x.cut.rounds[m] += by
    fits = True
    for worker in range(len(numbers.of) - 1):
        fits = fits and has_room(numbers, x.cut, worker)
    return fits


@compiled
def _anneal(numbers: Any, x: Any, ways: Any, plan: Any) -> None:
    now = _worth(numbers, x, ways, plan, NEVER)
    best = now
    _keep(x, ways)
    for move in range(plan.moves):
        warm = plan.warm * (1.0 - move / plan.moves) ** 2
        n = _chosen(x)
        fits = _moved(numbers, x, n) if random(x.random) < 0.8 else _shifted(numbers, x, n)
        most = now - warm * np.log(1.0 - random(x.random))  # the worse, the less likely
        then = _worth(numbers, x, ways, plan, most) if fits else NEVER
        if then <= most:
            now = then
            _keep(x, ways)
            if now < best:
                best = now
                _copy(x.cut, x.best)
        else:
            _copy(x.saved, x.cut)
