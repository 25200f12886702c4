"""Changes of lists of calls that may break a circle: moves, batches, communicators.

A circle waits because some rank has a call behind the one in which it is stuck. So only these calls are
moved, batched or given another communicator. Nothing here says that a change is right: the rules do, on the
changed lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .calls import CallLists, CallSide, CallStep, CommunicatorScope, Part, Row
from .pairing import crossed_receives
from .waiting import WaitPlay


@dataclass(frozen=True, slots=True)
class ListChange:
    """A change, and the lists after it.

    Attributes:
        text: the change in words.
        lists: the changed lists.
    """

    text: str
    lists: CallLists


def changes_for(lists: CallLists, play: WaitPlay) -> list[ListChange]:
    """Changes that may break the circle of a play, the smaller ones first."""
    moves: list[ListChange] = []
    batches: list[ListChange] = []
    edges: dict[tuple[int, int, str], ListChange] = {}
    for rank, head, awaited in _queued_behind(play):
        row = lists.ranks[rank]
        first, second = row[head], row[awaited]
        if second.parts:
            text = _swapped(rank, first, second) if awaited == head + 1 and first.parts else ""
            moves.append(
                ListChange(
                    text or f"rank {rank}: call {second.label} before {first.label}",
                    lists.with_row(rank, _moved(row, awaited, head)),
                )
            )
        if first.parts and awaited > head + 1:
            moves.append(
                ListChange(
                    f"rank {rank}: call {first.label} after {second.label}",
                    lists.with_row(rank, _moved(row, head, awaited)),
                )
            )
        if first.parts and second.parts:
            batches += _batches(lists, rank, head, awaited)
            for step in (first, second):
                for part in step.parts:
                    sender, receiver = (rank, part.peer) if part.side is CallSide.SEND else (part.peer, rank)
                    edge = sender, receiver, part.communicator
                    if edge not in edges and (change := _separate(lists, *edge)) is not None:
                        edges[edge] = change
    return [*moves, *batches, *edges.values()]


def _queued_behind(play: WaitPlay) -> Iterator[tuple[int, int, int]]:
    """Rank, the place where it is stuck, and the later place that the step before in the circle waits for."""
    waits = play.waits
    for before, wait in zip((waits[-1], *waits[:-1]), waits, strict=True):
        if before.awaited_rank == wait.rank and before.awaited > wait.position:
            yield wait.rank, wait.position, before.awaited


def _swapped(rank: int, first: CallStep, second: CallStep) -> str:
    return f"rank {rank}: swap {first.label} and {second.label}"


def _moved(row: Row, source: int, target: int) -> Row:
    steps = list(row)
    steps.insert(target, steps.pop(source))
    return tuple(steps)


def _batches(lists: CallLists, rank: int, head: int, awaited: int) -> Iterator[ListChange]:
    row = lists.ranks[rank]
    first, second = row[head], row[awaited]
    if first.stream != second.stream:
        return
    batch = replace(
        first,
        label=f"({first.label};{second.label})",
        parts=first.parts + second.parts,
        needs=tuple(sorted({*first.needs, *second.needs} - {first.number, second.number})),
    )
    for place in (head, awaited) if awaited > head + 1 else (head,):
        steps = [
            batch if position == place else _with_need(step, second.number, first.number)
            for position, step in enumerate(row)
            if position == place or position not in (head, awaited)
        ]
        after = "" if place == head else f", at the place of {second.label}"
        text = f"rank {rank}: batch {first.label} and {second.label}{after}"
        yield ListChange(text, lists.with_row(rank, tuple(steps)))


def _with_need(step: CallStep, former: int, number: int) -> CallStep:
    if former not in step.needs:
        return step
    return replace(step, needs=tuple(sorted({number if need == former else need for need in step.needs})))


def _separate(lists: CallLists, sender: int, receiver: int, communicator: str) -> ListChange | None:
    name = CommunicatorScope.EDGE.of_message(sender, receiver)
    if communicator == name:
        return None
    ends = {(sender, CallSide.SEND, receiver), (receiver, CallSide.RECEIVE, sender)}

    def renamed(rank: int, part: Part) -> Part:
        fits = (rank, part.side, part.peer) in ends and part.communicator == communicator
        return replace(part, communicator=name) if fits else part

    changed = _with_parts(lists, {sender, receiver}, renamed)
    text = f"give messages from rank {sender} to rank {receiver} a communicator of their own"
    return None if changed is None else ListChange(text, changed)


def edge_communicators(lists: CallLists) -> ListChange | None:
    """A communicator for each sender and receiver; None if that changes nothing, or a batch has several."""

    def renamed(rank: int, part: Part) -> Part:
        sender, receiver = (rank, part.peer) if part.side is CallSide.SEND else (part.peer, rank)
        return replace(part, communicator=CommunicatorScope.EDGE.of_message(sender, receiver))

    changed = _with_parts(lists, set(range(len(lists.ranks))), renamed)
    if changed is None or changed == lists:
        return None
    return ListChange("give each sender and receiver a communicator of their own", changed)


def _with_parts(lists: CallLists, ranks: set[int], renamed: Callable[[int, Part], Part]) -> CallLists | None:
    for rank in sorted(ranks):
        steps: list[CallStep] = []
        for step in lists.ranks[rank]:
            parts = tuple(renamed(rank, part) for part in step.parts)
            if len({part.communicator for part in parts}) > 1:
                return None  # a batch runs on one communicator
            steps.append(step if parts == step.parts else replace(step, parts=parts))
        lists = lists.with_row(rank, tuple(steps))
    return lists


def swap_for_crossed(lists: CallLists) -> ListChange | None:
    """A swap of two receives of which the first meets the message of the second; None: no message does."""
    crossed = crossed_receives(lists)
    if crossed is None:
        return None
    first, second = crossed
    row = list(lists.ranks[first.rank])
    places = {step.number: place for place, step in enumerate(row)}
    at, later_at = places[first.number], places[second.number]
    step, later = row[at], row[later_at]
    part, later_part = step.parts[first.part], later.parts[second.part]
    text = f"rank {first.rank}: swap the receives of {part.name} and {later_part.name}"
    if at != later_at and len(step.parts) == len(later.parts) == 1:
        row[at], row[later_at] = later, step
    elif at == later_at:
        parts = list(step.parts)
        parts[first.part], parts[second.part] = later_part, part
        row[at] = replace(step, parts=tuple(parts))
    else:
        return None
    return ListChange(text, lists.with_row(first.rank, tuple(row)))
