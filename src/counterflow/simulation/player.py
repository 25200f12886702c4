"""The player: every worker goes through its list, each op as soon as what it takes is there.

One worker after the other goes as far as it gets. An op's messages leave behind it, each by its lane, which
carries one at a time; where later ops wait for sums of gradients, these run on a lane of each worker's own.
Who begins when, and until when lanes are taken, is given and found: a play that begins where another ended
is the next step. A play with a limit is given up as soon as a worker is sure to be late.

The same function runs as plain Python on lists and, once a process has played enough for numba's load time
to pay, compiled on arrays. Both do the same additions and comparisons, so results are equal to the last bit;
and whatever the order of the workers' turns, times are the same, as an op's are the largest of those that it
waits for. ``play`` is the entry for all who have lists: ``TimedSchedule`` makes them of a schedule, and a
search that moves ops in arrays of its own may give these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from counterflow.errors import DeadlockError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOAD_NUMBA_AFTER = 400_000
"""Ops played in plain Python, over the life of the process, before numba is loaded (about half a second)."""


class Lists(NamedTuple):
    """Every worker's list, by op; ops are numbered worker by worker in order, messages by their makers.

    Attributes:
        first: each worker's first op, and one past the last of all.
        takes: op n takes the messages ``taken[takes[n]:takes[n + 1]]``.
        taken: see ``takes``.
        made: op n makes the messages from ``made[n]`` to ``made[n + 1]``.
        receivers: the worker that takes each message.
    """

    first: Ints
    takes: Ints
    taken: Ints
    made: Ints
    receivers: Ints


class Sums(NamedTuple):
    """Sums of gradients that later ops wait for, in the order in which they run on each worker's lane.

    Attributes:
        starts: by op the sum that its worker is ready for behind it; -1: none.
        awaits: by op the sum that has to be there before; -1: none.
        parts: of each sum, how many workers get ready for it.
        first: sum s is over the workers ``members[first[s]:first[s + 1]]``.
        members: see ``first``.
    """

    starts: Ints
    awaits: Ints
    parts: Ints
    first: Ints
    members: Ints


class Lasting(NamedTuple):
    """How long everything takes, in seconds.

    Attributes:
        ops: each op.
        busy: how long its worker is busy with messages behind each op.
        late: how long behind the end of its op each message may begin.
        travel: each message on its lane.
        lanes: the lane of each message; -1: none, it waits for no other.
        sums: each sum.
    """

    ops: Floats
    busy: Floats
    late: Floats
    travel: Floats
    lanes: Ints
    sums: Floats


class Times(NamedTuple):
    """When everything happens, in seconds.

    Attributes:
        start: of each op.
        end: of each op.
        sent: when each message begins to travel.
        begun: when each sum begins.
        summed: when it ends.
        clocks: by worker, when it is done with its list.
        free: by lane, when it has carried all.
    """

    start: Floats
    end: Floats
    sent: Floats
    begun: Floats
    summed: Floats
    clocks: Floats
    free: Floats


class _Loop:
    """The compiled inner loop, once there is one, and how much was played without it."""

    played = 0
    compiled: Callable[..., tuple[int, bool]] | None = None


def _play(  # noqa: C901, PLR0912, PLR0915 - one loop without a call an op
    given: Any, rest: Any, limit: float, times: Any, state: Any
) -> tuple[int, bool]:
    """Fill in ``times``; how many ops were played, and whether the play was given up."""
    lists, sums, lasting = given
    first, takes, taken, made, receivers = lists
    starts, awaits, parts, sum_first, members = sums
    seconds, busy, late, travel, lanes, sum_seconds = lasting
    start, end, sent, begun, summed, clocks, free = times
    workers, messages, last_sum = len(clocks), len(receivers), len(sum_seconds)
    arrived, lane, left, head, waits, turns = state
    for worker in range(workers):
        head[worker], waits[worker], turns[worker] = first[worker], -1, workers - 1 - worker
    for message in range(messages):
        arrived[message] = -1.0
    for number in range(last_sum):
        left[number] = parts[number]
    ready, played, done = workers, 0, 0  # of turns, of ops, of sums
    while True:
        while done < last_sum and left[done] == 0:
            begin = begun[done]
            for at in range(sum_first[done], sum_first[done + 1]):
                begin = max(begin, lane[members[at]])
            begun[done] = begin
            summed[done] = begin + sum_seconds[done]
            for at in range(sum_first[done], sum_first[done + 1]):
                lane[members[at]] = summed[done]
                if waits[members[at]] == messages + done:
                    turns[ready] = members[at]
                    ready += 1
            done += 1
        if ready == 0:
            return played, False
        ready -= 1
        worker = turns[ready]
        now, node, stop, for_what = clocks[worker], head[worker], first[worker + 1], -1
        while node < stop:
            for at in range(takes[node], takes[node + 1]):
                message = taken[at]
                if arrived[message] < 0.0:
                    for_what = message
                    break
                now = max(now, arrived[message])
            number = awaits[node]
            if number >= done:
                for_what = messages + number
            elif number >= 0:
                now = max(now, summed[number])
            if for_what >= 0:
                break
            if now + rest[node] > limit:
                return played, True
            start[node] = now
            now += seconds[node]
            end[node] = now
            for message in range(made[node], made[node + 1]):
                begin = now + late[message]
                way = lanes[message]
                if way >= 0:
                    begin = max(begin, free[way])
                    free[way] = begin + travel[message]
                sent[message] = begin
                arrived[message] = begin + travel[message]
                if waits[receivers[message]] == message:
                    waits[receivers[message]] = -1  # once is enough
                    turns[ready] = receivers[message]
                    ready += 1
            now += busy[node]
            number = starts[node]
            if number >= 0:
                begun[number] = max(begun[number], now)
                left[number] -= 1
            node += 1
        played += node - head[worker]
        clocks[worker], head[worker], waits[worker] = now, node, for_what


def play(
    lists: Lists,
    sums: Sums,
    lasting: Lasting,
    at: tuple[Floats, Floats],
    *,
    rest: Floats,
    limit: float = math.inf,
) -> Times | None:
    """When everything happens.

    Args:
        lists: what is played.
        sums: sums of gradients that ops wait for.
        lasting: how long all of it takes.
        at: when each worker begins, and from when on each lane is free.
        rest: of each op, the seconds from its start until its worker is done if that waits no more.
        limit: seconds; a play in which a worker cannot be done by then is given up.

    Returns:
        None: it was given up.

    Raises:
        DeadlockError: workers wait for each other.
    """
    if _Loop.compiled is None and _Loop.played >= LOAD_NUMBA_AFTER:
        load_numba()
    ops, messages = len(lasting.ops), len(lasting.travel)
    made = (np.zeros(size) for size in (ops, ops, messages, len(lasting.sums), len(lasting.sums)))
    times = Times(*made, *(row.copy() for row in at))
    state = _state(messages, len(at[0]), len(lasting.sums))
    given = lists, sums, lasting
    if _Loop.compiled is not None:
        played, late = _Loop.compiled(given, rest, limit, times, state)
    else:
        as_lists = [[row.tolist() for row in rows] for rows in (*given, times, state)]
        found = as_lists[3]
        played, late = _play(as_lists[:3], rest.tolist(), limit, found, as_lists[4])
        times = Times(*(np.array(row, dtype=np.float64) for row in found))
        _Loop.played += played
    if not late and played < ops:
        raise DeadlockError("workers wait for each other")
    return None if late else times


def _state(messages: int, workers: int, sums: int) -> tuple[Floats | Ints, ...]:
    """What a play keeps.

    By message, when it has come, or -1. By worker, until when its lane of sums is taken. By sum, how many
    workers are not ready for it. By worker its next op, and what it waits for: a message, or a sum, numbered
    behind the messages; -1: nothing. And the workers that may go on.
    """
    whole = (np.zeros(size, dtype=np.int64) for size in (sums, workers, workers, workers))
    return np.zeros(messages), np.zeros(workers), *whole


def load_numba() -> None:
    """Compile the inner loop, or load it from numba's cache, so that it is used from now on."""
    if _Loop.compiled is None:
        import numba  # noqa: PLC0415 - half a second that short runs should not pay

        _Loop.compiled = numba.njit(cache=True)(_play)
