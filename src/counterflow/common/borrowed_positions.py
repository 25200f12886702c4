"""Positions that expert parallelism borrows of the other degrees of a mesh, as in torchtitan."""

from __future__ import annotations

import math
from typing import NamedTuple


class BorrowedPositions(NamedTuple):
    """Positions of each degree that experts are divided over; their product is the degree of experts.

    Attributes:
        dp_shard: positions with samples of their own.
        cp: positions that share sequences.
        tp: positions of tensor parallelism.
    """

    dp_shard: int
    cp: int
    tp: int


def borrowed_positions(ep: int, *, cp: int, tp: int) -> BorrowedPositions:
    """Positions that ``ep`` borrows: of ``tp`` first, which are closest, then of ``cp`` and ``dp_shard``.

    >>> borrowed_positions(8, cp=2, tp=2), borrowed_positions(3, cp=2, tp=2).dp_shard
    (BorrowedPositions(dp_shard=2, cp=2, tp=2), 3)
    """
    tensors = math.gcd(ep, tp)
    contexts = math.gcd(ep // tensors, cp)
    return BorrowedPositions(ep // tensors // contexts, contexts, tensors)
