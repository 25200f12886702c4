"""Which holder of a parameter updates it where optimiser state is sharded: ZeRO stage 1.

Invariant: every parameter has one owner among those who hold it, and all who ask with the same parameters in
the same order get the same answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace

PIECE_BYTES = 25 * 1024 * 1024
"""The size of the pieces in which weights are sent from one holder to the others."""


def pieces(sizes: Iterable[float]) -> Iterator[list[float]]:
    """Sizes in the pieces in which they are sent: in their order, each piece as soon as it is large enough.

    >>> [*pieces([9, 4 * PIECE_BYTES, 7, 8])] == [[9, 4 * PIECE_BYTES], [7, 8]]
    True
    """
    piece: list[float] = []
    total = 0.0
    for size in sizes:
        piece.append(size)
        total += size
        if total >= PIECE_BYTES:
            yield piece
            piece, total = [], 0.0
    if piece:
        yield piece


def owners(sizes: Iterable[tuple[float, Sequence[int]]]) -> list[int]:
    """Share parameters out among their holders: the largest first, each to the one who has least by then.

    Whole parameters, so that an optimiser that looks at one at a time makes the same numbers wherever it
    runs; as torch's ``ZeroRedundancyOptimizer`` does. Where two have as little, the lower number gets it.

    >>> owners([(4, (0, 3)), (9, (0, 3)), (5, (0, 3)), (2, (1,))])
    [3, 0, 3, 1]

    Args:
        sizes: of each parameter its bytes and the numbers of its holders.

    Returns:
        Of each parameter its owner.

    Source: Rajbhandari et al. 2020, ZeRO, section 5.1.
    """
    every = list(sizes)
    owned: dict[int, float] = defaultdict(float)
    least: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    """By holders, a heap of what each had when it was last looked at: never more than it has."""
    found = [0] * len(every)
    for index in sorted(range(len(every)), key=lambda i: (-every[i][0], i)):
        size, holders = every[index][0], tuple(every[index][1])
        if holders not in least:
            least[holders] = [(owned[one], one) for one in holders]
            heapify(least[holders])
        heap = least[holders]
        while heap[0][0] < owned[heap[0][1]]:
            heapreplace(heap, (owned[heap[0][1]], heap[0][1]))
        found[index] = owner = heap[0][1]
        owned[owner] += size
    return found
