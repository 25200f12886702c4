"""Pairs of sends and receives: by name, as MPI and Gloo match them, or by order alone, as NCCL does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from .calls import CallLists, CallSide, Part, PartId

Key = tuple[int, int, str, str]
"""Sender, receiver, communicator and name of messages that are matched with each other by order."""

Ends = tuple[list[tuple[PartId, Part]], list[tuple[PartId, Part]]]
"""Sends and receives of a key, in order."""


@dataclass(slots=True)
class Pairs:
    """Pairs of sends and receives.

    Attributes:
        partner: the other side of each part that has one.
        order: number of each such part on its communicator and direction, from 0.
    """

    partner: dict[PartId, PartId] = field(default_factory=dict)
    order: dict[PartId, int] = field(default_factory=dict)


def pairs_of(lists: CallLists, *, by_name: bool) -> Pairs:
    """The pairs of all parts.

    Args:
        lists: the lists of all ranks.
        by_name: whether messages of one direction are matched by name first; otherwise by order alone.
    """
    pairs = Pairs()
    for sends, receives in _ends(lists, by_name=by_name).values():
        for number, ((send, _), (receive, _)) in enumerate(zip(sends, receives, strict=False)):
            pairs.partner |= {send: receive, receive: send}
            pairs.order |= {send: number, receive: number}
    return pairs


def _ends(lists: CallLists, *, by_name: bool) -> dict[Key, Ends]:
    ends: dict[Key, Ends] = defaultdict(lambda: ([], []))
    for part_id, part in lists.parts():
        sending = part.side is CallSide.SEND
        sender, receiver = (part_id.rank, part.peer) if sending else (part.peer, part_id.rank)
        key = (sender, receiver, part.communicator, part.name if by_name else "")
        ends[key][0 if sending else 1].append((part_id, part))
    return ends


def pairing_faults(lists: CallLists) -> Iterator[str]:
    """Messages without their other side, and sides that meet by order although they name other messages."""
    labels = lists.labels()
    for (sender, receiver, communicator, _), (sends, receives) in sorted(_ends(lists, by_name=False).items()):
        place = f"from rank {sender} to rank {receiver} on communicator {communicator!r}"
        for number, (send, receive) in enumerate(zip_longest(sends, receives)):
            shown = [_label(end, labels) for end in (send, receive)]
            if send is None or receive is None:
                missing = "no send" if send is None else "no receive"
                yield f"message {number} {place}: {shown[0] or shown[1]} has {missing}"
                break
            if send[1].name and receive[1].name and send[1].name != receive[1].name:
                yield f"message {number} {place}: {shown[0]} meets {shown[1]}"
                break


def is_crossed(fault: str) -> bool:
    """True if a fault is of two messages that meet, not of a lone side."""
    return " meets " in fault


def crossed_receives(lists: CallLists) -> tuple[PartId, PartId] | None:
    """The first receive that meets another message, and the receive of that message; None: there is none."""
    for _, (sends, receives) in sorted(_ends(lists, by_name=False).items()):
        for number, ((_, send), (first, receive)) in enumerate(zip(sends, receives, strict=False)):
            if send.name and receive.name and send.name != receive.name:
                rest = (part_id for part_id, part in receives[number + 1 :] if part.name == send.name)
                right = next(rest, None)
                return None if right is None else (first, right)
    return None


def without_lone_calls(lists: CallLists) -> CallLists:
    """The lists without calls of which no part has another side, which a part of a run may leave out."""
    partner = pairs_of(lists, by_name=True).partner
    rows = (
        tuple(
            replace(step, parts=())
            if step.parts and not any(PartId(rank, step.number, n) in partner for n in range(len(step.parts)))
            else step
            for step in row
        )
        for rank, row in enumerate(lists.ranks)
    )
    return replace(lists, ranks=tuple(rows))


def _label(end: tuple[PartId, Part] | None, labels: dict[tuple[int, int], str]) -> str:
    if end is None:
        return ""
    part_id, part = end
    label = labels[part_id.rank, part_id.number]
    return f"rank {part_id.rank}'s {part.side.value} in {label}" if "," in label else label
