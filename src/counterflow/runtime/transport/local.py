"""The local transport: all workers are threads of one process.

For notebooks, debugging and fast tests. In strict mode it is as unforgiving as a backend can be: a send
blocks until the other side has posted its receive, and the messages of two workers, both ways together,
must come in one order on both sides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.program.actions import Matching

from .base import Control, Group, PeerLost, PeerReturned, Status, TimedOut, Transport
from .kinds import LOCAL
from .pending import DONE, Transfer
from .rng_lock import rng_released

T = TypeVar("T")
U = TypeVar("U")

_HOST = torch.device("cpu")

_POLL_SECONDS = 0.05
"""Interval at which a waiting thread checks for failures of other threads."""


class Waited(NamedTuple):
    """Wait of a thread for other ranks.

    Attributes:
        rank: the rank that it waits for; -1: several.
        seconds: maximum time of the wait.
        missing: returns the ranks that have not taken part yet.
    """

    rank: int
    seconds: float
    missing: Callable[[], Collection[int]]


class Hub:
    """State that the threads share: open messages, open collectives, statuses and the first failure.

    Args:
        world_size: number of workers.
        timeout_seconds: maximum time of any wait.
    """

    kind = LOCAL
    strict = False
    """True if sends block until their receive is posted, and each pair must use one order."""

    def __init__(self, world_size: int, *, timeout_seconds: float = 300.0) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.lock = threading.Lock()
        self.messages: dict[tuple[int, int, int], _Message] = {}
        self.collectives: dict[tuple[tuple[int, ...], int], _Collective] = {}
        self.pairs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.statuses = [Status(rank) for rank in range(world_size)]
        self.failed: tuple[int, BaseException] | None = None
        self.returned: set[int] = set()
        """Ranks whose function has returned: they send nothing more."""

    def transport(self, rank: int, device: torch.device | str = "cpu") -> Transport:
        """Make the transport of worker ``rank``; call it once for each."""
        return LocalTransport(self, rank, torch.device(device))

    def ended(self) -> None:
        """Called once all workers have ended and none has failed."""

    def message(self, sender: int, receiver: int, tag: int) -> _Message:
        """Open message of this key; the first of its two sides makes it."""
        key = sender, receiver, tag
        with self.lock:
            message = self.messages.get(key)
            if message is None:
                message = self.messages[key] = _Message()
            else:
                del self.messages[key]  # both sides have it now
            return message

    def wait(self, event: threading.Event, status: Status, waited: Waited) -> None:
        """Wait for an event on behalf of a worker.

        Raises:
            PeerLost: another worker failed, or an awaited one has returned.
            TimedOut: it took longer than the timeout.
        """
        if event.is_set():
            return
        with rng_released():
            self._wait(event, status, waited)

    def _wait(self, event: threading.Event, status: Status, waited: Waited) -> None:
        status.waiting_for = waited.rank
        deadline = time.monotonic() + waited.seconds
        while not event.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self.failed is not None:
                failed, error = self.failed
                raise PeerLost(failed, f"worker of rank {failed} failed: {error}")
            gone = self.returned & set(waited.missing())
            if gone and not event.is_set():  # what they sent before was there
                raise PeerReturned(min(gone))
            if time.monotonic() >= deadline:
                raise TimedOut(waited.rank if waited.rank >= 0 else None, waited.seconds)
        status.waiting_for = None

    def check_order(self, me: int, peer: int, entry: tuple[int, int, int]) -> None:
        """Check that both sides of a pair begin its messages in one order."""
        with self.lock:
            ahead = self.pairs.setdefault((peer, me), [])  # what the peer has done and I have not
            if ahead:
                expected = ahead.pop(0)
                if expected != entry:
                    raise RuntimeError(
                        f"message order between ranks {me} and {peer}: rank {me} comes to {_shown(entry)} "
                        f"where rank {peer} had {_shown(expected)}"
                    )
            else:
                self.pairs.setdefault((me, peer), []).append(entry)


def _shown(entry: tuple[int, int, int]) -> str:
    sender, receiver, tag = entry
    return f"message {tag} from {sender} to {receiver}"


class _Message:
    """A message: the sender provides tensors, the receiver buffers; the later of the two copies."""

    __slots__ = ("buffers", "delivered", "lock", "posted", "tensors")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tensors: list[Tensor] | None = None
        self.buffers: Sequence[Tensor] | None = None
        self.posted = threading.Event()
        self.delivered = threading.Event()


class _Collective:
    __slots__ = ("done", "joined", "remaining", "result", "values")

    def __init__(self, size: int) -> None:
        self.joined: set[int] = set()
        self.values: dict[int, object] = {}
        self.result: object = None
        self.remaining = size
        self.done = threading.Event()


class ThreadControl(Control):
    """One thread's control plane, over a ``Hub``.

    Args:
        hub: state that the threads share.
        rank: number of this worker.
        device: device of its computation.
    """

    def __init__(self, hub: Hub, rank: int, device: torch.device) -> None:
        self.hub, self.rank, self.device = hub, rank, device
        self.world_size = hub.world_size
        self.timeout_seconds = hub.timeout_seconds
        self.limit: float | None = None
        """Maximum time of this thread's waits; None: its launch's."""
        self.status = hub.statuses[rank]
        self._calls: dict[tuple[int, ...], int] = {}

    # Messages

    @override
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """In strict mode it blocks until the receive is posted."""
        if self.hub.strict:
            self.hub.check_order(self.rank, peer, (self.rank, peer, tag))
        message = self.hub.message(self.rank, peer, tag)
        if self.hub.strict:
            self._wait(message.posted, peer)
        with message.lock:
            if message.buffers is not None:
                _copy(tensors, message.buffers)
            else:  # the receiver is not there yet, or does not know the shapes
                message.tensors = [
                    tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors
                ]
            message.delivered.set()
        return DONE

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """Begin to receive into ``buffers``."""
        message = self._expected(peer, tag)
        with message.lock:
            if message.tensors is not None:
                _copy(message.tensors, buffers)
                message.tensors = None
            else:
                message.buffers = buffers
        message.posted.set()
        return self._transfer(message.delivered, peer)

    @override
    def receive_described(self, peer: int, tag: int) -> Transfer[list[Tensor]]:
        message = self._expected(peer, tag)
        message.posted.set()

        def on_device(_: None) -> list[Tensor]:
            assert message.tensors is not None
            for place, tensor in enumerate(message.tensors):
                if tensor.device not in (self.device, _HOST):  # threads may have a GPU each
                    moved = tensor.detach().to(self.device)
                    message.tensors[place] = moved.requires_grad_(tensor.requires_grad)
            return message.tensors

        return self._transfer(message.delivered, peer).then(on_device)

    def _expected(self, peer: int, tag: int) -> _Message:
        if self.hub.strict:
            self.hub.check_order(self.rank, peer, (peer, self.rank, tag))
        return self.hub.message(peer, self.rank, tag)

    def _transfer(
        self, event: threading.Event, rank: int, missing: Callable[[], Collection[int]] | None = None
    ) -> Transfer[None]:
        return Transfer(lambda: self._wait(event, rank, missing), event.is_set)

    def _wait(
        self, event: threading.Event, rank: int, missing: Callable[[], Collection[int]] | None = None
    ) -> None:
        seconds = self.hub.timeout_seconds if self.limit is None else self.limit
        self.hub.wait(event, self.status, Waited(rank, seconds, missing or (lambda: (rank,))))

    # Collectives

    @override
    def start_gather(self, values: Sequence[float]) -> Transfer[list[list[float]]]:
        return self._join_all(tuple(values)).then(lambda rows: [list(row) for row in rows])

    @override
    def gather_objects(self, value: object) -> list[object]:
        return list(self._join_all(value).wait())

    @override
    def spread(self, tensor: Tensor, source: int) -> None:
        """The source waits until all ranks have copied it."""
        shared = self._join_all(tensor if self.rank == source else None).wait()[source]
        if shared is not None and self.rank != source:
            tensor.copy_(shared)
        self._join_all(None).wait()

    def _join_all(self, value: T) -> Transfer[list[T]]:
        return self.join(Group(tuple(range(self.world_size)), 0), value, list)

    def group(self, ranks: Sequence[int]) -> Group:
        """Group whose handle distinguishes its collectives from those of groups of the same ranks."""
        number = self._calls[()] = self._calls.get((), 0) + 1
        return Group(tuple(ranks), number)

    def join(self, group: Group, value: T, reduce: Callable[[list[T]], U]) -> Transfer[U]:
        """Contribute a value to a group's next collective; the last rank reduces all values to the result."""
        assert isinstance(group.handle, int)
        count = self._calls[group.handle, *group.ranks] = self._calls.get((group.handle, *group.ranks), 0) + 1
        key = (group.handle, *group.ranks), count
        with self.hub.lock:
            collective = self.hub.collectives.get(key)
            if collective is None:
                collective = self.hub.collectives[key] = _Collective(len(group.ranks))
            collective.values[self.rank] = value
            collective.joined.add(self.rank)
            collective.remaining -= 1
            last = not collective.remaining
            if last:
                del self.hub.collectives[key]
        if last:
            collective.result = reduce([cast("T", collective.values[rank]) for rank in group.ranks])
            collective.values.clear()
            collective.done.set()
        missing = partial(set(group.ranks).difference, collective.joined)
        return self._transfer(collective.done, -1, missing).then(lambda _: cast("U", collective.result))

    # Failing

    @override
    def translate_error(self, error: RuntimeError, peer: int, waited_seconds: float = 0.0) -> Exception:
        del peer, waited_seconds
        if self.hub.failed is None:
            raise error
        failed, why = self.hub.failed
        return PeerLost(failed, f"worker of rank {failed} failed: {why}")

    @override
    def statuses(self) -> list[Status | None]:
        return list(self.hub.statuses)

    @override
    def has_returned(self) -> None:
        self.status.now("its end")
        with self.hub.lock:
            self.hub.returned.add(self.rank)

    @override
    def fail(self, error: BaseException) -> None:
        with self.hub.lock:
            if self.hub.failed is None:
                self.hub.failed = self.rank, error


class LocalTransport(Transport):
    """One thread's transport: its data plane too is a ``Hub``."""

    shares_process = True
    control: ThreadControl

    def __init__(self, hub: Hub, rank: int, device: torch.device) -> None:
        super().__init__(ThreadControl(hub, rank, device), device)
        self.hub, self.kind = hub, hub.kind
        self.matching = Matching.ORDER if hub.strict else Matching.TAG

    @override
    def wait_at_most(self, seconds: float) -> None:
        if self.control.limit is None:
            self.control.limit = self.control.timeout_seconds = self.timeout_seconds = seconds

    @override
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        return self.control.send_described(tensors, peer, tag)

    @override
    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        return self.control.receive(buffers, peer, tag)

    @override
    def group(self, ranks: Sequence[int]) -> Group:
        return self.control.group(ranks)

    @override
    def all_reduce(self, tensor: Tensor, group: Group) -> Transfer[None]:
        """Summed in the order of the ranks."""

        def take(total: Tensor) -> None:
            tensor.copy_(total)

        return self.control.join(group, tensor, _sum).then(take)

    @override
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Transfer[None]:
        place = group.ranks.index(self.rank)

        def take(rows: list[Tensor]) -> None:
            for row, sender_rows in zip(received, rows, strict=True):
                row.copy_(sender_rows[place])

        return self.control.join(group, sent, list).then(take)

    @override
    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        # A copy, because the source may change its tensor before the other ranks have copied it.
        copy = tensor.detach().clone() if self.rank == source else None
        shared = self.control.join(
            group, copy, lambda values: next(v for v in values if v is not None)
        ).wait()
        if self.rank != source:
            with torch.no_grad():
                tensor.copy_(shared)


def _copy(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if tensor.shape != buffer.shape:
                raise RuntimeError(
                    f"a message has shape {tuple(tensor.shape)} where {tuple(buffer.shape)} was expected"
                )
            buffer.copy_(tensor)


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].detach().clone()
    for value in values[1:]:
        total += value.to(total.device)  # threads may have a GPU each
    return total
