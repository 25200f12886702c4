"""Tensors of known shapes over process groups with NCCL's rules; the rest over a control plane.

NCCL matches the messages of two ranks by their order alone; a wait lets later work on the stream wait, and
the host goes on. Messages to higher ranks have one process group and those to lower ranks another: messages
that cross never wait for each other, and none is grouped with others, which would need all to take part.

Invariant: every communicator is made in ``connect``, by all that it has, in one order. So no later call waits
for a host. What an error means is told by the control plane, over which all workers meet at the end of each
step. Which process groups these are, and what the control plane is, is told in ``nccl.py`` and
``strict_nccl/``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from counterflow.program.actions import Matching

from .base import Described, Group, Pending, Transport
from .headers import announced, as_bytes, describe
from .pending import DONE, copy_moves, in_place_of
from .progress import Event, Progress, all_over


class Launched:
    """What was launched over NCCL; ``moves`` are the buffers that could not be received into directly."""

    __slots__ = ("moves", "peer", "transport", "works")

    def __init__(
        self,
        transport: OrderedTransport,
        peer: int,
        works: Sequence[Work],
        moves: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.transport, self.peer, self.works, self.moves = transport, peer, works, moves

    def done(self) -> bool:
        """See ``Pending.done``."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """See ``Pending.wait``: the stream waits."""
        self.transport.let_stream_wait(self.works, self.peer)
        self.works = ()
        copy_moves(self.moves)
        self.moves = ()


class _Later:
    """A receive from a peer that is posted when those before it are."""

    def __init__(self, transport: OrderedTransport, peer: int) -> None:
        self.transport, self.peer = transport, peer
        self.posted: Launched | None = None

    known = True
    """Whether it can be posted without being told of shapes."""

    def post(self) -> None:
        """Post it."""

    def done(self) -> bool:
        """See ``Pending.done``."""
        return self.posted is not None and self.posted.done()

    def arrive(self) -> None:
        """Let the stream wait for it."""
        if self.posted is None:
            self.transport.post_until(self)
        assert self.posted is not None
        self.posted.wait()


class _Known(_Later):
    """One of known shapes."""

    def __init__(self, transport: OrderedTransport, peer: int, buffers: Sequence[Tensor]) -> None:
        super().__init__(transport, peer)
        self.buffers = buffers

    def post(self) -> None:
        """See ``_Later``."""
        self.posted = self.transport.post_receive(self.buffers, self.peer)

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self.arrive()


class _Unknown(_Later):
    """One of shapes that the control plane tells; with it come the tensors that are on the host."""

    known = False

    def __init__(self, transport: OrderedTransport, peer: int, told: Described) -> None:
        super().__init__(transport, peer)
        self.told = told
        self.tensors: list[Tensor] = []
        self.hosts: list[tuple[int, Tensor]] = []
        self.needing: list[bool] = []

    def post(self) -> None:
        """See ``_Later``; waits for what is told."""
        words, places, *hosts = self.told.wait()
        self.tensors, self.needing, _ = announced(words.tolist(), device=self.transport.device)
        self.hosts = list(zip(places.tolist(), hosts, strict=True))
        self.posted = self.transport.post_receive(self.tensors, self.peer)

    def wait(self) -> list[Tensor]:
        """See ``Described.wait``."""
        self.arrive()
        for tensor, need in zip(self.tensors, self.needing, strict=True):
            tensor.requires_grad_(need)
        for place, host in self.hosts:
            self.tensors.insert(place, host)
        self.hosts, self.needing = [], [tensor.requires_grad for tensor in self.tensors]
        return self.tensors


class _WithHosts:
    """A receive of known shapes of which some tensors are on the host: these come by the control plane."""

    __slots__ = ("buffers", "receiving", "told")

    def __init__(self, receiving: Pending, told: Described, buffers: Sequence[Tensor]) -> None:
        self.receiving, self.told, self.buffers = receiving, told, buffers

    def done(self) -> bool:
        """See ``Pending.done``: what is told is known by who waits for it."""
        return False

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self.receiving.wait()
        with torch.no_grad():
            for buffer, tensor in zip(self.buffers, self.told.wait(), strict=True):
                buffer.copy_(tensor)
        self.buffers, self.told = (), _NOTHING


class _Nothing:
    """What was told already."""

    def wait(self) -> list[Tensor]:
        """See ``Described.wait``."""
        return []


_NOTHING = _Nothing()


class OrderedTransport(Transport):
    """What transports have in common whose data go by process groups with NCCL's rules.

    What comes in unknown shapes is told by the control plane and comes by the same group as all else. It can
    only be posted once it was told, and what is posted after it, from the same rank, after it.
    """

    matching = Matching.ORDER
    progress: Progress

    def make_groups(self) -> None:
        """Make the process groups of the messages; all ranks call it."""
        to_higher = self.data_group(range(self.world_size), "messages to higher ranks", messages=True)
        to_lower = self.data_group(range(self.world_size), "messages to lower ranks", messages=True)
        assert to_higher is not None
        assert to_lower is not None
        self._to_higher, self._to_lower = to_higher, to_lower
        self._behind: defaultdict[int, deque[_Later]] = defaultdict(deque)
        self.progress = Progress(self.status, self.record_event)

    # What it takes

    @abstractmethod
    def data_group(self, ranks: Sequence[int], name: str, *, messages: bool = False) -> ProcessGroup | None:
        """A process group, None if this rank is not in it; all ranks of the world call it in one order.

        ``messages``: whether it carries messages of two ranks, not collectives.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """An event at the end of the current stream."""

    @abstractmethod
    def tell(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """Send host tensors over the control plane, as ``send_described``."""

    @abstractmethod
    def hear(self, peer: int, tag: int) -> Described:
        """Receive them."""

    @abstractmethod
    def meaning(self, error: RuntimeError, peer: int) -> Exception:
        """What an error of a process group means; raises it if it means nothing more."""

    # Messages

    def connect(self, peers: Iterable[int], groups: Iterable[Group] = ()) -> None:
        """See ``Transport.connect``.

        The communicators of the groups first, then those of pairs, in one order that all workers have: the
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

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """See ``Transport.send``; tensors that are on the host go beside, over the control plane."""
        there, hosts = self._apart(tensors)
        group = self._to_higher if peer > self.rank else self._to_lower
        plain = [as_bytes(tensor) for tensor in there if tensor.numel()]
        launched = Launched(self, peer, self._launched(group.send, plain, peer))
        return Both(self.tell(hosts, peer, tag), launched) if hosts else launched

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

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """See ``Transport.receive``."""
        there, hosts = self._apart(buffers)
        told = self.hear(peer, tag) if hosts else None
        receiving: Launched | _Known
        behind = self._behind[peer]
        if behind:
            receiving = _Known(self, peer, there)
            behind.append(receiving)
        else:
            receiving = self.post_receive(there, peer)
        return receiving if told is None else _WithHosts(receiving, told, hosts)

    def post_receive(self, buffers: Sequence[Tensor], peer: int) -> Launched:
        """Post a receive of known shapes after all that was posted before."""
        group = self._to_higher if peer < self.rank else self._to_lower
        targets: Sequence[Tensor] = buffers
        moves: Sequence[tuple[Tensor, Tensor]] = ()
        if not all(buffer.is_contiguous() for buffer in buffers):
            targets, moves = in_place_of(buffers, self.device)
        plain = [as_bytes(buffer) for buffer in targets if buffer.numel()]
        return Launched(self, peer, self._launched(group.recv, plain, peer), moves)

    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """See ``Transport.send_described``."""
        places = [place for place, tensor in enumerate(tensors) if tensor.device != self.device]
        payload = [tensor for place, tensor in enumerate(tensors) if place not in places]
        words = describe(payload)
        hosts = [tensors[place] for place in places]
        told = self.tell([words, torch.tensor(places, dtype=torch.int64, device="cpu"), *hosts], peer, tag)
        return Both(told, self.send(payload, peer, tag))

    def receive_described(self, peer: int, tag: int) -> Described:
        """See ``Transport.receive_described``."""
        receiving = _Unknown(self, peer, self.hear(peer, tag))
        self._behind[peer].append(receiving)
        if self.launches_hold:  # its sender is held until it is posted
            self.post_until(receiving)
        return receiving

    def post_until(self, receiving: _Later) -> None:
        """Post what was to be received from a rank, in its order, up to ``receiving`` and what is known."""
        behind = self._behind[receiving.peer]
        while receiving.posted is None:
            behind[0].post()
            behind.popleft()
        while behind and behind[0].known:
            behind.popleft().post()

    def _launched(self, call: Any, tensors: Sequence[Tensor], peer: int) -> list[Work]:
        try:
            return [call([tensor], peer, 0) for tensor in tensors]
        except RuntimeError as error:
            raise self.meaning(error, peer) from error

    def let_stream_wait(self, works: Sequence[Work], peer: int) -> None:
        """Let the current stream wait for what was launched."""
        if works:
            self.progress.waits(all_over(works), peer)
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self.meaning(error, peer) from error

    def computed(self) -> None:
        """See ``Transport.computed``."""
        self.progress.computed()

    def stay_near(self) -> None:
        """See ``Transport.stay_near``: what a host launched ahead, and its outputs, are in memory."""
        self.progress.stay_near()

    # Collectives

    def group(self, ranks: Sequence[int]) -> Group:
        """See ``Transport.group``. Two groups of the same ranks are two."""
        alone = len(ranks) == 1
        return Group(tuple(ranks), None if alone else self.data_group(ranks, "sums"))

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        """See ``Transport.all_reduce``."""
        if len(group.ranks) == 1:
            return DONE
        return self._collective(lambda handle: handle.allreduce([tensor]), group)

    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        """See ``Transport.broadcast``."""
        if len(group.ranks) == 1:
            return
        plain = tensor.detach()
        whole = plain.contiguous()
        self._collective(lambda handle: handle.broadcast(whole, group.ranks.index(source)), group).wait()
        if whole is not plain and self.rank != source:
            plain.copy_(whole)

    def _collective(self, call: Any, group: Group) -> Launched:
        assert isinstance(group.handle, ProcessGroup), "only members of a group take part in its collectives"
        try:
            return Launched(self, -1, (call(group.handle),))
        except RuntimeError as error:
            raise self.meaning(error, -1) from error


class Both:
    """A message in two parts."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Pending) -> None:
        self.parts = parts

    def done(self) -> bool:
        """See ``Pending.done``."""
        return all(part.done() for part in self.parts)

    def wait(self) -> None:
        """See ``Pending.wait``."""
        for part in self.parts:
            part.wait()
