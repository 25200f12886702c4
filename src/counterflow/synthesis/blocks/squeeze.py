"""Squeezed words: where a worker would wait for its next op, it runs a later one that can run.

Invariant: an op overtakes others only if all of these still fit into the limits after it. So no worker ever
exceeds its limits, and words that did not deadlock still do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernel import (
    NEVER,
    FlatWords,
    Floats,
    Ints,
    Numbers,
    begin_play,
    compiled,
    flat_of,
    numbers_of,
    play,
    ready_at,
    run_next,
    scratch_of,
    settle,
)
from ..problem import CLOSE, Need, Objective, Problem, Store, Words


def reversed_problem(problem: Problem) -> Problem:
    """The same problem with time reversed: makers are takers, and what an op freed it takes.

    A word of one problem, read from its end, is a word of the other, with the same memory.
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


@dataclass(frozen=True, slots=True)
class Lateness:
    """Maximum delay in seconds of the next op by one that is run before it.

    The delay is estimated when that one starts.

    Attributes:
        front: delay if words are squeezed from the front.
        back: delay if words are squeezed from the back.
    """

    front: float = NEVER
    back: float = NEVER


class Squeezer:
    """Squeezes words of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._ways = tuple(_Way(x) for x in (problem, reversed_problem(problem)))

    def seconds(self, words: Words) -> float:
        """Duration of words: the makespan, or the steady step; infinite if they wait in a circle."""
        seconds, _ = self._ways[0].begin(flat_of(words))
        return seconds

    def flat_squeezed(
        self,
        flat: FlatWords,
        late: Lateness,
        *,
        back: bool = False,
        ended: Callable[[], bool] = lambda: False,
    ) -> tuple[float, FlatWords]:
        """Words with filled waits, squeezed from the front and from the back alternately as long as that
        helps.

        Returns the duration of the best words, and these.

        Args:
            flat: words within the problem's limits, and without a circle of waits.
            late: maximum delays for each side.
            back: whether the first turn is from the back.
            ended: called after each turn; returns whether to stop.
        """
        best, least, since = flat, NEVER, 0
        for _ in range(MOST_TURNS):
            flat = self._once(flat, late, back=back)
            back = not back
            seconds, _ = self._ways[0].begin(flat)
            since = 0 if seconds < least * (1 - CLOSE) else since + 1
            if seconds < least:
                best, least = flat, seconds
            if since == 3 or ended():
                break
        return least, best

    def _once(self, flat: FlatWords, late: Lateness, *, back: bool) -> FlatWords:
        if back:
            return _mirrored(self._ways[1].squeezed(_mirrored(flat), late.back))
        return self._ways[0].squeezed(flat, late.front)


def _mirrored(flat: FlatWords) -> FlatWords:
    word = np.concatenate([flat.word[a:b][::-1] for a, b in pairwise(flat.first.tolist())])
    return FlatWords(word, flat.first)


MOST_TURNS = 12
"""Maximum turns from the front and from the back together."""

LOOKED_AHEAD = 256
"""Number of ops of its word that a worker looks ahead."""

_SETTLED = 8
"""Number of steps played to find the offsets of workers at the border of two steps."""


class _Way:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.numbers = numbers_of(problem)
        self.scratch = scratch_of(self.numbers, problem.workers)

    def begin(self, flat: FlatWords) -> tuple[float, Floats]:
        """Duration of words, and the beginning of each worker."""
        begin = np.zeros(self.problem.workers)
        if self.problem.objective is Objective.STEADY:
            return settle(self.numbers, self.scratch, flat, begin, _SETTLED), begin
        if not play(self.numbers, self.scratch, flat, begin):
            return NEVER, begin
        return float(self.scratch.ended.max()) + self.problem.tail, begin

    def squeezed(self, flat: FlatWords, late: float) -> FlatWords:
        """Squeeze once, from the front."""
        _, begin = self.begin(flat)
        begin_play(self.scratch, flat.first, begin)
        result = FlatWords(flat.word.copy(), flat.first)
        ended = _squeeze(self.numbers, self.scratch, _squeezing(self.numbers, flat, late), result)
        assert ended  # the next op can always run in the end
        return result


class _Squeezing(NamedTuple):
    """State of a squeeze: the rest of each word, and the ops that workers can run next.

    Attributes:
        word: the words as they were.
        stop: by worker, end of its word.
        late: see ``Lateness``.
        after: by place, the next place that is left.
        head: by worker, the first place that is left.
        memory: memory by store and worker.
        at: by worker, time when it can run an op; infinite if unknown.
        before: by worker, the place before that op; -1: it is the first that is left.
        stale: by worker, whether these two have to be computed again.
        seen: by letter, number of the look in which it was last seen.
        looks: number of looks.
        letters: by worker, number of its letters with ops left.
        now: by store, memory after all ops up to here have run ...
        most: ... and the maximum until then.
    """

    word: Ints
    stop: Ints
    late: float
    after: Ints
    head: Ints
    memory: Floats
    at: Floats
    before: Ints
    stale: NDArray[np.bool_]
    seen: Ints
    looks: Ints
    letters: Ints
    now: Floats
    most: Floats


def _squeezing(numbers: Numbers, flat: FlatWords, late: float) -> _Squeezing:
    workers, stores = len(flat.first) - 1, len(numbers.most)
    return _Squeezing(
        flat.word.copy(),
        flat.first[1:],
        late,
        np.arange(1, len(flat.word) + 1),
        flat.first[:-1].copy(),
        np.zeros((stores, workers)),
        np.zeros(workers),
        np.zeros(workers, dtype=np.int64),
        np.ones(workers, dtype=np.bool_),
        np.zeros(len(numbers.worker), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.diff(numbers.of),
        np.zeros(stores),
        np.zeros(stores),
    )


@compiled
def _squeeze(n: Any, s: Any, x: Any, flat: Any) -> bool:
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
        flat.word[s.head[chosen]] = letter
        s.head[chosen] += 1
        run_next(n, s, chosen, letter, x.at[chosen])
        if s.done[letter] == n.ops[letter]:
            x.letters[chosen] -= 1
        for store in range(len(n.most)):  # slices would allocate new arrays
            x.memory[store, chosen] += n.net[store, letter]
        x.stale[chosen] = True
        for edge in range(n.out[letter], n.out[letter + 1]):
            x.stale[n.worker[n.taker[n.sent[edge]]]] = True
    return True


@compiled
def _look(n: Any, s: Any, x: Any, worker: int) -> None:
    x.at[worker], x.before[worker] = NEVER, -1
    here, word = x.head[worker], x.word
    if here >= x.stop[worker]:
        return
    due = ready_at(n, s, worker, word[here])
    x.at[worker] = due
    for store in range(len(n.most)):
        x.now[store], x.most[store] = x.memory[store, worker], 0.0
    x.looks[0] += 1
    kinds = x.letters[worker]
    for _ in range(LOOKED_AHEAD):
        if x.at[worker] <= s.ended[worker]:
            return
        letter = word[here]
        if x.seen[letter] != x.looks[0]:
            x.seen[letter] = x.looks[0]
            kinds -= 1
            if not kinds:
                return
        _pass(n, x, letter)
        before, here = here, x.after[here]
        if here >= x.stop[worker]:
            return
        letter = word[here]
        if x.seen[letter] != x.looks[0]:
            start = ready_at(n, s, worker, letter)
            if start < x.at[worker] and start + n.seconds[letter] <= due + x.late and _fits(n, x, letter):
                x.at[worker], x.before[worker] = start, before


@compiled
def _pass(n: Any, x: Any, letter: int) -> None:
    for store in range(len(n.most)):
        x.most[store] = max(x.most[store], x.now[store] + n.takes[store, letter])
        x.now[store] += n.net[store, letter]


@compiled
def _fits(n: Any, x: Any, letter: int) -> bool:
    worker = n.worker[letter]
    for store in range(len(n.most)):
        takes, net = n.takes[store, letter], n.net[store, letter]
        most = max(x.memory[store, worker] + takes, x.most[store] + net)
        if most > n.most[store, worker]:
            return False
    return True
