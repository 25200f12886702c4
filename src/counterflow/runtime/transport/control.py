"""The control plane of workers that are processes, whatever their data plane is.

It makes the groups, waits, explains errors of torch.distributed, gathers, and closes. It also sends what
needs a header, values or objects, always over a Gloo group, so it never changes the order of NCCL's messages.
``gloo.py`` and ``nccl.py`` send tensors of known shapes.

Invariant: what is sent and received here never meets what a user's own code sends, because all groups are
this transport's own. It does not choose a device and does not start the process group; ``world.py`` does.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from counterflow.common.tensors.torch_private import default_store, gloo_lane, unnoted
from counterflow.errors import CounterflowError

from .base import Control, PeerLost, Status, TimedOut
from .gathers import Gathers
from .headers import (
    BREAK_TAG,
    DESCRIBED,
    HEADER,
    HEADER_WORDS,
    MORE_HEADER,
    announced,
    as_bytes,
    describe,
    lane_tag,
)
from .pending import Transfer
from .staging import CopyOut, PendingSend, SendReaper, Stager, cuda_copy_out
from .thread_policy import batch_policy
from .worker_watch import Watch

_T = TypeVar("_T")

_CLOSE_SECONDS = 1.0
"""How long a transport that closes waits for what is still in flight."""

_BROKEN = ("gloo", "pair closure")
"""Gloo's errors about connections have one of these in them; they have no class of their own."""

_ROOT_CAUSE_SECONDS = 1.0
"""How long a worker whose connection broke waits for the reason."""

_numbers = itertools.count()
"""Each transport of a process has its own part of the store; all workers make theirs in one order."""


class DevicePlane(Protocol):
    """A data plane whose device may be behind its host."""

    def device_status(self) -> Status:
        """Return the status of the device."""

    def look_at_device(self) -> CounterflowError | None:
        """Return the error of a device that waits too long; called in the watch's thread."""

    def abort(self) -> None:
        """End the device's waits; called from another thread."""


class Works(Transfer[None]):
    """Works of torch.distributed with a peer.

    Args:
        control: waits for them, and explains errors.
        works: the works.
        peer: rank of the other side; -1: a collective.
    """

    __slots__ = ("_control", "_peer", "_works")

    def __init__(self, control: ProcessControl, works: Sequence[Work], peer: int) -> None:
        self._control, self._peer = control, peer
        self._works: Sequence[Work] | None = works

    @override
    def done(self) -> bool:
        """Gloo reports that a receive is completed only when it is waited for."""
        return self._works is None or all(work.is_completed() for work in self._works)

    @override
    def wait(self) -> None:
        if self._works is not None:
            self._control.wait(self._works, self._peer)
            self._works = None  # what they refer to may go

    @override
    def then(self, call: Callable[[None], _T]) -> Transfer[_T]:
        return Transfer(lambda: call(self.wait()), self.done)


class ProcessControl(Control):
    """One process's control plane over Gloo. All ranks make one at the same time.

    Args:
        device: device of this worker's computation.
        timeout_seconds: maximum time of any wait.
        copy_out: begins copies of staged tensors to the host; None: chosen by the device.
    """

    plane: DevicePlane | None = None
    """The data plane, if its device may be behind its host."""
    late: TimedOut | None = None
    """Error of a device that waited too long, once the watch has seen it."""

    def __init__(
        self, device: torch.device, timeout_seconds: float, *, copy_out: CopyOut | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.status = Status(self.rank)
        self.closed = False
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: list[ProcessGroup] = []
        self._watch = Watch(
            PrefixStore(f"counterflow/{next(_numbers)}", default_store()),
            self.status,
            self.world_size,
            timeout_seconds=timeout_seconds,
            break_waits=self._break_waits,
            look=lambda: None if self.plane is None else self.plane.look_at_device(),
            device_status=lambda: self.status if self.plane is None else self.plane.device_status(),
        )
        try:
            group = self.new_group(range(self.world_size), "gloo")
        except BaseException:
            self.stop_watch()
            raise
        assert group is not None
        self._group = group
        self._watch.start_clock()
        lane = gloo_lane(group)
        self._send, self._recv = lane.send, lane.recv
        self.pinned = device.type == "cuda"
        if copy_out is None and self.pinned:
            copy_out = cuda_copy_out(device)
        self._gathers = Gathers(self)
        self._reaper = SendReaper()
        self.stager = Stager(self._post_host, self._wait_sent, copy_out, self._reaper) if copy_out else None

    def stop_watch(self) -> None:
        """End the watch alone: of a transport that could not be made."""
        self._watch.stop()

    # Messages over the host

    @override
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> PendingSend:
        """A header precedes the tensors, under other tags."""
        described = describe(tensors)
        preface = [(described[:HEADER_WORDS], lane_tag(tag, HEADER))]
        if len(described) > HEADER_WORDS:
            preface.append((described[HEADER_WORDS:], lane_tag(tag, MORE_HEADER)))
        if self.stager is not None:
            return self.carry(tensors, peer, lane_tag(tag, DESCRIBED), preface)
        works: list[Work] = []
        for part, part_tag in preface:
            works += self.post((part,), peer, part_tag)
        works += self.post(tensors, peer, lane_tag(tag, DESCRIBED))
        return self.sent(peer, works)

    @override
    def receive_described(self, peer: int, tag: int) -> Transfer[list[Tensor]]:
        header = torch.empty(HEADER_WORDS, dtype=torch.int64, device="cpu")
        works = self.accept((header,), peer, lane_tag(tag, HEADER))
        return self.in_flight(works, peer).then(lambda _: self._receive_after(header, peer, tag))

    def _receive_after(self, header: Tensor, peer: int, tag: int) -> list[Tensor]:
        words = int(header[0])
        if words > HEADER_WORDS:
            more = torch.empty(words - HEADER_WORDS, dtype=torch.int64, device="cpu")
            self.wait(self.accept((more,), peer, lane_tag(tag, MORE_HEADER)), peer)
            header = torch.cat((header, more))
        hosts, needing, stay = announced(header.tolist(), pinned=self.pinned)
        self.wait(self.accept(hosts, peer, lane_tag(tag, DESCRIBED)), peer)
        return [
            (host if stays else host.to(self.device, non_blocking=True)).requires_grad_(need)
            for host, need, stays in zip(hosts, needing, stay, strict=True)
        ]

    def post(self, tensors: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        """Begin to send host tensors over Gloo."""
        return self.post_all(self._send, tensors, peer, tag)

    def accept(self, buffers: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        """Begin to receive host tensors over Gloo."""
        return self.post_all(self._recv, buffers, peer, tag)

    def post_all(
        self, call: Callable[..., Any], tensors: Sequence[Tensor], peer: int, tag: int
    ) -> list[Work]:
        """Call a lane's ``send`` or ``recv`` for each tensor that is not empty."""
        works = []
        try:
            with unnoted():
                for tensor in tensors:
                    if tensor.numel():
                        works.append(call([as_bytes(tensor)], peer, tag))  # noqa: PERF401 - a call less
        except RuntimeError as error:
            raise self.translate_error(error, peer, 0.0) from error
        return works

    def carry(
        self,
        tensors: Sequence[Tensor],
        peer: int,
        tag: int,
        preface: Sequence[tuple[Tensor, int]] = (),
    ) -> PendingSend:
        """Begin to send device tensors through the host, after a preface of host tensors."""
        assert self.stager is not None
        filled = [tensor for tensor in tensors if tensor.numel()]
        return self.stager.send(filled, peer, tag, preface)

    def sent(self, peer: int, works: Sequence[Work]) -> PendingSend:
        """Pass a posted message to the reaper, which waits until it is sent."""
        send = PendingSend(peer, self._wait_sent, works)
        self._reaper.put(send)
        return send

    def in_flight(self, works: Sequence[Work], peer: int) -> Transfer[None]:
        """Combine works of torch.distributed with a peer (-1: a collective)."""
        return Works(self, works, peer)

    def _post_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        with unnoted():
            work: Work = self._send([as_bytes(tensor)], peer, tag)
        return work

    # Collectives

    @override
    def start_gather(self, values: Sequence[float]) -> Transfer[list[list[float]]]:
        return self._gathers.start(values)

    @override
    def get_ready(self) -> None:
        self._gathers.expect()

    @override
    def gather_objects(self, value: object) -> list[object]:
        gathered: list[object] = [None] * self.world_size
        self.collective(lambda: dist.all_gather_object(gathered, value, group=self._group))
        return gathered

    @override
    def spread(self, tensor: Tensor, source: int) -> None:
        """Over the control plane, whatever the data plane is."""
        self.collective(lambda: dist.broadcast(tensor, source, group=self._group))

    def collective(self, call: Callable[[], _T]) -> _T:
        """Result of a collective call of torch.distributed; raises as ``wait`` does."""
        began = time.monotonic()
        self.status.waiting_for = -1
        try:
            with unnoted():
                result = call()
        except RuntimeError as error:
            raise self.translate_error(error, -1, time.monotonic() - began) from error
        self.status.waiting_for = None
        return result

    def new_group(
        self, ranks: Sequence[int], backend: str, timeout: timedelta | None = None, options: object = None
    ) -> ProcessGroup | None:
        """A process group owned by this transport, with its backend's options; None on ranks outside of it.

        ``timeout``: None: the transport's.
        """
        world = dist.group.WORLD
        assert world is not None
        bound = world.bound_device_id
        try:
            # A group bound to a device has one NCCL stream for all its messages, where a receive posted early
            # holds up sends to other peers; one that is not has a stream for each pair.
            world.bound_device_id = None
            with batch_policy() if backend == "gloo" else contextlib.nullcontext():
                group = self.collective(
                    lambda: dist.new_group(
                        list(ranks), timeout=timeout or self._timeout, backend=backend, pg_options=options
                    )
                )
        finally:
            world.bound_device_id = bound
        if self.rank not in ranks:
            return None
        assert isinstance(group, ProcessGroup)
        self._groups.append(group)
        return group

    def end_group(self, group: ProcessGroup) -> None:
        """End a group that ``new_group`` made; all its ranks call it."""
        self._groups.remove(group)
        dist.destroy_process_group(group)

    # Waiting and failing

    def wait(self, works: Sequence[Work], peer: int) -> None:
        """Wait for works with a peer (-1: a collective).

        Raises:
            PeerLost: the peer is gone, or another worker failed.
            TimedOut: it took longer than the timeout.
        """
        began = time.monotonic()
        self.status.waiting_for = peer
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.translate_error(error, peer, time.monotonic() - began) from error
        self.status.waiting_for = None

    def _wait_sent(self, send: PendingSend) -> None:
        began = time.monotonic()
        self.status.waiting_for = send.peer
        if send.lock.acquire(timeout=self.timeout_seconds):
            send.finish(self._timeout)
            send.lock.release()
        else:
            send.error = RuntimeError("gloo: a message was not sent in time")
        if send.error is not None:
            raise self.translate_error(send.error, send.peer, time.monotonic() - began) from send.error
        self.status.waiting_for = None

    @override
    def translate_error(self, error: RuntimeError, peer: int, waited_seconds: float = 0.0) -> Exception:
        """A failure that the watch has seen takes precedence."""
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _BROKEN):
            raise error
        late = waited_seconds >= 0.95 * self.timeout_seconds
        # A worker that fails says so before its connections close; the news may still be in flight.
        failure = self._watch.failure(0.0 if late else _ROOT_CAUSE_SECONDS)
        self._watch.error_raised = True
        if (known := self.late or self._watch.returned) is not None:
            return known
        if failure is not None:
            return PeerLost(failure.rank, f"worker of rank {failure.rank} failed: {failure.why}")
        if self._watch.device_error is not None:
            return PeerLost(self.rank, str(self._watch.device_error))
        if late:
            return TimedOut(peer if peer >= 0 else None, self.timeout_seconds)
        if peer >= 0:
            return PeerLost(peer, f"the connection to rank {peer} broke")
        return PeerLost(None, "a connection broke during a collective")

    def _break_waits(self) -> None:
        """End the device's waits and then those on Gloo; called from another thread."""
        if self.plane is not None:
            self.plane.abort()
        for group in tuple(self._groups):
            with contextlib.suppress(RuntimeError, ValueError):  # just closed
                if dist.get_backend(group) == "gloo":
                    break_connections(group)

    @property
    def failed(self) -> bool:
        """True if this worker has met an error of the transport, or reported an error."""
        return self._watch.error_raised

    @property
    @override
    def fails_first(self) -> bool:
        return self._watch.is_first

    @override
    def statuses(self) -> list[Status | None]:
        """The other ranks' are as old as their last post."""
        return self._watch.statuses()

    @override
    def has_returned(self) -> None:
        self._watch.post_return()

    @override
    def fail(self, error: BaseException) -> None:
        """Only the first failure counts."""
        self._watch.post_failure(error)

    def leave(self, *, hosts_store: bool) -> None:
        """Note the end of the process; the rank that hosts the store waits for the end of all."""
        if not self.closed and not self.failed:
            self._watch.leave(hosts=hosts_store)

    @override
    def close(self) -> None:
        """After a failure the groups are not destroyed, which might wait for a lost worker."""
        if self.closed:
            return
        self.closed = True
        self._watch.stop()
        if self.failed:
            self._break_waits()
        ended = self.stager is None or self.stager.close(_CLOSE_SECONDS)
        ended = self._gathers.close(_CLOSE_SECONDS) and ended
        if not (self._reaper.close(_CLOSE_SECONDS) and ended):  # something was never received
            self._break_waits()
            self._gathers.close(_CLOSE_SECONDS)
            self._reaper.close(_CLOSE_SECONDS)
        if not self.failed:
            for group in self._groups:
                with contextlib.suppress(RuntimeError, ValueError):  # its world may have been ended before
                    dist.destroy_process_group(group)
        self._groups.clear()


def break_connections(group: ProcessGroup) -> None:
    """Close all of this rank's connections of a Gloo group, so that whatever waits on one fails.

    Gloo closes them all as soon as one of its waits is too long; so a wait that cannot be over in a
    millisecond is begun. From a rank that has ended it fails at once and closes nothing: each is tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
