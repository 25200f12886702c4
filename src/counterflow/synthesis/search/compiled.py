"""The compiled loops of the search: how words and numbers lie in memory, and a word played.

Words lie behind each other in one array, ``first[w]`` to ``first[w + 1]`` is worker w's. Ops are numbered by
letter: the k-th of letter l is ``base[l] + k``. Everything is as early as it can be, as in ``simulate``.

Invariant: the same numbers in, the same numbers out; random numbers come from a state that is handed in.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from ..problem import CLOSE, Problem, Words

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

compiled = numba.njit(cache=True, nogil=True)

NEVER = np.inf


@compiled
def random(state: Any) -> float:
    """A number from 0 up to 1 (splitmix64)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return float(z >> np.uint64(11)) / 9007199254740992.0


class Numbers(NamedTuple):
    """A problem as arrays; edges go from a letter to one that takes what it makes.

    Attributes:
        worker: of each letter.
        seconds: of each letter.
        base: number of each letter's first op.
        ops: of each letter, how many.
        out: the edges that leave letter l are ``out[l]`` to ``out[l + 1]``.
        taker: of each edge, the letter.
        delay: of each edge, seconds of its message.
        link: of each edge, its link; -1: none.
        needed: of each letter, how many edges come in.
        into: the edges that come into letter l are ``into[l]`` to ``into[l + 1]``: from ...
        maker: ... which letter ...
        late: ... and how long its message travels.
        own: of each letter, the one of the same stage that it needs; -1: none.
        forward: whether a letter is a forward.
        at_start: by store and letter.
        at_end: by store and letter.
        most: by store and worker.
        sum_first: the letters of sum i are ``sum_letters[sum_first[i]:sum_first[i + 1]]``...
        sum_letters: ...
        sum_at: ... its workers ``sum_workers[sum_at[i]:sum_at[i + 1]]`` ...
        sum_workers: ...
        sum_seconds: ... and its seconds.
        lanes: whether a link carries one message at a time.
        busy: whether a worker is busy while its messages travel.
        links: how many there are.
    """

    worker: Ints
    seconds: Floats
    base: Ints
    ops: Ints
    out: Ints
    taker: Ints
    delay: Floats
    link: Ints
    needed: Ints
    into: Ints
    maker: Ints
    late: Floats
    own: Ints
    forward: NDArray[np.bool_]
    at_start: Floats
    at_end: Floats
    most: Floats
    sum_first: Ints
    sum_letters: Ints
    sum_at: Ints
    sum_workers: Ints
    sum_seconds: Floats
    lanes: bool
    busy: bool
    links: int


def numbers_of(problem: Problem) -> Numbers:
    """The problem as arrays."""
    letters = problem.letters
    edges: list[list[tuple[int, float, int]]] = [[] for _ in letters]
    own = []
    for taker, letter in enumerate(letters):
        before = -1
        for need in letter.needs:
            edges[need.letter].append((taker, need.seconds, -1 if need.link is None else need.link))
            maker = letters[need.letter]
            same = (maker.worker, maker.pipe, maker.stage) == (letter.worker, letter.pipe, letter.stage)
            before = need.letter if same else before
        own.append(before)
    for row in edges:
        row.sort(key=lambda edge: edge[0])
    flat = [edge for row in edges for edge in row]
    counts = np.array([x.count for x in letters], dtype=np.int64)
    most = np.array([store.most for store in problem.stores]).reshape(-1, problem.workers)
    return Numbers(
        worker=np.array([x.worker for x in letters], dtype=np.int64),
        seconds=np.array([x.seconds for x in letters]),
        base=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        ops=counts,
        out=np.concatenate(([0], np.cumsum([len(row) for row in edges]))).astype(np.int64),
        taker=np.array([t for t, _, _ in flat], dtype=np.int64),
        delay=np.array([d for _, d, _ in flat], dtype=np.float64),
        link=np.array([k for _, _, k in flat], dtype=np.int64),
        needed=np.array([len(x.needs) for x in letters], dtype=np.int64),
        into=np.concatenate(([0], np.cumsum([len(x.needs) for x in letters]))).astype(np.int64),
        maker=np.array([need.letter for x in letters for need in x.needs], dtype=np.int64),
        late=np.array([need.seconds for x in letters for need in x.needs], dtype=np.float64),
        own=np.array(own, dtype=np.int64),
        forward=np.array([x.kind.whole for x in letters]),
        at_start=np.array([s.at_start for s in problem.stores]).reshape(-1, len(letters)),
        at_end=np.array([s.at_end for s in problem.stores]).reshape(-1, len(letters)),
        most=most * (1 + CLOSE),
        sum_first=np.cumsum([0, *(len(s.letters) for s in problem.sums)]).astype(np.int64),
        sum_letters=np.array([n for s in problem.sums for n in s.letters], dtype=np.int64),
        sum_at=np.cumsum([0, *(len(s.workers) for s in problem.sums)]).astype(np.int64),
        sum_workers=np.array([w for s in problem.sums for w in s.workers], dtype=np.int64),
        sum_seconds=np.array([s.seconds for s in problem.sums], dtype=np.float64),
        lanes=problem.lanes,
        busy=problem.busy,
        links=problem.links,
    )


class Flat(NamedTuple):
    """Words behind each other; worker w's is ``word[first[w]:first[w + 1]]``."""

    word: Ints
    first: Ints


def flat_of(words: Words) -> Flat:
    """Words behind each other."""
    first = np.cumsum([0, *(len(word) for word in words)]).astype(np.int64)
    return Flat(np.array([n for word in words for n in word], dtype=np.int64), first)


def words_of(flat: Flat) -> Words:
    """The opposite of ``flat_of``."""
    return tuple(tuple(flat.word[a:b].tolist()) for a, b in pairwise(flat.first.tolist()))


class Scratch(NamedTuple):
    """What a play fills in: by op ``ready``, ``missing``, ``start``, ``end``; by worker ``ended``; others."""

    ready: Floats
    missing: Ints
    start: Floats
    end: Floats
    ended: Floats
    head: Ints
    done: Ints
    free: Floats
    summed: Floats
    lane: Floats
    stood: Floats


def scratch_of(numbers: Numbers, workers: int) -> Scratch:
    """Room for a play."""
    ops = int(numbers.base[-1])
    return Scratch(
        np.zeros(ops),
        np.zeros(ops, dtype=np.int64),
        np.zeros(ops),
        np.zeros(ops),
        np.zeros(workers),
        np.zeros(workers, dtype=np.int64),
        np.zeros(len(numbers.worker), dtype=np.int64),
        np.zeros(max(1, numbers.links)),
        np.zeros(len(numbers.sum_seconds)),
        np.zeros(workers),
        np.zeros(workers),
    )


@compiled
def run_next(n: Any, s: Any, letter: int, at: float) -> float:
    """Run the next op of a letter from ``at`` on: its end, what it sends, and when its worker goes on."""
    k = s.done[letter]
    op = n.base[letter] + k
    end = at + n.seconds[letter]
    s.start[op], s.end[op] = at, end
    goes_on = end
    for edge in range(n.out[letter], n.out[letter + 1]):
        taken = n.base[n.taker[edge]] + k
        arrives = end
        if n.link[edge] >= 0:
            arrives = goes_on if n.busy else end
            if n.lanes:
                arrives = max(arrives, s.free[n.link[edge]])
            arrives += n.delay[edge]
            if n.lanes:
                s.free[n.link[edge]] = arrives
            if n.busy:
                goes_on += n.delay[edge]
        s.ready[taken] = max(s.ready[taken], arrives)
        s.missing[taken] -= 1
    return float(goes_on)


@compiled
def _sum(n: Any, s: Any) -> None:
    """Sums after the ops, in the order in which they can begin; lifts ``ended``."""
    sums = len(n.sum_seconds)
    if sums == 0:
        return
    for i in range(sums):
        at = 0.0
        for j in range(n.sum_first[i], n.sum_first[i + 1]):
            letter = n.sum_letters[j]
            at = max(at, s.end[n.base[letter] + n.ops[letter] - 1])
        s.summed[i] = at
    s.lane[:] = 0.0
    for _ in range(sums):
        best = -1
        for i in range(sums):
            if s.summed[i] >= 0 and (best < 0 or s.summed[i] < s.summed[best]):
                best = i
        at = s.summed[best]
        for j in range(n.sum_at[best], n.sum_at[best + 1]):
            at = max(at, s.lane[n.sum_workers[j]])
        at += n.sum_seconds[best]
        for j in range(n.sum_at[best], n.sum_at[best + 1]):
            worker = n.sum_workers[j]
            s.lane[worker] = at
            s.ended[worker] = max(s.ended[worker], at)
        s.summed[best] = -1.0


@compiled
def reset(n: Any, s: Any) -> None:
    """Nothing has run and no message travels; ``ended`` and ``head`` are the caller's."""
    for letter in range(len(n.worker)):
        s.missing[n.base[letter] : n.base[letter + 1]] = n.needed[letter]
    s.ready[:] = 0.0
    s.done[:] = 0
    s.free[:] = 0.0


@compiled
def play(n: Any, s: Any, flat: Any, begin: Floats) -> bool:
    """Play words, each worker from ``begin`` on; whether they end. Fills ``start``, ``end`` and ``ended``."""
    if not n.lanes and not n.busy:
        return _play_free(n, s, flat, begin)
    reset(n, s)
    workers = len(begin)
    for worker in range(workers):
        s.head[worker] = flat.first[worker]
        s.ended[worker] = begin[worker]
    left = len(flat.word)
    while left:
        before = left
        for worker in range(workers):
            place, at = s.head[worker], s.ended[worker]
            while place < flat.first[worker + 1]:
                letter = flat.word[place]
                k = s.done[letter]
                op = n.base[letter] + k
                if s.missing[op]:
                    break
                at = run_next(n, s, letter, max(at, s.ready[op]))
                s.done[letter] = k + 1
                place += 1
            left -= place - s.head[worker]
            s.head[worker], s.ended[worker] = place, at
        if left == before:
            return False
    _sum(n, s)
    return True


ROUNDS = 3
MEAN, MEAN_STEADY = 1e-4, 1e-3
"""The weight of the mean of all workers' times beside the longest.

In the steady state all workers take equally long, so that none can be the only one to gain.
"""


@compiled
def worth(n: Any, s: Any, flat: Any, begin: Floats, steady: bool) -> float:
    """How long the words take, with a small part for what workers other than the last could gain.

    Whatever ``begin`` is, the steady step is at most the longest time from a worker's ``begin`` to its end:
    the next step can do everything just so much later.
    """
    best = NEVER
    for _ in range(ROUNDS if steady else 1):
        if not play(n, s, flat, begin):
            return NEVER
        most, total = 0.0, 0.0
        for worker in range(len(begin)):
            took = s.ended[worker] - (begin[worker] if steady else 0.0)
            most = max(most, took)
            total += took
        best = min(best, most + (MEAN_STEADY if steady else MEAN) * total / len(begin))
        s.stood[:] = begin
        if steady:
            begin[:] = s.ended - s.ended.min()
    return best


@compiled
def settle(n: Any, s: Any, flat: Any, begin: Floats, rounds: int) -> float:
    """Play step after step without a barrier.

    Leaves in ``begin`` where workers stood before the shortest step, and returns its seconds.
    """
    best = NEVER
    now, kept = begin.copy(), begin.copy()
    for _ in range(rounds):
        if not play(n, s, flat, now):
            return NEVER
        took = (s.ended - now).max()
        if took < best:
            best = took
            kept[:] = now
        now = s.ended - s.ended.min()
    begin[:] = kept
    return best


@compiled
def _play_free(n: Any, s: Any, flat: Any, begin: Floats) -> bool:
    """The same where messages wait for nothing: each op looks up what it takes."""
    workers = len(begin)
    s.done[:] = 0
    for worker in range(workers):
        s.head[worker] = flat.first[worker]
        s.ended[worker] = begin[worker]
    left = len(flat.word)
    while left:
        before = left
        for worker in range(workers):
            place, stop, at = s.head[worker], flat.first[worker + 1], s.ended[worker]
            came = place
            while place < stop:
                letter = flat.word[place]
                k = s.done[letter]
                there = True
                for edge in range(n.into[letter], n.into[letter + 1]):
                    maker = n.maker[edge]
                    if s.done[maker] <= k:
                        there = False
                        break
                    at = max(at, s.end[n.base[maker] + k] + n.late[edge])
                if not there:
                    break
                op = n.base[letter] + k
                s.start[op] = at
                at += n.seconds[letter]
                s.end[op] = at
                s.done[letter] = k + 1
                s.ended[worker] = at
                place += 1
            left -= place - came
            s.head[worker] = place
        if left == before:
            return False
    _sum(n, s)
    return True
