"""A repeating block: when the ops of one micro-batch of every pipe start; others follow period by period.

On a worker no two ops overlap modulo the period. Its memory while periods repeat follows from two things
alone: the *order* in which it runs its letters within a period, and the *round* of each letter: the number of
periods after the first in which its first op runs. These two are a ``Pattern``. Its earliest starts are
longest paths. Its least period is that of its slowest circle: waits that lead from a letter back to itself,
some rounds later, need their seconds divided by these rounds.

Invariant: a pattern that keeps the limits while periods repeat keeps them at the beginning and the end too:
there are fewer micro-batches then, and none has negative memory. Nothing here depends on the number of
micro-batches; pipes with fewer run the first rounds only. For links that carry one message at a time only the
load counts, not the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..kernel import Floats, Ints, compiled, numbers_of
from ..problem import CLOSE, Problem, Words


@dataclass(frozen=True, slots=True)
class Pattern:
    """The order and the rounds in which letters run.

    Attributes:
        orders: by worker, its letters in their order in a period.
        rounds: by letter, the period in which its first op runs.
    """

    orders: Words
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuloBlock:
    """A block: the k-th op of letter l starts at ``starts[l] + k * period``.

    Attributes:
        period: seconds from a micro-batch to the next one.
        starts: by letter, start of its first op in seconds; the earliest is 0.
        pattern: pattern of the block.
    """

    period: float
    starts: tuple[float, ...]
    pattern: Pattern


def least_work(problem: Problem) -> float:
    """Lower bound of the period of any block: the work of the busiest worker or link in a round."""
    numbers = numbers_of(problem)
    loads = [float(numbers.keeps[numbers.worker == w].sum()) for w in range(problem.workers)]
    if problem.lanes:
        carried = [0.0] * problem.links
        for letter in problem.letters:
            for need in letter.needs:
                if need.link is not None:
                    carried[need.link] += need.seconds
        loads += carried
    return max(loads)


def shortest_way(problem: Problem) -> float:
    """Seconds from first to last op of a micro-batch that never waits for another."""
    numbers, ways = numbers_of(problem), ways_of(len(problem.letters))
    while _later(numbers, 0.0, ways):
        pass
    return float((ways.start + numbers.keeps).max())


def timed(problem: Problem, pattern: Pattern) -> ModuloBlock | None:
    """The block of shortest period that keeps a pattern, as early as possible; None: the pattern waits in a
    circle.
    """
    ways = ways_of(len(problem.letters))
    period = least_period(numbers_of(problem), cut_of(pattern), least_work(problem), np.inf, ways)
    if period == np.inf:
        return None
    starts = ways.start - ways.start.min()
    return ModuloBlock(float(period), tuple(starts.tolist()), pattern)


def pattern_of(problem: Problem, starts: tuple[float, ...], period: float) -> Pattern:
    """The pattern of given starts."""
    rounds = tuple(int((at + CLOSE * period) // period) for at in starts)
    orders = []
    for worker in range(problem.workers):
        letters = problem.of_worker(worker)
        orders.append(tuple(sorted(letters, key=lambda n: (starts[n] - rounds[n] * period, n))))
    return Pattern(tuple(orders), rounds)


def unrolled(problem: Problem, block: ModuloBlock) -> Words:
    """The words of all micro-batches' rounds, by starts."""
    words = []
    for worker, row in enumerate(block.pattern.orders):
        place = {n: i for i, n in enumerate(row)}
        ops = [
            (block.pattern.rounds[n] + k, place[n], n)
            for n in problem.of_worker(worker)
            for k in range(problem.letters[n].count)
        ]
        words.append(tuple(n for _, _, n in sorted(ops)))
    return tuple(words)


class PatternArrays(NamedTuple):
    """A pattern as arrays: orders one after another, and rounds by letter."""

    order: Ints
    rounds: Ints


def cut_of(pattern: Pattern) -> PatternArrays:
    """A pattern as arrays."""
    return PatternArrays(np.array([n for row in pattern.orders for n in row]), np.array(pattern.rounds))


class Ways(NamedTuple):
    """Scratch memory for longest paths.

    Attributes:
        start: earliest start of each letter.
        before: the letter before on each letter's longest path; -1: none.
        length: seconds from that one's start to its own.
        back: ... minus this many periods.
        by_worker: the letter before in the worker's order; the letter itself if there is none.
        laps: minimum number of periods by which it starts later.
        seen: marks of the search for circles.
        sequence: the order in which letters are processed; the closer to that of their starts, the faster.
        critical: the letters of the circle that determines the period, or of the longest path; then -1.
    """

    start: Floats
    before: Ints
    length: Floats
    back: Ints
    by_worker: Ints
    laps: Ints
    seen: Ints
    sequence: Ints
    critical: Ints


def ways_of(letters: int) -> Ways:
    """Scratch memory for this many letters."""
    a, b, c, d, e = (np.zeros(letters, dtype=np.int64) for _ in range(5))
    number = np.arange(letters)
    return Ways(np.zeros(letters), a, np.zeros(letters), b, number, c, d, number.copy(), e)


@compiled
def least_period(numbers: Any, cut: Any, floor: float, most: float, ways: Any) -> float:
    """The shortest period of a pattern, ``floor`` or more; its earliest starts are in ``ways``.

    It is infinite if it exceeds ``most``.
    """
    for worker in range(len(numbers.of) - 1):
        a, b = numbers.of[worker], numbers.of[worker + 1]
        for at in range(a, b):
            letter = cut.order[at]
            preceding = cut.order[at - 1] if at > a else cut.order[b - 1]
            ways.by_worker[letter] = preceding
            # ``letter`` starts no earlier than ``preceding`` ends, this many periods later.
            ways.laps[letter] = cut.rounds[letter] - cut.rounds[preceding] - (1 if at == a else 0)
    period = floor
    for _ in range(200):
        ratio = _paths(numbers, period, ways)
        if ratio == 0.0:
            if period == floor:
                _mark_path(numbers, ways)
            return period
        if ratio > most or ratio <= period:
            return np.inf
        period = ratio
    return np.inf


@compiled
def _paths(numbers: Any, period: float, ways: Any) -> float:
    """Compute earliest starts; return 0, or the period at which the circle that was found just closes (inf:
    none).
    """
    ways.start[:] = 0.0
    ways.before[:] = -1
    for sweep in range(2 * len(ways.start) + 4):
        if not _later(numbers, period, ways):
            return 0.0
        if sweep >= 2:
            ratio = _circle(ways)
            if ratio != 0.0:
                return ratio
    return np.inf


@compiled
def _later(numbers: Any, period: float, ways: Any) -> bool:
    start, before, length, back = ways.start, ways.before, ways.length, ways.back
    first, maker, after, busy = numbers.into, numbers.maker, numbers.after, numbers.keeps
    by_worker, laps = ways.by_worker, ways.laps
    changed = False
    close = 1e-10 * period
    for n in ways.sequence:
        at, source = start[n] + close, -1
        for edge in range(first[n], first[n + 1]):
            ready = start[maker[edge]] + after[edge]
            if ready > at:
                at, source = ready, maker[edge]
                length[n], back[n] = after[edge], 0
        preceding = by_worker[n]
        ready = start[preceding] + busy[preceding] + laps[n] * period
        if ready > at and preceding != n:
            at, source = ready, preceding
            length[n], back[n] = busy[preceding], -laps[n]
        if source >= 0:
            start[n], before[n] = at, source
            changed = True
    return changed


@compiled
def _circle(ways: Any) -> float:
    """The period that the worst circle of last steps requires; 0: no circle, inf: no period suffices."""
    before, seen = ways.before, ways.seen
    seen[:] = -1
    worst = 0.0
    for n in range(len(before)):
        at = n
        while at >= 0 and seen[at] < 0:
            seen[at] = n
            at = before[at]
        if at >= 0 and seen[at] == n:
            seconds, back = ways.length[at], ways.back[at]
            letter = before[at]
            while letter != at:
                seconds += ways.length[letter]
                back += ways.back[letter]
                letter = before[letter]
            if back <= 0:
                return np.inf
            if seconds / back > worst:
                worst = seconds / back
                _mark(ways, at)
    return worst


@compiled
def _mark_path(numbers: Any, ways: Any) -> None:
    last = 0
    for n in range(len(ways.start)):
        if ways.start[n] + numbers.keeps[n] > ways.start[last] + numbers.keeps[last]:
            last = n
    _mark(ways, last)


@compiled
def _mark(ways: Any, last: int) -> None:
    at, count = last, 0
    while at >= 0 and count < len(ways.start) and (count == 0 or at != last):
        ways.critical[count] = at
        count += 1
        at = ways.before[at]
    if count < len(ways.start):
        ways.critical[count] = -1


@compiled
def _peak(numbers: Any, cut: Any, store: int, worker: int) -> float:
    a, b = numbers.of[worker], numbers.of[worker + 1]
    most = 0.0
    for i in range(a, b):
        n = cut.order[i]
        now = numbers.takes[store, n]
        for j in range(a, b):
            if j != i:
                letter = cut.order[j]
                now += numbers.net[store, letter] * (cut.rounds[n] - cut.rounds[letter] + (1 if j < i else 0))
        most = max(most, now)
    return most


@compiled
def has_room(numbers: Any, cut: Any, worker: int) -> bool:
    """Check that a worker keeps its limits."""
    fits = True
    for store in range(len(numbers.most)):
        fits = fits and _peak(numbers, cut, store, worker) <= numbers.most[store, worker]
    return fits
