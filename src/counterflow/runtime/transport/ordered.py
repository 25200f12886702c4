"""Tensors of known shapes over process groups with NCCL's rules; the rest over a control plane.

NCCL matches the messages of two ranks by their order alone; a wait lets later work on the stream wait, and
the host goes on. Messages to higher ranks have one process group and those to lower ranks another: messages
that cross never wait for each other, and none is grouped with others, which would need all to take part.

Invariant: every communicator is made in ``connect``, by all that it has, in one order. So no later call waits
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
from .pending import DONE, Transfer, all_over, both, by_way_of, contiguously
from .progress import Event, Progress

T = TypeVar("T")


class _Later(Generic[T]):
    """A receive from a peer that is posted when those before it are.

    Args:
        begin: posts it.
        known: whether it can be posted without receiving shapes first.
    """

    __slots__ = ("begin", "known", "posted")

    def __init__(self, begin: Callable[[], Transfer[T]], *, known: bool) -> None:
        self.begin, self.known = begin, known
        self.posted: Transfer[T] | None = None

    def post(self) -> None:
        """Post it."""
        self.posted = self.begin()

    def done(self) -> bool:
        """True if the receive was posted and has ended."""
        return self.posted is not None and self.posted.done()


class OrderedTransport(Transport):
    """Base of transports that send data over process groups with NCCL's rules.

    The control plane announces the shapes of tensors with unknown shapes, which are then sent over the same
    group as all others. Their receive, and later ones from the same rank, are posted after the announcement.
    """

    matching = Matching.ORDER

    def __init__(self, control: Control, device: torch.device) -> None:
        super().__init__(control, device)
        self._behind: defaultdict[int, deque[_Later[Any]]] = defaultdict(deque)
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
        """A process group, None if this rank is not in it; all ranks of the world call it in one order.

        ``messages``: whether it carries messages of two ranks, not collectives.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """An event at the end of the current stream."""

    # Messages

    @override
    def connect(self, peers: Iterable[int], groups: Iterable[Group] = ()) -> None:
        """The communicators of the groups first, then those of pairs, in one order that all workers have: the
        first that is not made is the next one of all its members. Pairs of neighbours are made side by side.
        """
        for group in groups:
            if self.rank in group.ranks and len(group.ranks) > 1:
                with self.progress.held(-1):
                    self.all_reduce(self._token(), group).wait()
                    self.progress.synchronize()
        pairs = {(min(self.rank, peer), max(self.rank, peer)) for peer in peers}
        for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):
            for source, target in ((low, high), (high, low)):
                with self.progress.held(high if self.rank == low else low):
                    if self.rank == source:
                        self.send((self._token(),), target, 0).wait()
                    else:
                        self.post_receive((self._token(),), source).wait()
                    self.progress.synchronize()

    def _token(self) -> Tensor:
        return torch.zeros(1, device=self.device)

    @override
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """Tensors that are on the host go beside, over the control plane."""
        there, hosts = self._apart(tensors)
        group = self._to_higher if peer > self.rank else self._to_lower
        plain = [as_bytes(tensor) for tensor in there if tensor.numel()]
        launched = self._launched(lambda: [group.send([tensor], peer, 0) for tensor in plain], peer)
        return both(self.control.send_described(hosts, peer, tag), launched) if hosts else launched

    def _apart(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The tensors of a message that are on the device, and those that are on the host."""
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
        there, hosts = self._apart(buffers)
        told = self.control.receive_described(peer, tag) if hosts else None
        if self._behind[peer]:
            receiving = self._queued(peer, lambda: self.post_receive(there, peer), known=True)
        else:
            receiving = self.post_receive(there, peer)
        if told is None:
            return receiving

        def finish() -> None:
            receiving.wait()
            with torch.no_grad():
                for buffer, tensor in zip(hosts, told.wait(), strict=True):
                    buffer.copy_(tensor)

        return Transfer(finish)  # the waiting caller already knows what it sends

    def post_receive(self, buffers: Sequence[Tensor], peer: int) -> Transfer[None]:
        """Post a receive of known shapes after all that was posted before."""
        group = self._to_higher if peer < self.rank else self._to_lower

        def begin(targets: Sequence[Tensor]) -> Transfer[None]:
            plain = [as_bytes(target) for target in targets if target.numel()]
            return self._launched(lambda: [group.recv([tensor], peer, 0) for tensor in plain], peer)

        if all(buffer.is_contiguous() for buffer in buffers):
            return begin(buffers)
        return by_way_of(buffers, begin, self.device)

    @override
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        places = [place for place, tensor in enumerate(tensors) if tensor.device != self.device]
        payload = [tensor for place, tensor in enumerate(tensors) if place not in places]
        words = describe(payload)
        hosts = [tensors[place] for place in places]
        told = self.control.send_described(
            [words, torch.tensor(places, dtype=torch.int64, device="cpu"), *hosts], peer, tag
        )
        return both(told, self.send(payload, peer, tag))

    @override
    def receive_described(self, peer: int, tag: int) -> Transfer[list[Tensor]]:
        told = self.control.receive_described(peer, tag)

        def begin() -> Transfer[list[Tensor]]:
            words, places, *hosts = told.wait()
            tensors, needing, _ = announced(words.tolist(), device=self.device)

            def whole(_: None) -> list[Tensor]:
                for tensor, need in zip(tensors, needing, strict=True):
                    tensor.requires_grad_(need)
                for place, host in zip(places.tolist(), hosts, strict=True):
                    tensors.insert(place, host)
                return tensors

            return self.post_receive(tensors, peer).then(whole)

        receiving = self._queued(peer, begin, known=False)
        if self.launches_hold:  # its sender is held until it is posted
            self._post_until(self._behind[peer][-1], peer)
        return receiving

    def _queued(self, peer: int, begin: Callable[[], Transfer[T]], *, known: bool) -> Transfer[T]:
        later = _Later(begin, known=known)
        self._behind[peer].append(later)
        return Transfer(lambda: self._post_until(later, peer).wait(), later.done)

    def _post_until(self, later: _Later[T], peer: int) -> Transfer[T]:
        """Post what was to be received from a rank, in its order, up to ``later`` and what is known."""
        behind = self._behind[peer]
        while later.posted is None:
            behind[0].post()
            behind.popleft()
        while behind and behind[0].known:
            behind.popleft().post()
        return later.posted

    def _launched(self, launch: Callable[[], Sequence[Work]], peer: int) -> Transfer[None]:
        try:
            works = launch()
        except RuntimeError as error:
            raise self.control.trouble(error, peer) from error
        return Transfer(lambda: self.let_stream_wait(works, peer), all_over(works))

    def let_stream_wait(self, works: Sequence[Work], peer: int) -> None:
        """Let the current stream wait for what was launched."""
        if works:
            self.progress.waits(all_over(works), peer)
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self.control.trouble(error, peer) from error

    @override
    def computed(self) -> None:
        self.progress.computed()

    @override
    def stay_near(self) -> None:
        """What a host launched ahead, and its outputs, are in memory."""
        self.progress.stay_near()

    # Collectives

    @override
    def group(self, ranks: Sequence[int]) -> Group:
        """Two groups of the same ranks are two."""
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

            def begin(whole: Tensor) -> None:
                self._collective(lambda handle: handle.broadcast(whole, root), group).wait()

            contiguously(tensor, begin, takes=self.rank != source)

    def _collective(self, call: Any, group: Group) -> Transfer[None]:
        handle = member(group)
        return self._launched(lambda: (call(handle),), -1)
