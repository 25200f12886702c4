"""Calls that wait behind others in their stream although both sides could run: time lost, but no hang."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import CallLists, CallSide
from .changes import edge_communicators
from .waiting import Player, TransportRule, play

_LEAST = 0.01
"""Share of the makespan below which a loss is not reported."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Stall:
    """A call that waits behind another one in its stream.

    Attributes:
        rank: its rank.
        call: the call.
        behind: the call before it in the stream.
        seconds: time from the call until it begins, in the time of a forward.
    """

    rank: int
    call: str
    behind: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Stalls:
    """Time that calls lose behind others in their streams.

    Attributes:
        makespan: end of all lists in NCCL's order, in the time of a forward; messages take no time.
        eager: the same with sends that never wait.
        by_edge: the same in NCCL's order if each sender and receiver have a communicator; 0: not known.
        longest: the calls that wait longest.
    """

    makespan: float
    eager: float
    by_edge: float
    longest: tuple[Stall, ...]


def stalls_of(lists: CallLists) -> Stalls | None:
    """The time that calls lose in lists that end; None if it is less than one percent.

    Args:
        lists: lists whose work lasts, and which end in NCCL's order.
    """
    player = Player(lists, TransportRule.NCCL, timed=True)
    result, eager = player.play(), play(lists, TransportRule.EAGER, timed=True)
    if not result.ok or result.makespan <= eager.makespan * (1 + _LEAST):
        return None
    change = edge_communicators(lists)
    by_edge = play(change.lists, TransportRule.NCCL, timed=True) if change else None
    longest = sorted(_stalls(player), key=lambda stall: (-stall.seconds, stall.rank, stall.call))[:_SHOWN]
    return Stalls(result.makespan, eager.makespan, by_edge.makespan if by_edge else 0.0, tuple(longest))


def _stalls(player: Player) -> list[Stall]:
    stalls: list[Stall] = []
    called: dict[tuple[int, int], float] = {}
    for number, queue in enumerate(player.queues):
        first = int(player.arrays.first[number])
        if not queue.stream:
            for node, position in enumerate(queue.steps):
                called[queue.rank, position] = float(player.times.end[first + node])
            continue
        row = player.lists.ranks[queue.rank]
        for node in range(2, len(queue.steps), 2):  # two nodes a call
            position, before = queue.steps[node], queue.steps[node - 2]
            lost = float(player.times.start[first + node]) - called[queue.rank, position]
            if lost > 0 and any(part.side is CallSide.SEND for part in row[position].parts):
                stalls.append(Stall(queue.rank, row[position].label, row[before].label, lost))
    return stalls
