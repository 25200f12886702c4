"""Owners of parameters if optimiser state is sharded (ZeRO stage 1): the holder that updates each.

Invariant: every parameter has one owner among its holders, and the same parameters in the same order always
give the same owners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace

PIECE_BYTES = 25 * 1024 * 1024
"""Bytes of the pieces in which weights are sent from one holder to the others."""


def pieces(sizes: Iterable[float]) -> Iterator[list[float]]:
    """Sizes grouped into the pieces in which they are sent: in their order, each piece closed as soon as it
    is large enough.

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
    """Distribute parameters over their holders: the largest first, each to the holder with the fewest bytes
    so far.

    Parameters stay whole, as in torch's ``ZeroRedundancyOptimizer``, so an optimiser that updates each one
    independently computes the same numbers wherever it runs. Between equals the lower number gets it.

    >>> owners([(4, (0, 3)), (9, (0, 3)), (5, (0, 3)), (2, (1,))])
    [3, 0, 3, 1]

    Args:
        sizes: bytes of each parameter, and the numbers of its holders.

    Returns:
        The owner of each parameter.

    Source: Rajbhandari et al. 2020, ZeRO, section 5.1.
    """
    entries = list(sizes)
    owned: dict[int, float] = defaultdict(float)
    least: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    """For each set of holders, a heap of what each had when it was last looked at; never more than it has
    now.
    """
    owner_of = [0] * len(entries)
    for index in sorted(range(len(entries)), key=lambda i: (-entries[i][0], i)):
        size, holders = entries[index][0], tuple(entries[index][1])
        if holders not in least:
            least[holders] = [(owned[holder], holder) for holder in holders]
            heapify(least[holders])
        heap = least[holders]
        while heap[0][0] < owned[heap[0][1]]:
            heapreplace(heap, (owned[heap[0][1]], heap[0][1]))
        owner_of[index] = owner = heap[0][1]
        owned[owner] += size
    return owner_of
