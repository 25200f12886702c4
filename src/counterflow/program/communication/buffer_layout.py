"""Places of received messages in one block of memory, by when they live and by their sizes.

With unequal sizes the smallest block is a hard problem (dynamic storage allocation; Garey and Johnson,
Computers and Intractability, problem SR2), so a heuristic finds it, and the bound is given too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .receive_buffers import Lifetime, colour, most_in_use

CHANGES = 6
"""Changes of each order that are tried, if these are not too many comparisons."""

_MOST_COMPARISONS = 400_000
"""Comparisons of two messages in all tries together: a fraction of a second."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Places of messages in a block of memory.

    Attributes:
        offsets: where each message begins.
        size: size of the block.
        in_use: the size of all messages that are in use at once, which no block can go below.
    """

    offsets: tuple[int, ...]
    size: int
    in_use: int


def arrange(lives: Sequence[Lifetime], sizes: Sequence[int], changes: int = CHANGES) -> BufferLayout:
    """Place messages so that no two that live at once overlap.

    Messages of equal sizes need no more than is in use at once. Otherwise they are placed in several orders,
    each in the smallest gap that is free while it lives. An order is changed by moving what ends at the top
    of the block to its front. The smallest block is taken, at once if it is as small as the bound.

    Args:
        lives: lives in the order of their starts.
        sizes: size of each message.
        changes: changes of each order that are tried.

    >>> from counterflow.program.lowering import lower
    >>> from counterflow.schedule.schemes import dapple
    >>> from .receive_buffers import lifetimes
    >>> arrange(lifetimes(lower(dapple(stages=2, micro_batches=2)), 1), [256, 512])
    BufferLayout(offsets=(512, 0), size=768, in_use=768)
    """
    if len({*sizes}) <= 1:
        size = max(sizes, default=0)
        table = colour(lives)
        return BufferLayout(
            tuple(slot * size for slot in table.slots), table.in_use * size, table.in_use * size
        )
    _, in_use = most_in_use(lives, sizes)
    layouts = _layouts(lives, sizes, in_use, changes)
    best = next(layouts)
    while best.size > in_use and (layout := next(layouts, None)) is not None:
        best = min(best, layout, key=lambda layout: layout.size)
    return best


def _layouts(
    lives: Sequence[Lifetime], sizes: Sequence[int], in_use: int, changes: int
) -> Iterator[BufferLayout]:
    overlaps = _overlaps(lives)
    length = [life.end - life.start for life in lives]
    keys: tuple[Callable[[int], float | tuple[int, int]], ...] = (
        lambda n: (-sizes[n], -length[n]),
        lambda n: -sizes[n] * length[n],
        lambda n: -length[n],
        lambda n: lives[n].start,
        lambda n: -lives[n].end,
    )
    changes = min(changes, _MOST_COMPARISONS // (len(keys) * (1 + sum(map(len, overlaps)))))
    for key in keys:
        order = sorted(range(len(lives)), key=key)
        yield (layout := BufferLayout(*_place(order, sizes, overlaps), in_use))
        for _ in range(changes):
            ends = [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)]
            order.sort(key=lambda n, ends=ends, top=layout.size: ends[n] < top)  # type: ignore[misc]
            yield (layout := BufferLayout(*_place(order, sizes, overlaps), in_use))


def _overlaps(lives: Sequence[Lifetime]) -> list[list[int]]:
    """The messages that live at the same time as each, by number."""
    overlaps: list[list[int]] = [[] for _ in lives]
    living: list[tuple[int, int]] = []
    for number, life in enumerate(lives):
        while living and living[0][0] < life.start:
            heappop(living)
        for _, earlier in living:
            overlaps[earlier].append(number)
            overlaps[number].append(earlier)
        heappush(living, (life.end, number))
    return overlaps


def _place(
    order: Sequence[int], sizes: Sequence[int], overlaps: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], int]:
    offsets = [-1] * len(sizes)
    top = 0
    for number in order:
        size, offset, smallest = sizes[number], 0, -1
        end = 0
        for begin, stop in sorted(
            (offsets[n], offsets[n] + sizes[n]) for n in overlaps[number] if offsets[n] >= 0
        ):
            gap = begin - end
            if gap >= size and (smallest < 0 or gap < smallest):
                smallest, offset = gap, end
            end = max(end, stop)
        offsets[number] = offset if smallest >= 0 else end
        top = max(top, offsets[number] + size)
    return tuple(offsets), top
