"""The player: lists are gone through side by side, each node as soon as what it takes is there.

A list is what does one thing at a time: a worker's compute, or a sum of gradients beside it. A node is an op,
or a moment at which a list waits. What a node makes for other lists leaves behind it as messages; those of
one lane travel one after another. When lists begin, and until when lanes are taken, is given and found: a
play that begins where another ended is the next step. A play with a limit is given up as soon as a list is
sure to be late. Where nothing lasts, a play says who gets how far, and who is stuck.

The same function runs as plain Python on lists and, once a process has played enough for numba's load time
to pay, compiled on arrays. Both do the same additions and comparisons, so results are equal to the last bit;
and whatever the order of turns, times are the same, as a node's are the largest of the nodes it waits for.
``lists.py`` makes what is played of schedules and of programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.scheme import NumberLoop

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOAD_NUMBA_AFTER = 400_000
"""Nodes played in plain Python, over the life of the process, before numba is loaded (half a second)."""


class ListArrays(NamedTuple):
    """Arrays that are played; nodes are numbered list by list in order, messages by their makers.

    Attributes:
        first: each list's first node, and one past the last of all.
        takes: node n takes the messages ``inputs[takes[n]:takes[n + 1]]``.
        inputs: see ``takes``.
        outputs: node n makes the messages from ``outputs[n]`` to ``outputs[n + 1]``; those after
            all are never made.
        receivers: the list that takes each message.
    """

    first: Ints
    takes: Ints
    inputs: Ints
    outputs: Ints
    receivers: Ints


class Lasting(NamedTuple):
    """Durations of everything, in seconds.

    Attributes:
        nodes: each node.
        busy: how long its list is busy with messages behind each node.
        late: how long behind the end of its node each message may begin.
        travel: each message on its lane.
        lanes: the lane of each message; -1: none, it waits for no other.
    """

    nodes: Floats
    busy: Floats
    late: Floats
    travel: Floats
    lanes: Ints


class Times(NamedTuple):
    """Times of everything, in seconds.

    Attributes:
        start: of each node.
        end: of each node.
        sent: when each message begins to travel.
        clocks: by list, when it is done.
        free: by lane, when it has carried all.
        head: by list, the next node; past its last one unless the list is stuck.
        waits: by list, the message that its next node waits for; -1: none.
    """

    start: Floats
    end: Floats
    sent: Floats
    clocks: Floats
    free: Floats
    head: Ints
    waits: Ints

    def stuck(self, lists: ListArrays) -> list[int]:
        """The lists that never come to their end."""
        numbers: list[int] = np.flatnonzero(self.head < lists.first[1:]).tolist()
        return numbers


class _Loop:
    played = 0
    compiled: Callable[..., tuple[int, bool]] | None = None


def _play(data: Any, limit: float, times: Any, state: Any) -> tuple[int, bool]:
    """Fill in ``times``; return how many nodes were played, and whether the play was given up."""
    lists, lasting, rest = data
    turns, arrived = state
    first, takes, inputs, outputs, receivers = lists
    seconds, busy, late, travel, lanes = lasting
    start, end, sent, clocks, free, head, waits = times
    ready, played = len(clocks), 0
    for row in range(ready):
        head[row], waits[row], turns[row] = first[row], -1, ready - 1 - row
    for message in range(len(receivers)):
        arrived[message] = -1.0
    while ready > 0:
        ready -= 1
        row = turns[ready]
        now, node, stop, missing = clocks[row], head[row], first[row + 1], -1
        while node < stop:
            for at in range(takes[node], takes[node + 1]):
                message = inputs[at]
                if arrived[message] < 0.0:
                    missing = message
                    break
                now = max(now, arrived[message])
            if missing >= 0:
                break
            if now + rest[node] > limit:
                return played, True
            start[node] = now
            now += seconds[node]
            end[node] = now
            for message in range(outputs[node], outputs[node + 1]):
                begin = now + late[message]
                lane = lanes[message]
                if lane >= 0:
                    begin = max(begin, free[lane])
                    free[lane] = begin + travel[message]
                sent[message] = begin
                arrived[message] = begin + travel[message]
                if waits[receivers[message]] == message:
                    waits[receivers[message]] = -1  # once is enough
                    turns[ready] = receivers[message]
                    ready += 1
            now += busy[node]
            node += 1
        played += node - head[row]
        clocks[row], head[row], waits[row] = now, node, missing
    return played, False


def play(
    lists: ListArrays,
    lasting: Lasting,
    begin: tuple[Floats, Floats],
    *,
    rest: Floats | None = None,
    limit: float = math.inf,
) -> Times | None:
    """Times of everything that is played.

    Args:
        lists: what is played.
        lasting: how long all of it takes.
        begin: when each list begins, and from when on each lane is free, in seconds.
        rest: of each node, the seconds from its start until its list is done if that waits no more.
        limit: seconds; a play in which a list cannot be done by then is given up.

    Returns:
        None: it was given up.
    """
    if _Loop.compiled is None and _Loop.played >= LOAD_NUMBA_AFTER:
        load_numba()
    nodes, messages, count = len(lasting.nodes), len(lasting.travel), len(begin[0])
    start, end, sent, arrived = (np.zeros(size) for size in (nodes, nodes, messages, messages))
    head, waits, turns = (np.zeros(count, dtype=np.int64) for _ in range(3))
    times = Times(start, end, sent, begin[0].copy(), begin[1].copy(), head, waits)
    data, state = (lists, lasting, lasting.nodes if rest is None else rest), (turns, arrived)
    if _Loop.compiled is not None:
        _, late = _Loop.compiled(data, limit, times, state)
    else:
        plain = [row.tolist() for row in times]
        of_lists = [[row.tolist() for row in rows] for rows in data[:2]]
        played, late = _play((*of_lists, data[2].tolist()), limit, plain, [row.tolist() for row in state])
        for row, values in zip(times, plain, strict=True):
            row[:] = values
        _Loop.played += played
    return None if late else times


def load_numba() -> None:
    """Compile the inner loops, or load them from numba's cache, so that they are used from now on."""
    if _Loop.compiled is None:
        import numba  # noqa: PLC0415 - half a second that short runs should not pay

        _Loop.compiled = numba.njit(cache=True)(_play)


def accelerated(loop: NumberLoop) -> NumberLoop:
    """The loop of a scheme's builder, compiled if numba is loaded (``load_numba``), otherwise as it is."""
    return loop if _Loop.compiled is None else _compiled(loop)


@cache
def _compiled(loop: NumberLoop) -> NumberLoop:
    import numba  # noqa: PLC0415 - it is loaded already

    compiled = numba.njit(cache=True)(loop)
    return lambda *values: compiled(*(np.array(v) if isinstance(v, list) else v for v in values))
