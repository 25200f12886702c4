"""Lists of calls: each rank's sends, receives and batches of these, and the work between them.

A list says nothing of the system that made it. A step names the earlier steps of its rank that it waits for,
so a list may be changed without making these names wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class CallSide(Enum):
    """A side of a message."""

    SEND = "send"
    RECEIVE = "receive"


class CommunicatorScope(Enum):
    """Communicators, each with a stream of its own, on which a system's calls run.

    ``GROUP``: all on that of the group, as torch does for a group that is bound to a device (``device_id``).
    ``PAIR``: one for two ranks, as torch does otherwise. ``EDGE``: one for a sender and a receiver.
    """

    GROUP = "group"
    PAIR = "pair"
    EDGE = "edge"

    def of_message(self, sender: int, receiver: int) -> str:
        """Name of the communicator of a message.

        >>> CommunicatorScope.PAIR.of_message(3, 1), CommunicatorScope.EDGE.of_message(3, 1)
        ('pair 1-3', '3→1')
        """
        if self is CommunicatorScope.GROUP:
            return "group"
        low, high = sorted((sender, receiver))
        return f"pair {low}-{high}" if self is CommunicatorScope.PAIR else f"{sender}→{receiver}"


class PartId(NamedTuple):
    """Part ``part`` of step ``number`` of rank ``rank``."""

    rank: int
    number: int
    part: int


@dataclass(frozen=True, slots=True)
class Part:
    """A send or a receive.

    Attributes:
        side: its side of the message.
        peer: the rank of the other side.
        name: name of the message; empty: unknown.
        communicator: name of the communicator.
    """

    side: CallSide
    peer: int
    name: str
    communicator: str


@dataclass(frozen=True, slots=True)
class CallStep:
    """A step of a rank's list: a call, or work of the rank's device.

    Attributes:
        number: its name among the steps of its rank; at first its place.
        label: the step as its file has it.
        parts: the sends and receives of a call, several in a batch; empty: work.
        needs: numbers of the steps of its rank that have to be complete before it.
        receives: number and part of receives that it needs alone of a batch among ``needs``; a system that
            completes a batch as a whole waits for all of it.
        seconds: duration of the work, in the time of a forward.
        place: its place in the file.
    """

    number: int
    label: str
    parts: tuple[Part, ...] = ()
    needs: tuple[int, ...] = ()
    receives: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    place: str = ""

    @property
    def stream(self) -> str:
        """Name of the stream on which a call runs."""
        return self.parts[0].communicator


Row = tuple[CallStep, ...]
"""Steps of a rank, in order."""


@dataclass(frozen=True, slots=True)
class CallLists:
    """The lists of all ranks.

    Attributes:
        ranks: steps of each rank.
        form: the form in which they were read.
        connected: True if all connections exist before the first step.
        partial: True if they are a part of the run: earlier and later steps may exist.
    """

    ranks: tuple[Row, ...]
    form: str
    connected: bool = True
    partial: bool = False

    def with_row(self, rank: int, row: Row) -> CallLists:
        """These lists with another list of one rank."""
        return replace(self, ranks=(*self.ranks[:rank], row, *self.ranks[rank + 1 :]))

    def parts(self) -> Iterator[tuple[PartId, Part]]:
        """All sends and receives, rank by rank in order."""
        for rank, row in enumerate(self.ranks):
            for step in row:
                for number, part in enumerate(step.parts):
                    yield PartId(rank, step.number, number), part

    def labels(self) -> dict[tuple[int, int], str]:
        """Label of each step by rank and number."""
        return {(rank, step.number): step.label for rank, row in enumerate(self.ranks) for step in row}

    @property
    def calls(self) -> int:
        """Number of sends and receives."""
        return sum(len(step.parts) for row in self.ranks for step in row)
