"""Receives where their messages are sent in one order of all sends: then lists end under every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .calls import CallLists, CallSide, CallStep, PartId
from .pairing import pairs_of


def in_order_of_sending(lists: CallLists) -> tuple[CallLists, int] | None:
    """The lists with each receive moved to where its message is sent, and the number of receives that move.

    All other steps keep their order; they are gone through rank by rank, each as soon as its receives exist.
    So the two sides of a message have the same place in one order of all messages, and no circle is left.

    Returns:
        None if the steps wait for each other wherever receives are, or a message has one side alone.
    """
    partner = pairs_of(lists, by_name=True).partner
    steps = {(rank, step.number): step for rank, row in enumerate(lists.ranks) for step in row}
    waiting = [[step for step in row if not _moves(step)] for row in lists.ranks]
    rows: list[list[CallStep]] = [[] for _ in lists.ranks]
    placed: set[tuple[int, int]] = set()
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(waiting):
            while row and all((rank, need) in placed for need in row[0].needs):
                step = row.pop(0)
                rows[rank].append(step)
                placed.add((rank, step.number))
                progress = True
                for number, part in enumerate(step.parts):
                    end = partner.get(PartId(rank, step.number, number))
                    if end is None:
                        return None
                    receive = steps[end.rank, end.number]
                    if part.side is CallSide.SEND and _moves(receive):
                        rows[end.rank].append(receive)
                        placed.add((end.rank, end.number))
    if any(waiting) or list(map(len, rows)) != list(map(len, lists.ranks)):
        return None
    former, later = (_places(ranks) for ranks in (lists.ranks, rows))
    moved = sum(former[key] != place for key, place in later.items())
    changed = tuple(map(tuple, rows))
    return None if changed == lists.ranks else (replace(lists, ranks=changed), moved)


def _moves(step: CallStep) -> bool:
    return len(step.parts) == 1 and step.parts[0].side is CallSide.RECEIVE


def _places(rows: Sequence[Sequence[CallStep]]) -> dict[tuple[int, int], int]:
    """For each receive, by rank and number, how many steps that do not move precede it."""
    places: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(rows):
        before = 0
        for step in row:
            if _moves(step):
                places[rank, step.number] = before
            before += not _moves(step)
    return places
