"""Words squeezed: where a worker would wait for its next op, it runs a later one that can run.

Invariant: an op goes ahead of others only if all of them still fit into the limits after it. So no worker
ever holds more than it may, and words that did not deadlock still do not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Need, Objective, Problem, Store, Words
from ..search.compiled import (
    NEVER,
    Flat,
    Floats,
    Ints,
    Numbers,
    compiled,
    flat_of,
    numbers_of,
    play,
    reset,
    run_next,
    scratch_of,
    settle,
    words_of,
)


def reversed_problem(problem: Problem) -> Problem:
    """The same problem with time running backwards: makers are takers, and what an op freed it takes.

    A word of one, read from its end, is a word of the other, and holds as much.
    """
    takers: list[list[Need]] = [[] for _ in problem.letters]
    for number, letter in enumerate(problem.letters):
        for need in letter.needs:
            takers[need.letter].append(Need(number, need.seconds, need.link))
    letters = tuple(replace(x, needs=tuple(row)) for x, row in zip(problem.letters, takers, strict=True))
    stores = tuple(
        Store(s.name, tuple(-b for b in s.at_end), tuple(-a for a in s.at_start), s.most)
        for s in problem.stores
    )
    return replace(problem, letters=letters, stores=stores, sums=())


def mirrored(words: Words) -> Words:
    """The words read from their ends."""
    return tuple(word[::-1] for word in words)


class Squeezer:
    """Squeezes words of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ways = tuple(_Way(x) for x in (problem, reversed_problem(problem)))

    def seconds(self, words: Words) -> float:
        """How long words take: the makespan, or the steady step; infinite where they wait in a circle."""
        flat = flat_of(words)
        seconds, _ = self._ways[0].begin(flat)
        return seconds

    def squeezed(self, words: Words, late: float = NEVER) -> Words:
        """Words with waits filled, from the front and from the back in turns as long as that helps.

        Args:
            words: within the problem's limits, and without a circle of waits.
            late: how many seconds later, at most, the op that is next may start for one that is taken before
                it, as far as is known when that one starts.
        """
        best, least, since = words, self.seconds(words), 0
        for turn in range(MOST_TURNS):
            words = self._once(words, late, back=turn % 2 == 1)
            seconds = self.seconds(words)
            since = 0 if seconds < least * (1 - _CLOSE) else since + 1
            if seconds < least:
                best, least = words, seconds
            if since == 3:
                break
        return best

    def wandered(
        self, words: Words, *, turns: int | None = None, until: float = inf, seed: int = 0
    ) -> Iterator[Words]:
        """Words, each better than all before: squeezed from either side again and again, as chance has it.

        Each squeeze draws how late it may make the op that is next. So words become others that take about as
        long, from which the next squeezes may lead on.

        Args:
            words: within the problem's limits, and without a circle of waits.
            turns: how many times it is tried.
            until: when to stop, on the monotonic clock.
            seed: of the random numbers.
        """
        chance = np.random.default_rng(seed)
        mean = sum(self._problem.work()) / self._problem.ops
        best = now = words
        least = seconds = self.seconds(words)
        for _ in range(sys.maxsize if turns is None else turns):
            if monotonic() > until:
                return
            tried = now
            for _ in range(int(chance.integers(1, 5))):
                late = float(_LATE[chance.integers(len(_LATE))]) * mean
                tried = self._once(tried, late, back=bool(chance.integers(2)))
            taken = self.seconds(tried)
            if taken <= seconds * (1 + _WORSE * max(0.0, float(chance.uniform(-2, 1)))):
                now, seconds = tried, taken
            if taken < least * (1 - _CLOSE):
                best, least = tried, taken
                yield best
            if seconds > least * (1 + 2 * _WORSE):
                now, seconds = best, least

    def _once(self, words: Words, late: float, *, back: bool) -> Words:
        """Words squeezed from the front, or from the back."""
        if back:
            return mirrored(self._ways[1].squeezed(mirrored(words), late))
        return self._ways[0].squeezed(words, late)


_LATE = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, inf)
"""How late a squeezed op may make the next one while words wander, in ops."""

_WORSE = 0.002
"""How much longer words may be for others to come of them."""

MOST_TURNS = 12
"""From the front and from the back together."""

LOOKED_AHEAD = 256
"""How many ops of its word a worker looks ahead."""

_CLOSE = 1e-9
_SETTLED = 8
"""Steps played to see where workers stand at the border of two steps."""


class _Way:
    """One direction of time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.numbers = numbers_of(problem)
        self.scratch = scratch_of(self.numbers, problem.workers)

    def begin(self, flat: Flat) -> tuple[float, Floats]:
        """How long words take, and when each worker begins."""
        begin = np.zeros(self.problem.workers)
        if self.problem.objective is Objective.STEADY:
            return settle(self.numbers, self.scratch, flat, begin, _SETTLED), begin
        if not play(self.numbers, self.scratch, flat, begin):
            return NEVER, begin
        return float(self.scratch.ended.max()) + self.problem.tail, begin

    def squeezed(self, words: Words, late: float) -> Words:
        """Once, from the front."""
        flat = flat_of(words)
        _, begin = self.begin(flat)
        self.scratch.ended[:] = begin
        ended = _squeeze(self.numbers, self.scratch, _left(self.numbers, flat, late), flat)
        assert ended  # the op that is next can always run in the end
        return words_of(flat)


class _Left(NamedTuple):
    """What a squeeze keeps: of words, what is left of them; of workers, what they can do next.

    Attributes:
        word: the words as they were.
        stop: by worker, where its word ends.
        late: see ``Squeezer.squeezed``.
        after: by place, the place after it that is left.
        head: by worker, the first place that is left.
        put: by worker, where its next op goes.
        held: by store and worker.
        at: by worker, when it can run something; never, as far as is known.
        before: by worker, the place before that op's; -1: it is the first that is left.
        stale: by worker, whether these two have to be looked up.
        seen: by letter, in which look it was last seen.
        looks: how many there were.
        now: by store, what will be held once all ops up to here have run ...
        most: ... and the most until then.
    """

    word: Ints
    stop: Ints
    late: float
    after: Ints
    head: Ints
    put: Ints
    held: Floats
    at: Floats
    before: Ints
    stale: NDArray[np.bool_]
    seen: Ints
    looks: Ints
    now: Floats
    most: Floats


def _left(numbers: Numbers, flat: Flat, late: float) -> _Left:
    workers, stores = len(flat.first) - 1, len(numbers.most)
    return _Left(
        flat.word.copy(),
        flat.first[1:],
        late,
        np.arange(1, len(flat.word) + 1),
        flat.first[:-1].copy(),
        flat.first[:-1].copy(),
        np.zeros((stores, workers)),
        np.zeros(workers),
        np.zeros(workers, dtype=np.int64),
        np.ones(workers, dtype=np.bool_),
        np.zeros(len(numbers.worker), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.zeros(stores),
        np.zeros(stores),
    )


@compiled
def _squeeze(n: Any, s: Any, x: Any, flat: Any) -> bool:
    """Put the words of ``flat`` into another order, in place; workers begin at ``s.ended``."""
    reset(n, s)
    workers = len(s.ended)
    for _ in range(len(flat.word)):
        chosen = -1
        for worker in range(workers):
            if x.stale[worker]:
                x.stale[worker] = False
                _look(n, s, x, worker)
            if x.at[worker] < NEVER and (chosen < 0 or x.at[worker] < x.at[chosen]):
                chosen = worker
        if chosen < 0:
            return False
        before = x.before[chosen]
        if before < 0:
            here = x.head[chosen]
            x.head[chosen] = x.after[here]
        else:
            here = x.after[before]
            x.after[before] = x.after[here]
        letter = x.word[here]
        flat.word[x.put[chosen]] = letter
        x.put[chosen] += 1
        s.ended[chosen] = run_next(n, s, letter, x.at[chosen])
        s.done[letter] += 1
        x.held[:, chosen] += n.at_start[:, letter] + n.at_end[:, letter]
        x.stale[chosen] = True
        for edge in range(n.out[letter], n.out[letter + 1]):
            x.stale[n.worker[n.taker[edge]]] = True
    return True


@compiled
def _start(n: Any, s: Any, letter: int) -> float:
    """When a letter's next op can start; never, as far as is known."""
    op = n.base[letter] + s.done[letter]
    if s.missing[op]:
        return NEVER
    return float(max(s.ended[n.worker[letter]], s.ready[op]))


@compiled
def _look(n: Any, s: Any, x: Any, worker: int) -> None:
    """Look up what a worker can run first: the next op, or one after it while it would wait."""
    x.at[worker], x.before[worker] = NEVER, -1
    here, word = x.head[worker], x.word
    if here >= x.stop[worker]:
        return
    due = _start(n, s, word[here])
    x.at[worker] = due
    x.now[:] = x.held[:, worker]
    x.most[:] = 0.0
    x.looks[0] += 1
    for _ in range(LOOKED_AHEAD):
        if x.at[worker] <= s.ended[worker]:
            return
        letter = word[here]
        x.seen[letter] = x.looks[0]
        for store in range(len(n.most)):
            x.now[store] += n.at_start[store, letter]
            x.most[store] = max(x.most[store], x.now[store])
            x.now[store] += n.at_end[store, letter]
            x.most[store] = max(x.most[store], x.now[store])
        before, here = here, x.after[here]
        if here >= x.stop[worker]:
            return
        letter = word[here]
        if x.seen[letter] != x.looks[0]:
            start = _start(n, s, letter)
            if start < x.at[worker] and start + n.seconds[letter] <= due + x.late and _fits(n, x, letter):
                x.at[worker], x.before[worker] = start, before


@compiled
def _fits(n: Any, x: Any, letter: int) -> bool:
    """Whether an op can run now, and all that stand before it after it, within the limits."""
    worker = n.worker[letter]
    for store in range(len(n.most)):
        takes = n.at_start[store, letter]
        net = takes + n.at_end[store, letter]
        most = max(x.held[store, worker] + max(takes, net), x.most[store] + net)
        if most > n.most[store, worker]:
            return False
    return True
