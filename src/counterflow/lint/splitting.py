"""Large batches as NCCL launches them: in parts, whose other sides may be in parts of other numbers.

torch's limit is in calls. NCCL's own is in bytes and differs between ranks, so a batch beyond torch's limit
may hang although its parts fit here; parts in rounds of paired ranks cannot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .calls import CallLists, CallSide, CallStep, Part, PartId, Row
from .pairing import pairs_of

MOST_PARTS = 256
"""Sends and receives of a batch up to which it may be launched as a whole (pytorch PR 174942)."""


def large_batches(lists: CallLists) -> Iterator[str]:
    """Batches with more than ``MOST_PARTS`` parts, with their ranks."""
    for rank, row in enumerate(lists.ranks):
        for step in row:
            if len(step.parts) > MOST_PARTS:
                yield f"rank {rank}: a batch of {len(step.parts)} calls; NCCL may launch it in parts"


def split_batches(lists: CallLists) -> CallLists:
    """The lists, with large batches in launches of ``MOST_PARTS`` parts, in the order of their calls."""
    if next(large_batches(lists), None) is None:
        return lists

    def pieces(step: CallStep, rank: int) -> Sequence[tuple[Part, ...]]:
        del rank
        return [step.parts[begin : begin + MOST_PARTS] for begin in range(0, len(step.parts), MOST_PARTS)]

    return _with_pieces(lists, pieces)


def paired_rounds(lists: CallLists) -> CallLists:
    """The lists, with large batches in rounds in each of which a rank exchanges messages with one rank alone.

    The rounds are those of a tournament, the same for all ranks, so both sides of a message are in one round.
    """
    ranks = len(lists.ranks)
    places = ranks + ranks % 2
    order = pairs_of(lists, by_name=False).order

    def pieces(step: CallStep, rank: int) -> Sequence[tuple[Part, ...]]:
        rounds: dict[int, list[tuple[int, int, Part]]] = defaultdict(list)
        for number, part in enumerate(step.parts):
            way = int((part.side is CallSide.SEND) == (rank < part.peer))
            place = order.get(PartId(rank, step.number, number), number)
            rounds[_round(rank, part.peer, places)].append((place, way, part))
        parts = [part for number in sorted(rounds) for part in _in_order(rounds[number])]
        sizes = [len(rounds[number]) for number in sorted(rounds)]
        begins = [sum(sizes[:n]) for n in range(len(sizes))]
        return [
            tuple(parts[at : min(at + MOST_PARTS, begin + size)])
            for begin, size in zip(begins, sizes, strict=True)
            for at in range(begin, begin + size, MOST_PARTS)
        ]

    return _with_pieces(lists, pieces)


def _in_order(numbered: list[tuple[int, int, Part]]) -> Iterator[Part]:
    for _, _, part in sorted(numbered, key=lambda row: row[:2]):
        yield part


def _round(rank: int, peer: int, places: int) -> int:
    """The round of a tournament of an even number of ranks in which two of them meet.

    >>> sorted(_round(2, peer, 4) for peer in (0, 1, 3)), _round(0, 2, 4) == _round(2, 0, 4)
    ([0, 1, 2], True)
    """
    last = places - 1
    if last in (rank, peer):
        return 2 * min(rank, peer) % last
    return (rank + peer) % last


def _with_pieces(
    lists: CallLists, pieces: Callable[[CallStep, int], Sequence[tuple[Part, ...]]]
) -> CallLists:
    rows = (_row(row, rank, pieces) for rank, row in enumerate(lists.ranks))
    return replace(lists, ranks=tuple(rows))


def _row(row: Row, rank: int, pieces: Callable[[CallStep, int], Sequence[tuple[Part, ...]]]) -> Row:
    free = 1 + max((step.number for step in row), default=0)
    steps: list[CallStep] = []
    launches: dict[int, list[int]] = {}
    for step in row:
        needs = tuple(number for need in step.needs for number in launches.get(need, [need]))
        if len(step.parts) <= MOST_PARTS:
            steps.append(replace(step, needs=needs) if launches else step)
            continue
        numbers: list[int] = []
        for count, parts in enumerate(pieces(step, rank)):
            number = free + count - 1 if count else step.number
            numbers.append(number)
            label = f"{step.label}, launch {count}"
            steps.append(replace(step, number=number, label=label, parts=parts, needs=needs))
        free += len(numbers) - 1
        launches[step.number] = numbers
    return tuple(steps)
