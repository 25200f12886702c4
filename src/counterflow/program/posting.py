"""Places of receives if messages may block their workers: as early as possible without a deadlock.

On a GPU a posted receive, and a send that is not yet received, block everything that waits for the whole
device: with ``CUDA_LAUNCH_BLOCKING=1`` every launch, and always an op that frees memory. So the lists also
have to end if each message blocks both its workers until it is complete. They do if every worker has its
messages in one global order, here that of sending; a receive that is posted before its turn, to overlap with
an op, may close a circle.

Invariant: the messages of all workers end even if both sides block. A receive is posted earlier than
its turn unless that closes a circle; none is posted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class Posting:
    """A message, and the ops of its sender and its receiver before which it is sent and posted.

    Attributes:
        sender: worker that sends.
        receiver: worker that receives.
        sent: the op of the sender before which it is sent.
        posted: the op of the receiver before which its receive should be posted.
        turn: the op before which its turn in the global order is, ``posted`` or later.
    """

    sender: int
    receiver: int
    sent: int
    posted: int
    turn: int


def settle(messages: Sequence[Posting], workers: int) -> None:
    """Post at their turn the receives that would close a circle if messages block their workers.

    Args:
        messages: all messages in the global order, in which those of one worker to another are posted.
            ``posted`` of some becomes later.
        workers: number of workers.
    """
    rows = _PostingRows(messages, workers)
    over = bytearray(len(messages))
    first = 0
    look = list(range(workers))
    while True:
        while look:
            worker = look.pop()
            head = rows.head(worker)
            while head is not None and rows.head(rows.peer(head, worker)) == head:
                over[head] = 1
                partner = rows.peer(head, worker)
                rows.drop(worker)
                rows.drop(partner)
                look.append(partner)
                head = rows.head(worker)
        while first < len(messages) and over[first]:
            first += 1
        if first == len(messages):
            return
        # All are stuck. Whatever precedes the first incomplete message was posted before its turn.
        for worker in (messages[first].sender, messages[first].receiver):
            while (head := rows.head(worker)) != first:
                assert head is not None
                rows.wait_for_turn(head)
                look.append(worker)


class _PostingRows:
    def __init__(self, messages: Sequence[Posting], workers: int) -> None:
        self.messages = messages
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        """For each worker, the op before which each message is, and the message's number."""
        self.least: dict[tuple[int, int], int] = {}
        """For each sender and receiver, the op before which no more receives are posted."""
        for number, message in enumerate(messages):
            self.rows[message.sender].append((message.sent, number))
            self.rows[message.receiver].append((message.posted, number))
        for row in self.rows:
            heapify(row)

    def peer(self, number: int, worker: int) -> int:
        """The worker on the other side of a message."""
        message = self.messages[number]
        return message.sender if worker == message.receiver else message.receiver

    def head(self, worker: int) -> int | None:
        """A worker's next message; after a receive that was moved, the later ones of the same sender are
        moved too.
        """
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
        """Remove the head, which is complete."""
        heappop(self.rows[worker])

    def wait_for_turn(self, number: int) -> None:
        """Post a receive that is its worker's next message at its turn."""
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
