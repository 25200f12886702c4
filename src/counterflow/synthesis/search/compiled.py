"""The compiled loops of the search: a word played, a word built by due times, a word improved by moves.

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


class Room(NamedTuple):
    """What ``build`` keeps about limits.

    Attributes:
        held: by store and worker, what it holds.
        working: by store and worker, most that one of its backwards adds while it runs.
        freed: by forward, how many of its ops have been freed.
        root: of a letter that frees a forward, that forward; else -1.
        of: worker w's letters are ``of[w]`` to ``of[w + 1]``.
    """

    held: Floats
    working: Floats
    freed: Ints
    root: Ints
    of: Ints


def room_of(numbers: Numbers, workers: int) -> Room:
    """Room in which nothing is held yet."""
    working = np.zeros((len(numbers.most), workers))
    root = np.full(len(numbers.worker), -1, dtype=np.int64)
    last = np.ones(len(root), dtype=np.bool_)
    last[numbers.own[numbers.own >= 0]] = False
    for letter, worker in enumerate(numbers.worker.tolist()):
        if numbers.forward[letter]:
            continue
        working[:, worker] = np.maximum(working[:, worker], numbers.at_start[:, letter])
        if last[letter]:
            root[letter] = letter
            while numbers.own[root[letter]] >= 0:
                root[letter] = numbers.own[root[letter]]
    of = np.searchsorted(numbers.worker, np.arange(workers + 1)).astype(np.int64)
    return Room(np.zeros_like(working), working, np.zeros(len(root), dtype=np.int64), root, of)


class Due(NamedTuple):
    """When ops are due, and how long a worker waits for the most urgent one.

    The k-th op of letter l is due at ``at[l] + k * step[l]``.
    """

    at: Floats
    step: Floats
    wait: float


@compiled
def build(n: Any, s: Any, room: Any, due: Any, flat: Any) -> bool:
    """Fill in words by due times; whether all ops could be placed.

    A worker that is free takes, of what can start within ``due.wait``, what is due first. A forward starts
    only if there is room left for one of each of its worker's forwards that have none in flight. So workers
    that run as much as they may never wait for each other in a circle.
    """
    reset(n, s)
    room.held[:] = 0.0
    room.freed[:] = 0
    workers = len(s.ended)
    for worker in range(workers):
        s.head[worker] = flat.first[worker]
        s.ended[worker] = 0.0
    free = np.zeros(workers)
    stale = np.ones(workers, dtype=np.bool_)
    for _ in range(len(flat.word)):
        chosen = -1
        for worker in range(workers):
            if stale[worker]:
                stale[worker] = False
                free[worker] = _next(n, s, room, worker)
            if free[worker] < NEVER and (chosen < 0 or free[worker] < free[chosen]):
                chosen = worker
        if chosen < 0:
            return False
        letter = _choice(n, s, room, due, chosen, free[chosen] + due.wait)
        flat.word[s.head[chosen]] = letter
        s.head[chosen] += 1
        _take(n, s, room, letter)
        stale[chosen] = True
        for edge in range(n.out[letter], n.out[letter + 1]):
            stale[n.worker[n.taker[edge]]] = True
    return True


@compiled
def ready_at(n: Any, s: Any, letter: int) -> float:
    """From when on a letter's next op, of which there is one, can run; never, as far as is known."""
    op = n.base[letter] + s.done[letter]
    if s.missing[op]:
        return NEVER
    return float(max(s.ended[n.worker[letter]], s.ready[op]))


@compiled
def _start(n: Any, s: Any, room: Any, letter: int) -> float:
    """The same, where limits allow it."""
    if s.done[letter] == n.ops[letter] or not _fits(n, s, room, letter):
        return NEVER
    return float(ready_at(n, s, letter))


@compiled
def _next(n: Any, s: Any, room: Any, worker: int) -> float:
    """From when on a worker can run something."""
    at = NEVER
    for letter in range(room.of[worker], room.of[worker + 1]):
        at = min(at, _start(n, s, room, letter))
    return at


@compiled
def _choice(n: Any, s: Any, room: Any, due: Any, worker: int, until: float) -> int:  # noqa: PLR0917 - compiled: no keywords
    """Of what can start by then, what is due first."""
    best, best_due = -1, NEVER
    for letter in range(room.of[worker], room.of[worker + 1]):
        late = due.at[letter] + s.done[letter] * due.step[letter]
        if late < best_due and _start(n, s, room, letter) <= until:
            best, best_due = letter, late
    return best


@compiled
def _take(n: Any, s: Any, room: Any, letter: int) -> None:
    worker, k = n.worker[letter], s.done[letter]
    s.ended[worker] = run_next(n, s, letter, max(s.ended[worker], s.ready[n.base[letter] + k]))
    s.done[letter] = k + 1
    for store in range(len(n.most)):
        room.held[store, worker] += n.at_start[store, letter] + n.at_end[store, letter]
    if room.root[letter] >= 0:
        room.freed[room.root[letter]] += 1


@compiled
def _fits(n: Any, s: Any, room: Any, letter: int) -> bool:
    """Whether there is room for an op of a letter."""
    worker = n.worker[letter]
    for store in range(len(n.most)):
        more = room.held[store, worker] + n.at_start[store, letter]
        if n.forward[letter]:
            more += room.working[store, worker]
            for other in range(room.of[worker], room.of[worker + 1]):
                waits = n.forward[other] and s.done[other] < n.ops[other]
                if waits and other != letter and s.done[other] == room.freed[other]:
                    more += n.at_start[store, other]
        if more > n.most[store, worker]:
            return False
    return True
