"""The maximum ratio of a circle in a graph of waits: how long a period takes that repeats for ever.

Each edge has seconds and a number of periods; a circle's ratio is its seconds over its periods. Howard's
algorithm: every node follows one of its waits, which determines circles; a wait that would make a node later
replaces it, until none does.

Invariant: the ratio is that of a circle of the graph, to rounding; no other circle's is larger.
"""

from __future__ import annotations

import numpy as np

from counterflow.program.player import Floats, Ints

_CLOSE = 1e-10
"""Share of the largest ratio below which differences are rounding."""

_MOST_ROUNDS = 1000


def largest_cycle_ratio(source: Ints, taker: Ints, seconds: Floats, periods: Ints) -> float:
    """The largest ratio of a circle.

    Args:
        source: node where each edge begins: 0, 1, …; some nodes may have no edges.
        taker: node to which each edge leads.
        seconds: seconds of each edge, 0 or more.
        periods: periods of each edge; in every circle they add up to 1 or more.

    >>> nodes = np.array([0, 1, 0]), np.array([1, 0, 0])  # there and back, and around itself
    >>> largest_cycle_ratio(*nodes, np.array([2.0, 3.0, 4.0]), np.array([0, 2, 1]))
    4.0
    """
    if not len(source):
        return 0.0
    numbers, ends = np.unique(np.concatenate((source, taker)), return_inverse=True)
    source, taker = ends[: len(source)], ends[len(source) :]
    order = np.argsort(taker, kind="stable")
    source, taker, seconds, periods = source[order], taker[order], seconds[order], periods[order]
    first = np.flatnonzero(np.concatenate(([True], taker[1:] != taker[:-1])))
    assert len(first) == len(numbers)  # every node waits for something
    chosen = first.copy()
    ratio = np.zeros(len(numbers))
    for _ in range(_MOST_ROUNDS):
        ratio, later = _values(source[chosen], seconds[chosen], periods[chosen])
        close = _CLOSE * max(float(ratio.max()), 1e-300)
        better = _largest_edges(ratio[source], taker, first)
        change = ratio[source[better]] > ratio + close
        if not change.any():
            # Among edges of equal ratio: the one that makes a node later outside its circle.
            at = seconds - ratio[taker] * periods + later[source]
            at[ratio[source] < ratio[taker] - close] = -np.inf
            better = _largest_edges(at, taker, first)
            change = at[better] > later + close * np.maximum(1.0, np.abs(periods[better]))
        if not change.any():
            break
        chosen = np.where(change, better, chosen)
    return float(ratio.max())


def _largest_edges(value: Floats, taker: Ints, first: Ints) -> Ints:
    most = np.maximum.reduceat(value, first)
    edge = np.flatnonzero(value == most[taker])
    best = np.empty(len(first), dtype=np.int64)
    best[taker[edge][::-1]] = edge[::-1]
    return best


def _values(before: Ints, seconds: Floats, periods: Ints) -> tuple[Floats, Floats]:
    """If each node follows one other: the ratio of the circle it comes from, and how much later it is.

    One node of each circle is at 0.
    """
    count = len(before)
    rounds = max(1, count.bit_length())
    jump = before
    for _ in range(rounds):
        jump = jump[jump]  # at the end of its path, on a circle
    ratio = np.zeros(count)
    root = np.zeros(count, dtype=bool)
    for node in np.unique(jump).tolist():
        if ratio[node] or root[node]:
            continue
        circle = [node]
        while (node := int(before[node])) != circle[0]:
            circle.append(node)
        ratio[circle] = max(float(seconds[circle].sum() / periods[circle].sum()), 1e-300)
        root[circle[0]] = True
    ratio = ratio[jump]
    follows = np.where(root, np.arange(count), before)
    later = np.where(root, 0.0, seconds - ratio * periods)
    for _ in range(rounds):
        later = later + np.where(follows == np.arange(count), 0.0, later[follows])
        follows = follows[follows]
    return ratio, later
