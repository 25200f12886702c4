"""Where receives are posted if messages may hold their workers: as early as leaves every program an end.

On a GPU a posted receive, and a send nobody receives yet, hold whatever waits for the whole device: with
``CUDA_LAUNCH_BLOCKING=1`` every launch, and at any time an op that frees memory. So the lists have to end
also if each message holds both its workers until it is over. They do if every worker has its messages in
one order of all messages, here that of their sending; a receive that is posted before its turn, so that an
op runs meanwhile, may close a circle.

Invariant: the messages of all workers, played with both sides holding, end. A receive is posted earlier than
its turn unless that closes a circle; none is posted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class Posting:
    """A message: before which op of its sender and its receiver it stands.

    Attributes:
        sender: worker.
        receiver: worker.
        sent: the op of the sender before which it is sent.
        posted: the op of the receiver before which its receive is wanted.
        turn: the op before which it stands in the order of all messages, ``posted`` or later.
    """

    sender: int
    receiver: int
    sent: int
    posted: int
    turn: int


def settle(messages: Sequence[Posting], workers: int) -> None:
    """Post at their turn the receives that would close a circle where messages hold their workers.

    Args:
        messages: in the one order of all; those of one worker to another are posted in it. ``posted`` of some
            becomes later.
        workers: how many there are.
    """
    rows = _Rows(messages, workers)
    over = bytearray(len(messages))
    first = 0
    look = list(range(workers))
    while True:
        while look:
            worker = look.pop()
            head = rows.head(worker)
            while head is not None and rows.head(rows.other(head, worker)) == head:
                over[head] = 1
                peer = rows.other(head, worker)
                rows.drop(worker)
                rows.drop(peer)
                look.append(peer)
                head = rows.head(worker)
        while first < len(messages) and over[first]:
            first += 1
        if first == len(messages):
            return
        # All are stuck. What stands before the first message that is not over was posted before its turn.
        for worker in (messages[first].sender, messages[first].receiver):
            while (head := rows.head(worker)) != first:
                assert head is not None
                rows.wait_for_turn(head)
                look.append(worker)


class _Rows:
    """Each worker's messages that are not over, in the order of its list."""

    def __init__(self, messages: Sequence[Posting], workers: int) -> None:
        self.messages = messages
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        """By worker, the op before which a message stands, and its number."""
        self.least: dict[tuple[int, int], int] = {}
        """By sender and receiver, the op before which no receive is posted any more."""
        for number, message in enumerate(messages):
            self.rows[message.sender].append((message.sent, number))
            self.rows[message.receiver].append((message.posted, number))
        for row in self.rows:
            heapify(row)

    def other(self, number: int, worker: int) -> int:
        """The other side of a message."""
        message = self.messages[number]
        return message.sender if worker == message.receiver else message.receiver

    def head(self, worker: int) -> int | None:
        """A worker's next message; after a receive that was moved, those of the same sender are too."""
        row = self.rows[worker]
        while row:
            place, number = row[0]
            message = self.messages[number]
            if message.receiver == worker and self.least:
                least = self.least.get((message.sender, worker), 0)
                if place < least:
                    self._move(number, least)
                    continue
            return number
        return None

    def drop(self, worker: int) -> None:
        """The head is over."""
        heappop(self.rows[worker])

    def wait_for_turn(self, number: int) -> None:
        """Post a receive that is its worker's next message when its turn has come."""
        message = self.messages[number]
        assert message.posted < message.turn
        self.least[message.sender, message.receiver] = message.turn
        self._move(number, message.turn)

    def _move(self, number: int, place: int) -> None:
        message = self.messages[number]
        row = self.rows[message.receiver]
        heappop(row)
        message.posted = place
        heappush(row, (place, number))
