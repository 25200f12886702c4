"""Tensors of known shapes over process groups with NCCL's rules; the rest over a control plane.

NCCL matches the messages of two ranks by their order alone; a wait blocks receive work on the stream, not
the host. Messages to higher ranks have one process group and those to lower ranks another: messages
that cross never wait for each other, and none is grouped with others, which would need all to take part.

Invariant: every communicator is made in ``connect``, by all its ranks, in one order. So no receive call waits
for a host. The control plane, over which all workers meet at the end of each step, explains errors.
``nccl.py`` and ``strict_nccl/`` choose the process groups and the control plane.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from typing_extensions import override

from counterflow.program.actions import Matching

from .base import Control, Group, Transport, member
from .headers import announced, as_bytes, describe
from .pending import DONE, Transfer, all_completed, both, call_contiguous, receive_via
from .progress import Event, Progress

T = TypeVar("T")


class _QueuedReceive(Generic[T]):
    """A receive that is posted after all earlier ones from the same peer.

    Args:
        begin: posts it.
        known: True if its shapes are known, so they need not be received first.
    """

    __slots__ = ("begin", "known", "posted")

    def __init__(self, begin: Callable[[], Transfer[T]], *, known: bool) -> None:
        self.begin, self.known = begin, known
        self.posted: Transfer[T] | None = None

    def post(self) -> None:
        self.posted = self.begin()

    def done(self) -> bool:
        """True if the receive was posted and has ended."""
        return self.posted is not None and self.posted.done()


class OrderedTransport(Transport):
    """Base of transports that send data over process groups with NCCL's rules.

    The control plane announces the shapes of tensors with unknown shapes, which are then sent over the same
    group as all others. Their receive, and receive ones from the same rank, are posted after the
    announcement.
    """

    matching = Matching.ORDER

    def __init__(self, control: Control, device: torch.device) -> None:
        super().__init__(control, device)
        self._queues: defaultdict[int, deque[_QueuedReceive[Any]]] = defaultdict(deque)
        self.progress = Progress(self.status, self.record_event)

    def make_groups(self) -> None:
        """Make the process groups of the messages; all ranks call it."""
        to_higher = self.data_group(range(self.world_size), "messages to higher ranks", messages=True)
        to_lower = self.data_group(range(self.world_size), "messages to lower ranks", messages=True)
        assert to_higher is not None
        assert to_lower is not None
        self._to_higher, self._to_lower = to_higher, to_lower

    # What it takes

    @abstractmethod
    def data_group(self, ranks: Sequence[int], name: str, *, messages: bool = False) -> ProcessGroup | None:
        """Process group of some ranks, None if this rank is not in it; all ranks of the world call it in one
        order.

        ``messages``: True if it carries messages between two ranks, False for collectives.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """Record an event at the end of the current stream."""

    # Messages

    @override
    def connect(self, peers: Iterable[int], groups: Iterable[Group] = ()) -> None:
        """Make the communicators of the groups, then those of pairs, in one order on all workers: the first
        that is missing is the next one of all its members. Pairs of neighbours are made concurrently.
        """
        for group in groups:
            if self.rank in group.ranks and len(group.ranks) > 1:
                with self.progress.host_waiting(-1):
                    self.all_reduce(self._token(), group).wait()
                    self.progress.synchronize()
        pairs = {(min(self.rank, peer), max(self.rank, peer)) for peer in peers}
        for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):
            for source, target in ((low, high), (high, low)):
                with self.progress.host_waiting(high if self.rank == low else low):
                    if self.rank == source:
                        self.send((self._token(),), target, 0).wait()
                    else:
                        self.post_receive((self._token(),), source).wait()
                    self.progress.synchronize()

    def _token(self) -> Tensor:
        return torch.zeros(1, device=self.device)

    @override
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """Host tensors are sent over the control plane."""
        on_device, hosts = self._by_device(tensors)
        group = self._to_higher if peer > self.rank else self._to_lower
        plain = [as_bytes(tensor) for tensor in on_device if tensor.numel()]
        launched = self._launched(lambda: [group.send([tensor], peer, 0) for tensor in plain], peer)
        return both(self.control.send_described(hosts, peer, tag), launched) if hosts else launched

    def _by_device(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        for tensor in tensors:
            if tensor.device != self.device:
                break
        else:
            return tensors, ()
        return (
            [tensor for tensor in tensors if tensor.device == self.device],
            [tensor for tensor in tensors if tensor.device != self.device],
        )

    @override
    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        on_device, hosts = self._by_device(buffers)
        host_receive = self.control.receive_described(peer, tag) if hosts else None
        if self._queues[peer]:
            receiving = self._enqueue(peer, lambda: self.post_receive(on_device, peer), known=True)
        else:
            receiving = self.post_receive(on_device, peer)
        if host_receive is None:
            return receiving

        def finish() -> None:
            receiving.wait()
            with torch.no_grad():
                for buffer, tensor in zip(hosts, host_receive.wait(), strict=True):
                    buffer.copy_(tensor)

        return Transfer(finish)  # the waiting caller already knows what it sends

    def post_receive(self, buffers: Sequence[Tensor], peer: int) -> Transfer[None]:
        """Post a receive of known shapes."""
        group = self._to_higher if peer < self.rank else self._to_lower

        def begin(targets: Sequence[Tensor]) -> Transfer[None]:
            plain = [as_bytes(target) for target in targets if target.numel()]
            return self._launched(lambda: [group.recv([tensor], peer, 0) for tensor in plain], peer)

        if all(buffer.is_contiguous() for buffer in buffers):
            return begin(buffers)
        return receive_via(buffers, begin, self.device)

    @override
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        places = [place for place, tensor in enumerate(tensors) if tensor.device != self.device]
        payload = [tensor for place, tensor in enumerate(tensors) if place not in places]
        words = describe(payload)
        hosts = [tensors[place] for place in places]
        announcement = self.control.send_described(
            [words, torch.tensor(places, dtype=torch.int64, device="cpu"), *hosts], peer, tag
        )
        return both(announcement, self.send(payload, peer, tag))

    @override
    def receive_described(self, peer: int, tag: int) -> Transfer[list[Tensor]]:
        announcement = self.control.receive_described(peer, tag)

        def begin() -> Transfer[list[Tensor]]:
            words, places, *hosts = announcement.wait()
            tensors, needing, _ = announced(words.tolist(), device=self.device)

            def with_host_tensors(_: None) -> list[Tensor]:
                for tensor, need in zip(tensors, needing, strict=True):
                    tensor.requires_grad_(need)
                for place, host in zip(places.tolist(), hosts, strict=True):
                    tensors.insert(place, host)
                return tensors

            return self.post_receive(tensors, peer).then(with_host_tensors)

        receiving = self._enqueue(peer, begin, known=False)
        if self.launches_hold:  # its sender is held until it is posted
            self._post_until(self._queues[peer][-1], peer)
        return receiving

    def _enqueue(self, peer: int, begin: Callable[[], Transfer[T]], *, known: bool) -> Transfer[T]:
        receive = _QueuedReceive(begin, known=known)
        self._queues[peer].append(receive)
        return Transfer(lambda: self._post_until(receive, peer).wait(), receive.done)

    def _post_until(self, receive: _QueuedReceive[T], peer: int) -> Transfer[T]:
        """Post the queued receives from a rank up to ``receive``, and later ones of known shapes."""
        queue = self._queues[peer]
        while receive.posted is None:
            queue[0].post()
            queue.popleft()
        while queue and queue[0].known:
            queue.popleft().post()
        return receive.posted

    def _launched(self, launch: Callable[[], Sequence[Work]], peer: int) -> Transfer[None]:
        try:
            works = launch()
        except RuntimeError as error:
            raise self.control.translate_error(error, peer) from error
        return Transfer(lambda: self.let_stream_wait(works, peer), all_completed(works))

    def let_stream_wait(self, works: Sequence[Work], peer: int) -> None:
        """Let the current stream wait for works."""
        if works:
            self.progress.waits(all_completed(works), peer)
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self.control.translate_error(error, peer) from error

    @override
    def computed(self) -> None:
        self.progress.computed()

    @override
    def stay_near(self) -> None:
        """Launched ops and their outputs occupy memory."""
        self.progress.stay_near()

    # Collectives

    @override
    def group(self, ranks: Sequence[int]) -> Group:
        """Groups of the same ranks are distinct."""
        alone = len(ranks) == 1
        return Group(tuple(ranks), None if alone else self.data_group(ranks, "sums"))

    @override
    def all_reduce(self, tensor: Tensor, group: Group) -> Transfer[None]:
        if len(group.ranks) == 1:
            return DONE
        return self._collective(lambda handle: handle.allreduce([tensor]), group)

    @override
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Transfer[None]:
        return self._collective(lambda handle: handle.alltoall_base(received, sent, [], []), group)

    @override
    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        if len(group.ranks) > 1:
            root = group.ranks.index(source)

            def begin(dense: Tensor) -> None:
                self._collective(lambda handle: handle.broadcast(dense, root), group).wait()

            call_contiguous(tensor, begin, update=self.rank != source)

    def _collective(self, call: Any, group: Group) -> Transfer[None]:
        handle = member(group)
        return self._launched(lambda: (call(handle),), -1)
