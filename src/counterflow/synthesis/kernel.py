"""The compiled loops that all methods share: how words and numbers lie in memory, and a word played.

Words lie behind each other in one array, ``first[w]`` to ``first[w + 1]`` is worker w's. Ops are numbered by
letter: the k-th of letter l is ``base[l] + k``. Everything is as early as it can be, as in ``simulate``. That
plays lists made once for a schedule; here orders change move by move, so nothing is made from one: what an op
takes follows from its letter, and from how many of that letter ran before. Played by the player in its place,
with the op at each place of its lists, the annealer found the same orders to the last bit and made up to 30 %
fewer moves a second, of small problems the fewest.

Invariant: the same numbers in, the same numbers out; random numbers come from a state that is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from .problem import CLOSE, Problem, Words

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Chance = NDArray[np.uint64]
"""The state of random numbers."""

compiled = numba.njit(cache=True, nogil=True)
inlined = numba.njit(inline="always")
"""For what is called for each op: a call hands over all arrays of a record, which may last longer than it."""

NEVER = np.inf


def chance_of(seed: int) -> Chance:
    """Random numbers that begin anew."""
    return np.array([seed], dtype=np.uint64)


@compiled
def random(state: Any) -> float:
    """A number from 0 up to 1 (splitmix64)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return float(z >> np.uint64(11)) / 9007199254740992.0


@compiled
def shift(row: Any, source: int, target: int) -> None:
    """Put what stands at one place at another, and what is between them a place on."""
    moved = row[source]
    step = 1 if target > source else -1
    for at in range(source, target, step):
        row[at] = row[at + step]
    row[target] = moved


class Numbers(NamedTuple):
    """A problem as arrays; an edge goes from a letter to one that takes what it makes.

    Attributes:
        worker: of each letter.
        of: worker w's letters are ``of[w]`` to ``of[w + 1]``.
        seconds: of each letter.
        keeps: of each letter, seconds for which an op and its messages keep its worker busy.
        base: number of each letter's first op.
        ops: of each letter, how many.
        into: the edges that come into letter l are ``into[l]`` to ``into[l + 1]``.
        maker: of each edge, the letter that it comes from.
        taker: of each edge, the letter that it goes to.
        late: of each edge, seconds of its message.
        after: of each edge, seconds from its maker's start until its message is there, if its link is free.
        link: of each edge, its link; -1: none.
        slot: of each edge, where the arrivals of its messages begin in ``Scratch.arrivals``.
        out: the edges that leave letter l are ``sent[out[l]:out[l + 1]]``, by takers.
        sent: see ``out``.
        inputs: of each letter, the two of the same stage that it needs: of its own slice, and of the slice
            before or after; -1: none.
        chain: of each letter, its place on the way through its pipe and back.
        pipe: of each letter.
        at_start: by store and letter, what an op adds when it starts.
        takes: by store and letter, the most that an op adds while it runs.
        net: by store and letter, what it has added when it is over.
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
    of: Ints
    seconds: Floats
    keeps: Floats
    base: Ints
    ops: Ints
    into: Ints
    maker: Ints
    taker: Ints
    late: Floats
    after: Floats
    link: Ints
    slot: Ints
    out: Ints
    sent: Ints
    inputs: Ints
    chain: Ints
    pipe: Ints
    at_start: Floats
    takes: Floats
    net: Floats
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
    letters, stages = problem.letters, problem.workload.placement.stages
    needs = [(taker, need) for taker, x in enumerate(letters) for need in x.needs]
    inputs = np.full((len(letters), 2), -1, dtype=np.int64)
    keeps = [x.seconds for x in letters]
    after = []
    for taker, need in needs:
        maker, letter = letters[need.letter], letters[taker]
        if (maker.pipe, maker.stage) == (letter.pipe, letter.stage):
            inputs[taker, int(maker.part != letter.part)] = need.letter
        arrives = maker.seconds
        if need.link is not None:
            if problem.busy:
                arrives = keeps[need.letter]
                keeps[need.letter] += need.seconds
            arrives += need.seconds
        after.append(arrives)
    makers = _ints(need.letter for _, need in needs)
    counts = _ints(x.count for x in letters)
    workers = _ints(x.worker for x in letters)
    at_start, at_end = (
        np.array(rows, dtype=np.float64).reshape(-1, len(letters))
        for rows in ([s.at_start for s in problem.stores], [s.at_end for s in problem.stores])
    )
    most = np.array([store.most for store in problem.stores]).reshape(-1, problem.workers)
    return Numbers(
        worker=workers,
        of=np.searchsorted(workers, np.arange(problem.workers + 1)).astype(np.int64),
        seconds=np.array([x.seconds for x in letters]),
        keeps=np.array(keeps),
        base=_borders(counts),
        ops=counts,
        into=_borders(len(x.needs) for x in letters),
        maker=makers,
        taker=_ints(taker for taker, _ in needs),
        late=np.array([need.seconds for _, need in needs], dtype=np.float64),
        after=np.array(after, dtype=np.float64),
        link=_ints(-1 if need.link is None else need.link for _, need in needs),
        slot=_borders(letters[taker].count for taker, _ in needs),
        out=_borders(np.bincount(makers, minlength=len(letters))),
        sent=np.argsort(makers, kind="stable"),
        inputs=inputs,
        chain=_ints(
            x.stage + x.part if x.kind.is_forward else 2 * (stages + x.parts - 1) - x.stage - x.part
            for x in letters
        ),
        pipe=_ints(x.pipe for x in letters),
        at_start=at_start,
        takes=at_start + np.maximum(at_end, 0.0),
        net=at_start + at_end,
        most=most * (1 + CLOSE),
        sum_first=_borders(len(s.letters) for s in problem.sums),
        sum_letters=_ints(n for s in problem.sums for n in s.letters),
        sum_at=_borders(len(s.workers) for s in problem.sums),
        sum_workers=_ints(w for s in problem.sums for w in s.workers),
        sum_seconds=np.array([s.seconds for s in problem.sums], dtype=np.float64),
        lanes=problem.lanes,
        busy=problem.busy,
        links=problem.links,
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _borders(counts: Iterable[int]) -> Ints:
    return np.cumsum([0, *counts]).astype(np.int64)


class FlatWords(NamedTuple):
    """Words behind each other; worker w's is ``word[first[w]:first[w + 1]]``."""

    word: Ints
    first: Ints


def flat_of(words: Words) -> FlatWords:
    """Words behind each other."""
    return FlatWords(_ints(n for word in words for n in word), _borders(len(word) for word in words))


def words_of(flat: FlatWords) -> Words:
    """The opposite of ``flat_of``."""
    return tuple(tuple(flat.word[a:b].tolist()) for a, b in pairwise(flat.first.tolist()))


class Scratch(NamedTuple):
    """Arrays that a play fills in.

    Attributes:
        arrivals: by slot of an edge and number of an op, when a message is there that had to queue.
        start: by op.
        end: by op.
        ended: by worker, from when on it can run its next op.
        head: by worker, the place of that op.
        done: by letter, how many of its ops have run.
        free: by link, when it has carried all.
        summed: by sum, from when on it can run; below 0 where it has.
        lane: by worker, when it has done its sums.
        stood: by worker, where it began.
    """

    arrivals: Floats
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
        np.zeros(int(numbers.slot[-1])),
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
def begin_play(s: Any, first: Any, begin: Any) -> None:
    """Nothing has run and no message travels; workers begin at their first places, at these times."""
    s.done[:] = 0
    s.free[:] = 0.0
    for worker in range(len(begin)):
        s.head[worker] = first[worker]
        s.ended[worker] = begin[worker]


@inlined
def ready_at(n: Any, s: Any, worker: int, letter: int) -> float:
    """From when on a worker can run a letter's next op, of which there is one; never, as far as is known."""
    at, k = s.ended[worker], s.done[letter]
    for edge in range(n.into[letter], n.into[letter + 1]):
        if s.done[n.maker[edge]] <= k:
            return NEVER
        if (n.lanes or n.busy) and n.link[edge] >= 0:
            at = max(at, s.arrivals[n.slot[edge] + k])
        else:
            at = max(at, s.end[n.base[n.maker[edge]] + k] + n.late[edge])
    return float(at)


@inlined
def run_next(n: Any, s: Any, worker: int, letter: int, at: float) -> None:
    """Run a letter's next op from ``at`` on: its end, what it sends, and when its worker goes on."""
    k = s.done[letter]
    op = n.base[letter] + k
    end = at + n.seconds[letter]
    s.done[letter] = k + 1
    s.start[op], s.end[op] = at, end
    goes_on = end
    if n.lanes or n.busy:
        for place in range(n.out[letter], n.out[letter + 1]):
            edge = n.sent[place]
            link = n.link[edge]
            if link >= 0:
                arrives = end
                if n.busy:
                    arrives = goes_on
                    goes_on += n.late[edge]
                if n.lanes:
                    arrives = max(arrives, s.free[link])
                arrives += n.late[edge]
                s.free[link] = arrives
                s.arrivals[n.slot[edge] + k] = arrives
    s.ended[worker] = goes_on


@compiled
def _sum(n: Any, s: Any) -> None:
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
def play(n: Any, s: Any, flat: Any, begin: Floats) -> bool:
    """Play words, each worker from ``begin`` on; whether they end. Fills ``start``, ``end`` and ``ended``."""
    begin_play(s, flat.first, begin)
    remaining = len(flat.word)
    while remaining:
        before = remaining
        for worker in range(len(begin)):
            place = s.head[worker]
            while place < flat.first[worker + 1]:
                at = ready_at(n, s, worker, flat.word[place])
                if at == NEVER:
                    break
                run_next(n, s, worker, flat.word[place], at)
                place += 1
            remaining -= place - s.head[worker]
            s.head[worker] = place
        if remaining == before:
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
    """Duration of the words, with a small part for what workers other than the last could gain.

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
    now, best_begin = begin.copy(), begin.copy()
    for _ in range(rounds):
        if not play(n, s, flat, now):
            return NEVER
        took = (s.ended - now).max()
        if took < best:
            best = took
            best_begin[:] = now
        now = s.ended - s.ended.min()
    begin[:] = best_begin
    return best
