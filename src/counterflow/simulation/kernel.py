"""The simulator's inner loop: the longest path through what waits for what.

The same function runs as plain Python on lists and, once a process has simulated enough for numba's
load time to pay, compiled on arrays. Both do the same additions and comparisons, so results are equal
to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOAD_NUMBA_AFTER = 300_000
"""Nodes simulated in plain Python, over the life of the process, before numba is loaded (about 1 s)."""


class _Loop:
    """The compiled inner loop, once there is one, and how much ran without it."""

    simulated = 0
    compiled: Callable[..., None] | None = None


def _relax(edges: Any, seconds: Any, start: Any, end: Any) -> None:
    """Fill in start and end: a node starts when the last of its sources has ended and its delay passed.

    ``edges`` is (first, sources, delay): node n waits for ``sources[first[n]:first[n + 1]]``, of lower
    numbers.
    """
    first, sources, delay = edges
    for node in range(len(seconds)):
        at = 0.0
        for edge in range(first[node], first[node + 1]):
            ready = end[sources[edge]] + delay[edge]
            at = max(at, ready)
        start[node] = at
        end[node] = at + seconds[node]


def longest_paths(first: Ints, sources: Ints, delay: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Start and end of every node, each as early as possible (see ``_relax``)."""
    count = len(seconds)
    if _Loop.compiled is None and _Loop.simulated >= LOAD_NUMBA_AFTER:
        load_numba()
    if _Loop.compiled is not None:
        start, end = np.empty(count), np.empty(count)
        _Loop.compiled((first, sources, delay), seconds, start, end)
        return start, end
    _Loop.simulated += count
    starts, ends = [0.0] * count, [0.0] * count
    edges = (first.tolist(), sources.tolist(), delay.tolist())
    _relax(edges, seconds.tolist(), starts, ends)
    return np.array(starts), np.array(ends)


def load_numba() -> None:
    """Compile the inner loop, or load it from numba's cache, so that it is used from now on."""
    if _Loop.compiled is None:
        import numba  # noqa: PLC0415 - half a second that short runs should not pay

        _Loop.compiled = numba.njit(cache=True)(_relax)
