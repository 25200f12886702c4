"""The compiled loop that builds a word by due times: list scheduling within limits of memory.

Invariant: the same numbers in, the same numbers out. ``kernel.py`` says how words lie in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..kernel import NEVER, Floats, Ints, Numbers, begin_play, compiled, inlined, ready_at, run_next


class Room(NamedTuple):
    """What ``build`` keeps about limits.

    Attributes:
        held: by store and worker, what it holds.
        working: by store and worker, most that one of its backwards adds while it runs.
        freed: by forward, how many of its ops have been freed.
        root: of a letter that frees a forward, that forward; else -1.
    """

    held: Floats
    working: Floats
    freed: Ints
    root: Ints


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
    return Room(np.zeros_like(working), working, np.zeros(len(root), dtype=np.int64), root)


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
    room.held[:] = 0.0
    room.freed[:] = 0
    workers = len(s.ended)
    free = np.zeros(workers)
    begin_play(s, flat.first, free)
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
        run_next(n, s, chosen, letter, ready_at(n, s, chosen, letter))
        for store in range(len(n.most)):
            room.held[store, chosen] += n.net[store, letter]
        if room.root[letter] >= 0:
            room.freed[room.root[letter]] += 1
        stale[chosen] = True
        for edge in range(n.out[letter], n.out[letter + 1]):
            stale[n.worker[n.taker[n.sent[edge]]]] = True
    return True


@inlined
def _start(n: Any, s: Any, room: Any, worker: int, letter: int) -> float:
    """From when on a worker can run a letter's next op, if there is one and limits allow it."""
    if s.done[letter] == n.ops[letter] or not _fits(n, s, room, worker, letter):
        return NEVER
    return float(ready_at(n, s, worker, letter))


@compiled
def _next(n: Any, s: Any, room: Any, worker: int) -> float:
    """From when on a worker can run something."""
    at = NEVER
    for letter in range(n.of[worker], n.of[worker + 1]):
        at = min(at, _start(n, s, room, worker, letter))
    return at


@compiled
def _choice(n: Any, s: Any, room: Any, due: Any, worker: int, until: float) -> int:  # noqa: PLR0917 - compiled: no keywords
    """Of what can start by then, what is due first."""
    best, best_due = -1, NEVER
    for letter in range(n.of[worker], n.of[worker + 1]):
        late = due.at[letter] + s.done[letter] * due.step[letter]
        if late < best_due and _start(n, s, room, worker, letter) <= until:
            best, best_due = letter, late
    return best


@inlined
def _fits(n: Any, s: Any, room: Any, worker: int, letter: int) -> bool:
    """Whether a worker has room for an op of a letter."""
    for store in range(len(n.most)):
        more = room.held[store, worker] + n.at_start[store, letter]
        if n.forward[letter]:
            more += room.working[store, worker]
            for other in range(n.of[worker], n.of[worker + 1]):
                waits = n.forward[other] and s.done[other] < n.ops[other]
                if waits and other != letter and s.done[other] == room.freed[other]:
                    more += n.at_start[store, other]
        if more > n.most[store, worker]:
            return False
    return True
