"""Orders defined by slots: a rule gives every op a slot, and sorting by slot gives each worker's order.

A slot is a position, not a time: only the order survives. A rule whose slots strictly increase along
every dependency (forward to next forward, forward to backward, backward to next backward) gives orders
that cannot deadlock, because sorting by slot is then a topological order of all ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from ..ir import Op

Placed = tuple[int, int, Op]
"""One op with its place: (slot, worker, op)."""


def orders_by_slot(workers: int, placed: Iterable[Placed]) -> tuple[tuple[Op, ...], ...]:
    """Each worker's ops by slot; ops that share a slot keep the order in which they were given."""
    orders: list[list[Op]] = [[] for _ in range(workers)]
    for _slot, worker, op in sorted(placed, key=itemgetter(0)):
        orders[worker].append(op)
    return tuple(map(tuple, orders))


def spread(count: int, places: int) -> list[int]:
    """``count`` things distributed over ``places`` as evenly as possible; the first places take the rest.

    >>> spread(5, 4)
    [2, 1, 1, 1]
    """
    count_each, rest = divmod(count, places)
    return [count_each + (place < rest) for place in range(places)]
