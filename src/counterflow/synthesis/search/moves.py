"""Compiled local moves on words: one op is moved within its worker's word, and the move kept if it pays.

This is simulated annealing. Most moves are tried where they can help: on the longest path, where an op waits
for the previous op of its worker. A word always stays within the limits and keeps each stage's own needs in
order; deadlocks are found by playing the word.

Invariant: the same numbers in, the same words out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..kernel import (
    NEVER,
    Chance,
    FlatWords,
    Floats,
    Ints,
    Numbers,
    chance_of,
    compiled,
    inlined,
    random,
    shift,
    worth,
)


class SearchState(NamedTuple):
    """A word and the values that follow from it.

    Attributes:
        how_many: by place, number of earlier ops of the same letter.
        place: by op, its place in the word.
        memory: by store and place, amount that the worker holds before it.
        critical: places on the longest path whose op waits for the one before it.
        random: the state of the random numbers.
        log: places of the moves tried last, from and to.
        best: the best word so far.
        worth: value of the word, and the best value.
        begin: offsets of workers when a step begins.
    """

    how_many: Ints
    place: Ints
    memory: Floats
    critical: Ints
    random: Chance
    log: Ints
    best: Ints
    worth: Floats
    begin: Floats


class AnnealingPlan(NamedTuple):
    """Number of moves, accepted loss at first and at last (seconds), and the objective."""

    moves: int
    warm: float
    cold: float
    steady: bool


def state_of(numbers: Numbers, flat: FlatWords, seed: int) -> SearchState:
    """The state of a word; ``start`` computes it."""
    ops = len(flat.word)
    return SearchState(
        np.zeros(ops, dtype=np.int64),
        np.zeros(ops, dtype=np.int64),
        np.zeros((len(numbers.most), ops)),
        np.zeros(ops + 1, dtype=np.int64),
        chance_of(seed),
        np.zeros(2 * ops, dtype=np.int64),
        flat.word.copy(),
        np.full(2, NEVER),
        np.zeros(len(flat.first) - 1),
    )


@compiled
def _fill(n: Any, flat: Any, x: Any) -> None:
    done = np.zeros(len(n.worker), dtype=np.int64)
    for worker in range(len(flat.first) - 1):
        memory = np.zeros(len(n.most))
        for place in range(flat.first[worker], flat.first[worker + 1]):
            letter = flat.word[place]
            x.how_many[place] = done[letter]
            x.place[n.base[letter] + done[letter]] = place
            done[letter] += 1
            for store in range(len(n.most)):
                x.memory[store, place] = memory[store]
                memory[store] += n.net[store, letter]


@compiled
def _ordered(n: Any, flat: Any, x: Any, source: int, target: int) -> bool:
    """Check that a moved op still follows the op of its own stage that it needs, and precedes those that need
    it.
    """
    letter, k = flat.word[source], x.how_many[source]
    step = 1 if target > source else -1
    at = source
    while at != target:
        at += step
        neighbour = flat.word[at]
        taker, maker = (letter, neighbour) if step < 0 else (neighbour, letter)
        is_input = n.inputs[taker, 0] == maker or n.inputs[taker, 1] == maker
        if neighbour == letter or (is_input and x.how_many[at] == k):
            return False
    return True


@compiled
def _fits(n: Any, flat: Any, x: Any, source: int, target: int) -> bool:
    letter = flat.word[source]
    worker = n.worker[letter]
    for store in range(len(n.most)):
        most, starts, change = n.most[store, worker], n.at_start[store, letter], n.net[store, letter]
        low, high = target, source
        memory = x.memory[store, target]
        if target > source:
            low, high, change = source + 1, target + 1, -change
            memory += change + n.net[store, flat.word[target]]
        if memory + starts > most:
            return False
        for at in range(low, high):
            if x.memory[store, at] + change + n.at_start[store, flat.word[at]] > most:
                return False
    return True


@compiled
def _moved(n: Any, flat: Any, x: Any, source: int, target: int) -> None:
    low, high = min(source, target), max(source, target)
    shift(x.how_many, source, target)
    for at in range(low, high + 1):
        x.place[n.base[flat.word[at]] + x.how_many[at]] = at
    for store in range(len(n.most)):
        memory = x.memory[store, low]
        for at in range(low, high + 1):
            x.memory[store, at] = memory
            letter = flat.word[at]
            memory += n.net[store, letter]


@compiled
def _took(s: Any, worker: int, steady: bool) -> float:
    return float(s.ended[worker] - (s.stood[worker] if steady else 0.0))


@inlined
def _last_input(n: Any, s: Any, letter: int, k: int) -> tuple[int, float]:
    """The last input of a letter's op, and the time when it exists; -1 if it has none."""
    last, arrived = -1, 0.0
    for edge in range(n.into[letter], n.into[letter + 1]):
        maker = n.base[n.maker[edge]] + k
        if last < 0 or s.end[maker] + n.late[edge] > arrived:
            last, arrived = maker, s.end[maker] + n.late[edge]
    return last, arrived


@compiled
def _trace(n: Any, s: Any, flat: Any, x: Any, steady: bool) -> int:
    worker = 0
    for candidate in range(len(s.ended)):
        if _took(s, candidate, steady) > _took(s, worker, steady):
            worker = candidate
    last = flat.first[worker + 1] - 1
    if last < flat.first[worker]:
        return 0
    # If a sum ends last, one of the gradients that it waits for is the end of the path.
    count, place = 0, last
    crossed = np.zeros(len(s.ended), dtype=np.bool_)
    while count < len(x.critical):
        letter = flat.word[place]
        worker = n.worker[letter]
        op = n.base[letter] + x.how_many[place]
        at = s.start[op]
        before = -1
        if place > flat.first[worker]:
            preceding = flat.word[place - 1]
            before = n.base[preceding] + x.how_many[place - 1]
        source, arrived = _last_input(n, s, letter, x.how_many[place])
        by_data = source >= 0 and arrived >= at
        by_data = by_data and not (before < 0 and steady and at <= s.stood[worker])
        if before >= 0 and not (by_data and s.end[before] < at):
            x.critical[count] = place
            count += 1
            place -= 1
        elif source >= 0 and (by_data or not steady):
            place = x.place[source]
        elif steady and before < 0 and not crossed[worker]:
            crossed[worker] = True
            place = flat.first[worker + 1] - 1
        else:
            break
    return count


@compiled
def _move(n: Any, flat: Any, x: Any, source: int, move: tuple[int, int]) -> int:
    """Move an op, and ops of its letter after it, by the same distance; return how many, noted in
    ``x.log``.
    """
    by, many = move
    letter, k = flat.word[source], x.how_many[source]
    worker, moved = n.worker[letter], 0
    many = min(many, n.ops[letter] - k)
    for number in range(many):  # so none is in the way of the next
        k_now = k + number if by < 0 else k + many - 1 - number
        source = x.place[n.base[letter] + k_now]
        target = max(flat.first[worker], min(flat.first[worker + 1] - 1, source + by))
        if target == source or not _ordered(n, flat, x, source, target):
            break
        if not _fits(n, flat, x, source, target):
            break
        shift(flat.word, source, target)
        _moved(n, flat, x, source, target)
        x.log[2 * moved], x.log[2 * moved + 1] = source, target
        moved += 1
    return moved


@compiled
def _undo(n: Any, flat: Any, x: Any, moved: int) -> None:
    for number in range(moved - 1, -1, -1):
        source, target = x.log[2 * number], x.log[2 * number + 1]
        shift(flat.word, target, source)
        _moved(n, flat, x, target, source)


@compiled
def start(n: Any, s: Any, flat: Any, x: Any, steady: bool) -> float:
    """Compute the state of words; return their value."""
    _fill(n, flat, x)
    x.worth[0] = worth(n, s, flat, x.begin, steady)
    x.worth[1] = x.worth[0]
    x.best[:] = flat.word
    return float(x.worth[1])


@compiled
def anneal(n: Any, s: Any, flat: Any, x: Any, plan: Any) -> float:
    """Improve words by moves; leave the best so far in ``x.best``, and return its value.

    It continues where an earlier call ended, after ``start``.

    Args:
        n: the problem.
        s: scratch.
        flat: the words; changed.
        x: their state.
        plan: number of moves, and accepted losses.
    """
    now = worth(n, s, flat, x.begin, plan.steady)
    if now == NEVER:
        return float(x.worth[1])
    critical = _trace(n, s, flat, x, plan.steady)
    ops = len(flat.word)
    trial = x.begin.copy()
    warm = plan.warm
    cooling = (plan.cold / plan.warm) ** (1.0 / max(1, plan.moves))
    for _ in range(plan.moves):
        warm *= cooling
        if critical and random(x.random) < _GUIDED:
            place = x.critical[int(random(x.random) * critical)]
            source = place if random(x.random) < 0.5 else place - 1
            forward = source != place
        else:
            source = int(random(x.random) * ops)
            forward = random(x.random) < 0.5
        far = 1 + int(random(x.random) ** 3 * _FAR)
        many = 1
        if random(x.random) < _REPEATED:
            many += int(random(x.random) ** 2 * n.ops[flat.word[source]])
        moved = _move(n, flat, x, source, (far if forward else -far, many))
        if not moved:
            continue
        trial[:] = x.begin
        then = worth(n, s, flat, trial, plan.steady)
        if then > now and random(x.random) >= np.exp((now - then) / warm):
            _undo(n, flat, x, moved)
            continue
        now = then
        x.begin[:] = trial
        critical = _trace(n, s, flat, x, plan.steady)
        if now < x.worth[1] * (1 - _BETTER):
            x.worth[1] = now
            x.best[:] = flat.word
    x.worth[0] = now
    return float(x.worth[1])


_BETTER = 1e-12
"""Improvement below which two values count as equal."""

_GUIDED = 0.7
"""Share of moves on the longest path."""

_REPEATED = 0.3
"""Share of moves of several ops of one letter."""

_FAR = 16
"""Maximum distance of a move."""
