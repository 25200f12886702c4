"""The transports over torch.distributed: Gloo for CPU tensors (and CUDA tensors through the host), NCCL.

Invariant: what is sent and received here never meets what a user's own code sends, because all groups are
this transport's own. Gloo matches messages by tag, NCCL by order; whatever needs a header, values or
objects goes over a Gloo group also beside NCCL, so that it never changes the order of NCCL's messages.
It does not choose a device and does not start the process group; ``world.py`` does.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# The store has no public name; torch's own checkpoint and elastic code reach it the same way.
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..watch import Watch
from .base import Crossing, Group, Lost, Pending, Status, TimedOut, Transport, TransportKind
from .staging import CopyOut, Courier, Parcel, Sweeper, cuda_copy_out

_T = TypeVar("_T")

_LANES = 4
_PAYLOAD, _HEADER, _DESCRIBED, _MORE_HEADER = range(_LANES)
"""A message's tag is multiplied by the lanes: its parts never match another part's receive.

The tensors of one message share a tag; Gloo matches equal tags in the order in which they were posted.
"""

_MAX_TAG = 2**31 // _LANES - 2
_BREAK_TAG = 2**31 - 1
"""A tag nothing is ever sent under."""

_GATHER_TAG = _BREAK_TAG - 1

_FEW_WORKERS = 16
"""So many tell each other directly what they gather."""

_ROW_WORDS = 32
"""They do it in rows of so many float64, a longer one in several: all messages of a tag are alike."""

_GATHERS_AHEAD = 4
"""Rows of so many gathers are asked for before they are needed: two a step, and what its caller gathers."""

_HEADER_WORDS = 64
"""A header is this many int64; a longer description has the rest in a second message."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""A dtype's place here is its number in a header."""

_NATIVE = frozenset(_DTYPES[:6]) | {torch.int8, torch.uint8, torch.bool}
"""What every backend sends as it is; the others are sent as bytes."""

_CLOSE_SECONDS = 1.0
"""How long a transport that closes waits for what is still under way."""

_BROKEN = ("gloo", "pair closure")
"""Gloo's errors about connections have one of these in them; they have no class of their own."""

_ROOT_CAUSE_SECONDS = 1.0
"""How long a worker whose connection broke waits to hear why."""

_numbers = itertools.count()
"""Each transport of a process has its own part of the store; all workers make theirs in one order."""


class _Done:
    __slots__ = ()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


_DONE = _Done()


class _Works:
    """Works of torch.distributed under way; Gloo tells of a receive only when it is waited for."""

    __slots__ = ("peer", "transport", "works")

    def __init__(self, transport: DistributedTransport, peer: int, works: Sequence[Work]) -> None:
        self.transport, self.peer, self.works = transport, peer, works

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        self.transport.wait(self.works, self.peer)
        self.works = ()


class _Sending:
    """A message over Gloo, looked after by the sweeper."""

    __slots__ = ("parcel", "transport")

    def __init__(self, transport: DistributedTransport, parcel: Parcel) -> None:
        self.transport, self.parcel = transport, parcel

    def done(self) -> bool:
        return self.parcel.over and self.parcel.error is None

    def wait(self) -> None:
        if not self.done():
            self.transport.wait_sent(self.parcel)


class _Receiving(_Works):
    """Posted receives; ``moves`` are the buffers that could not be received into directly."""

    __slots__ = ("moves",)

    def __init__(
        self,
        transport: DistributedTransport,
        peer: int,
        works: Sequence[Work],
        moves: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(transport, peer, works)
        self.moves = moves

    def wait(self) -> None:
        super().wait()
        if self.moves:
            with torch.no_grad():
                for buffer, arrived in self.moves:
                    buffer.copy_(arrived, non_blocking=True)
            self.moves = ()


class _DescribedReceiving:
    """A posted receive of a header; the tensors' receives are posted when it is there."""

    __slots__ = ("header", "peer", "tag", "tensors", "transport", "works")

    def __init__(
        self, transport: DistributedTransport, peer: int, tag: int, header: Tensor, works: Sequence[Work]
    ) -> None:
        self.transport, self.peer, self.tag, self.header, self.works = transport, peer, tag, header, works
        self.tensors: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self.tensors is None:
            self.transport.wait(self.works, self.peer)
            self.tensors = self.transport.receive_after(self.header, self.peer, self.tag)
        return self.tensors


class _Rows(NamedTuple):
    """Rows of a gather under way or to come: their place, and by peer (-1: all together) what brings them."""

    rows: Tensor
    arriving: Mapping[int, Sequence[Work]]


class _Gathering:
    """A gather under way: its columns in one or several parts, and how many there are."""

    __slots__ = ("parts", "transport", "width")

    def __init__(self, transport: DistributedTransport, parts: Sequence[_Rows], width: int) -> None:
        self.transport, self.parts, self.width = transport, parts, width

    def wait(self) -> list[list[float]]:
        for part in self.parts:
            for peer, works in part.arriving.items():
                self.transport.wait(works, peer)
        whole = self.parts[0].rows if len(self.parts) == 1 else torch.cat([p.rows for p in self.parts], 1)
        gathered: list[list[float]] = whole[:, : self.width].tolist()
        return gathered


class DistributedTransport(Transport):
    """One process's transport over Gloo or NCCL. All ranks make one at the same time.

    Args:
        kind: ``GLOO`` or ``NCCL``.
        device: where this worker computes.
        timeout_seconds: how long anything is waited for.
        copy_out: how tensors are copied to the host if they are staged; None: as the device needs it.
    """

    def __init__(
        self,
        kind: TransportKind,
        device: torch.device,
        timeout_seconds: float,
        *,
        copy_out: CopyOut | None = None,
    ) -> None:
        self.kind = kind
        self.keeps_order = kind is TransportKind.NCCL
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.status = Status(self.rank)
        self.closed = False
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: list[ProcessGroup] = []
        self._watch = Watch(
            PrefixStore(f"counterflow/{next(_numbers)}", _get_default_store()),
            self.status,
            self.world_size,
            timeout_seconds=timeout_seconds,
            break_waits=self._break_waits,
        )
        try:
            self._control = self._messages = self._group_of_all("gloo")
            if kind is TransportKind.NCCL:
                self._messages = self._group_of_all("nccl")
        except BaseException:
            self._watch.stop()
            raise
        self._watch.all_are_here()
        self._control_lane = _lane(self._control)
        self._lane = self._messages if kind is TransportKind.NCCL else self._control_lane
        self._pinned = device.type == "cuda"
        if copy_out is None and self._pinned:
            copy_out = cuda_copy_out(device)
        self._expected: deque[_Rows] = deque()
        """The gathers to come whose receives are posted; their messages come in this order."""
        self._sweeper = Sweeper()
        self._courier = Courier(self._post_host, copy_out, self._sweeper) if copy_out else None
        self._staged = self._courier is not None and kind is TransportKind.GLOO

    def connect(self, peers: Iterable[int]) -> None:
        """Make the connections to ``peers`` before messages do. Each of them makes this call as well.

        NCCL connects two ranks at their first message, and neither goes on before both are there; with
        receives posted early, workers in a ring would wait for each other. Here all take one order.
        """
        if self.kind is not TransportKind.NCCL:
            return  # Gloo's groups connect when they are made
        token = torch.zeros(1, device=self.device)
        for low, high in sorted((min(self.rank, peer), max(self.rank, peer)) for peer in set(peers)):
            if self.rank == low:
                self.send((token,), high, 0).wait()
            else:
                self.receive((token,), low, 0).wait()

    # Messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Works | _Sending:
        """See ``Transport.send``."""
        tag = _tag(tag, _PAYLOAD)
        if self._staged:
            return self._carry(tensors, peer, tag)
        works = self._post(self._lane, tensors, peer, tag)
        return self._sent(peer, works) if self.kind is TransportKind.GLOO else _Works(self, peer, works)

    def exchange(self, sent: Crossing, received: Crossing, peer: int) -> tuple[Pending, Pending]:
        """See ``Transport.exchange``: NCCL, which keeps order, does both in one launch."""
        if self.kind is not TransportKind.NCCL:
            return super().exchange(sent, received, peer)
        both = [(dist.isend, sent), (dist.irecv, received)]
        ops = [
            dist.P2POp(call, _plain(tensor), peer, self._messages)
            for call, message in both
            for tensor in message.tensors
            if tensor.numel()
        ]
        if not ops:
            return _DONE, _DONE
        try:
            works = _Works(self, peer, dist.batch_isend_irecv(ops))
        except RuntimeError as error:
            raise self.trouble(error, peer, 0.0) from error
        return works, works

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> _Receiving:
        """See ``Transport.receive``."""
        targets = buffers
        moves: Sequence[tuple[Tensor, Tensor]] = ()
        if self._staged or not all(buffer.is_contiguous() for buffer in buffers):
            device = "cpu" if self._staged else self.device
            targets = [
                torch.empty(
                    buffer.shape, dtype=buffer.dtype, device=device, pin_memory=self._staged and self._pinned
                )
                for buffer in buffers
            ]
            moves = tuple(zip(buffers, targets, strict=True))
        return _Receiving(self, peer, self._accept(self._lane, targets, peer, _tag(tag, _PAYLOAD)), moves)

    def send_described(
        self, tensors: Sequence[Tensor], peer: int, tag: int, *, aside: bool = False
    ) -> _Sending:
        """See ``Transport.send_described``; it has lanes of its own and keeps no order anyway."""
        del aside
        described = _describe(tensors)
        preface = [(described[:_HEADER_WORDS], _tag(tag, _HEADER))]
        if len(described) > _HEADER_WORDS:
            preface.append((described[_HEADER_WORDS:], _tag(tag, _MORE_HEADER)))
        if self._courier is not None:
            return self._carry(tensors, peer, _tag(tag, _DESCRIBED), preface)
        works: list[Work] = []
        for part, own in preface:
            works += self._post(self._control_lane, (part,), peer, own)
        works += self._post(self._control_lane, tensors, peer, _tag(tag, _DESCRIBED))
        return self._sent(peer, works)

    def receive_described(self, peer: int, tag: int, *, aside: bool = False) -> _DescribedReceiving:
        """See ``Transport.receive_described``."""
        del aside
        header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
        works = self._accept(self._control_lane, (header,), peer, _tag(tag, _HEADER))
        return _DescribedReceiving(self, peer, tag, header, works)

    def receive_after(self, header: Tensor, peer: int, tag: int) -> list[Tensor]:
        """Receive the tensors that a header announces."""
        words = int(header[0])
        if words > _HEADER_WORDS:
            more = torch.empty(words - _HEADER_WORDS, dtype=torch.int64)
            self.wait(self._accept(self._control_lane, (more,), peer, _tag(tag, _MORE_HEADER)), peer)
            header = torch.cat((header, more))
        hosts, needing = _announced(header.tolist(), pinned=self._pinned)
        self.wait(self._accept(self._control_lane, hosts, peer, _tag(tag, _DESCRIBED)), peer)
        return [
            host.to(self.device, non_blocking=True).requires_grad_(need)
            for host, need in zip(hosts, needing, strict=True)
        ]

    def _post(self, lane: Any, tensors: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        plain = _bytes if lane is self._control_lane else _plain
        try:
            return [lane.send([plain(tensor)], peer, tag) for tensor in tensors if tensor.numel()]
        except RuntimeError as error:
            raise self.trouble(error, peer, 0.0) from error

    def _accept(self, lane: Any, buffers: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        plain = _bytes if lane is self._control_lane else _plain
        try:
            return [lane.recv([plain(buffer)], peer, tag) for buffer in buffers if buffer.numel()]
        except RuntimeError as error:
            raise self.trouble(error, peer, 0.0) from error

    def _carry(
        self,
        tensors: Sequence[Tensor],
        peer: int,
        tag: int,
        preface: Sequence[tuple[Tensor, int]] = (),
    ) -> _Sending:
        assert self._courier is not None
        filled = [tensor for tensor in tensors if tensor.numel()]
        return _Sending(self, self._courier.send(filled, peer, tag, preface))

    def _sent(self, peer: int, works: Sequence[Work]) -> _Sending:
        parcel = Parcel(peer, works)
        self._sweeper.take(parcel)
        return _Sending(self, parcel)

    def _post_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work: Work = self._control_lane.send([_bytes(tensor)], peer, tag)
        return work

    # Collectives

    def group(self, ranks: Sequence[int]) -> Group:
        """See ``Transport.group``. Two groups of the same ranks are two: their collectives may cross."""
        alone = len(ranks) == 1
        return Group(tuple(ranks), None if alone else self._new_group(ranks, self.kind.value))

    def all_reduce(self, tensor: Tensor, group: Group) -> _Works | _Done:
        """See ``Transport.all_reduce``. Gloo and NCCL sum each element in one place, then spread it."""
        if len(group.ranks) == 1:
            return _DONE
        work = self._collective(lambda: dist.all_reduce(tensor, group=_handle(group), async_op=True))
        assert work is not None
        return _Works(self, -1, (work,))

    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        """See ``Transport.broadcast``."""
        if len(group.ranks) == 1:
            return
        plain = tensor.detach()
        whole = plain.contiguous()
        self._collective(lambda: dist.broadcast(whole, source, group=_handle(group)))
        if whole is not plain and self.rank != source:
            plain.copy_(whole)

    def start_gather(self, values: Sequence[float]) -> _Gathering:
        """See ``Transport.start_gather``.

        Few workers tell each other directly: the last one to come has all the rows at once, and the others
        have its row after one message, where Gloo's ring takes one after another.
        """
        width = len(values)
        if self.world_size > _FEW_WORKERS:
            mine = torch.tensor(values or [0.0], dtype=torch.float64)
            rows = torch.empty(self.world_size, len(mine), dtype=torch.float64)
            work = self._collective(
                lambda: dist.all_gather(list(rows.unbind()), mine, group=self._control, async_op=True)
            )
            assert work is not None
            return _Gathering(self, (_Rows(rows, {-1: (work,)}),), width)
        parts = []
        for at in range(0, max(width, 1), _ROW_WORDS):
            piece = values[at : at + _ROW_WORDS]
            mine = torch.tensor([*piece, *[0.0] * (_ROW_WORDS - len(piece))], dtype=torch.float64)
            part = self._expected.popleft() if self._expected else self._expect()
            part.rows[self.rank] = mine
            works: list[Work] = []
            for peer in part.arriving:
                works += self._post(self._control_lane, (mine,), peer, _GATHER_TAG)
            self._sent(-1, works)
            parts.append(part)
        return _Gathering(self, parts, width)

    def get_ready(self) -> None:
        """See ``Transport.get_ready``: a row that is asked for only when it is needed comes a way later."""
        if self.world_size <= _FEW_WORKERS:
            while len(self._expected) < _GATHERS_AHEAD:
                self._expected.append(self._expect())

    def _expect(self) -> _Rows:
        """Post the receives of a gather's rows."""
        rows = torch.empty(self.world_size, _ROW_WORDS, dtype=torch.float64)
        peers = (rank for rank in range(self.world_size) if rank != self.rank)
        return _Rows(
            rows, {peer: self._accept(self._control_lane, (rows[peer],), peer, _GATHER_TAG) for peer in peers}
        )

    def gather_objects(self, value: object) -> list[object]:
        """See ``Transport.gather_objects``."""
        gathered: list[object] = [None] * self.world_size
        self._collective(lambda: dist.all_gather_object(gathered, value, group=self._control))
        return gathered

    def _collective(self, call: Callable[[], _T]) -> _T:
        began = time.monotonic()
        self.status.waiting_for = -1
        try:
            result = call()
        except RuntimeError as error:
            raise self.trouble(error, -1, time.monotonic() - began) from error
        self.status.waiting_for = None
        return result

    def _group_of_all(self, backend: str) -> ProcessGroup:
        made = self._new_group(range(self.world_size), backend)
        assert made is not None
        return made

    def _new_group(self, ranks: Sequence[int], backend: str) -> ProcessGroup | None:
        """A process group; None if this rank is not in it."""
        world = dist.group.WORLD
        assert world is not None
        bound = world.bound_device_id
        try:
            # A group bound to a device has one NCCL stream for all its messages, where a receive posted early
            # holds up sends to other peers; one that is not has a stream for each pair.
            world.bound_device_id = None
            made = self._collective(
                lambda: dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
            )
        finally:
            world.bound_device_id = bound
        if self.rank not in ranks:
            return None
        assert isinstance(made, ProcessGroup)
        self._groups.append(made)
        return made

    # Waiting and failing

    def wait(self, works: Sequence[Work], peer: int) -> None:
        """Wait for work with a peer, -1 for a collective's.

        Raises:
            Lost: the peer is gone, or another worker failed.
            TimedOut: it took longer than the timeout.
        """
        began = time.monotonic()
        self.status.waiting_for = peer
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.trouble(error, peer, time.monotonic() - began) from error
        self.status.waiting_for = None

    def wait_sent(self, parcel: Parcel) -> None:
        """Wait until a message is sent; raises as ``wait`` does."""
        began = time.monotonic()
        self.status.waiting_for = parcel.peer
        if parcel.lock.acquire(timeout=self.timeout_seconds):
            parcel.finish(self._timeout)
            parcel.lock.release()
        else:
            parcel.error = RuntimeError("gloo: a message was not sent in time")
        if parcel.error is not None:
            raise self.trouble(parcel.error, parcel.peer, time.monotonic() - began) from parcel.error
        self.status.waiting_for = None

    def trouble(self, error: RuntimeError, peer: int, waited_seconds: float) -> Exception:
        """What an error of torch.distributed means: a worker failed, was too slow, or is gone.

        Raises:
            RuntimeError: the error itself, if it is not about a connection.
        """
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _BROKEN):
            raise error
        late = waited_seconds >= 0.95 * self.timeout_seconds
        # A worker that fails says so before its connections close; the news may still be under way.
        failure = self._watch.failure(0.0 if late else _ROOT_CAUSE_SECONDS)
        self._watch.told = True
        if failure is not None:
            return Lost(failure.rank, f"worker of rank {failure.rank} failed: {failure.why}")
        if late:
            return TimedOut(peer if peer >= 0 else None, self.timeout_seconds)
        if peer >= 0:
            return Lost(peer, f"the connection to rank {peer} broke")
        return Lost(None, "a connection broke during a collective")

    def _break_waits(self) -> None:
        """End all waits on Gloo, from another thread.

        Gloo closes all connections of a group as soon as one of its waits is too long, and everything
        that waits on them fails; so a wait that cannot be over in a millisecond is begun on each.
        """
        for group in tuple(self._groups):
            with contextlib.suppress(RuntimeError, ValueError):  # broken already, or just closed
                if dist.get_backend(group) == "gloo":
                    peer = (group.rank() + 1) % group.size()
                    group.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))

    @property
    def failed(self) -> bool:
        """Whether this worker has met an error of the transport, or reported one of its own."""
        return self._watch.told

    def statuses(self) -> list[Status | None]:
        """See ``Transport.statuses``; the other ranks' are as old as their last post."""
        return self._watch.statuses()

    def fail(self, error: BaseException) -> None:
        """See ``Transport.fail``; only the first failure counts."""
        self._watch.post_failure(error)

    def leave(self, *, hosts_store: bool) -> None:
        """Close at the end of the process; who hosts the store stays until the others are there too."""
        if not self.closed and not self.failed:
            self._watch.leave(hosts=hosts_store)
        self.close()

    def close(self) -> None:
        """See ``Transport.close``. After a failure the groups stay: what they wait for may never come."""
        if self.closed:
            return
        self.closed = True
        self._watch.stop()
        if self.failed:
            self._break_waits()
        ended = self._courier is None or self._courier.close(_CLOSE_SECONDS)
        if not (self._sweeper.close(_CLOSE_SECONDS) and ended):  # something was never received
            self._break_waits()
            self._sweeper.close(_CLOSE_SECONDS)
        if not self.failed:
            for group in self._groups:
                with contextlib.suppress(RuntimeError, ValueError):  # its world may have been ended before
                    dist.destroy_process_group(group)
        self._groups.clear()


def _tag(tag: int, lane: int) -> int:
    assert 0 <= tag <= _MAX_TAG, tag
    return tag * _LANES + lane


def _handle(group: Group) -> ProcessGroup:
    assert isinstance(group.handle, ProcessGroup), "only members of a group take part in its collectives"
    return group.handle


def _lane(group: ProcessGroup) -> Any:
    """What sends for a group over Gloo, without the walk through torch's dispatcher that the group adds.

    The walk takes a third of what it costs to post a message.
    """
    return group._get_backend(torch.device("cpu"))  # noqa: SLF001


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor as a lane takes it, which looks at its memory only: contiguous, of a type it knows."""
    as_it_is = tensor.dtype in _NATIVE and tensor.is_contiguous() and not tensor.is_neg()
    return tensor if as_it_is else _plain(tensor.resolve_neg())


def _plain(tensor: Tensor) -> Tensor:
    """A tensor as the backends take it: contiguous, no gradient, of a type they know."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.dtype in _NATIVE else tensor.resolve_conj().reshape(-1).view(torch.uint8)


def _describe(tensors: Sequence[Tensor]) -> Tensor:
    """The header: its length, how many tensors; of each the dtype, whether it needs a gradient, the shape."""
    words = [0, len(tensors)]
    for tensor in tensors:
        words += [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    words[0] = len(words)
    words += [0] * (_HEADER_WORDS - len(words))
    return torch.tensor(words, dtype=torch.int64)


def _announced(words: list[int], *, pinned: bool) -> tuple[list[Tensor], list[bool]]:
    """Empty host tensors as a header announces them, and which need a gradient."""
    tensors, needing = [], []
    place = 2
    for _ in range(words[1]):
        dtype, need, dimensions = words[place : place + 3]
        place += 3 + dimensions
        shape = words[place - dimensions : place]
        tensors.append(torch.empty(shape, dtype=_DTYPES[dtype], pin_memory=pinned))
        needing.append(bool(need))
    return tensors, needing
