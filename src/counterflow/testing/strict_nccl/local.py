"""The strict transport between threads: NCCL's data plane on the strict groups, the rest as among threads.

What the engine does over NCCL runs here on the CPU, call by call; only the process groups are others.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.runtime.transport.base import Lost, Status, TimedOut
from counterflow.runtime.transport.local import Hub, LocalTransport
from counterflow.runtime.transport.ordered import OrderedTransport
from counterflow.runtime.transport.pending import Transfer
from counterflow.runtime.transport.progress import Event
from counterflow.runtime.transport.turns import elsewhere, settled_by

from .. import STRICT_NCCL
from . import streams
from .device import Device, refuse_on_device
from .fabric import NcclRuleError
from .group import StrictGroup
from .modes import computing
from .threads import ThreadEndpoint, thread_fabric


class NcclHub(Hub):
    """See ``Hub``; with the fabric that connects the threads' devices."""

    kind = STRICT_NCCL

    def __init__(self, world_size: int, *, timeout_seconds: float = 300.0) -> None:
        super().__init__(world_size, timeout_seconds=timeout_seconds)
        self.fabric = thread_fabric(world_size)

    def transport(self, rank: int, device: torch.device | str = "cpu") -> StrictLocalTransport:
        """See ``Hub``."""
        return StrictLocalTransport(self, rank, torch.device(device))

    def ended(self) -> None:
        """See ``Hub``.

        Raises:
            NcclRuleError: something was launched and never ran.
        """
        if left := self.fabric.unfinished():
            raise NcclRuleError("at the end these had not run: " + "; ".join(left))

    def _wait(self, event: Any, status: Status, rank: int) -> None:
        who = f"word of rank {rank}" if rank >= 0 else "word of all"
        with self.fabric.elsewhere(status.rank, event.is_set, f"waits in {status.doing} for {who}"):
            super()._wait(event, status, rank)


class StrictLocalTransport(OrderedTransport, LocalTransport):
    """One thread's end of a ``NcclHub``."""

    def __init__(self, hub: NcclHub, rank: int, device: torch.device) -> None:
        LocalTransport.__init__(self, hub, rank, device)
        self.matching = OrderedTransport.matching
        self.fabric = hub.fabric
        self.endpoint = _Endpoint(self)
        self.pretended = Device(rank, self.endpoint.wait, lambda: self.status.doing)
        self.endpoint.stream = self.pretended.stream
        self.device = self.pretended.handle
        self._groups_made = 0
        self.make_groups()

    @contextmanager
    def running(self) -> Iterator[None]:
        """See ``LocalTransport``."""
        try:
            with (
                computing(self.pretended.stream, self.pretended),
                settled_by(partial(streams.settle, "has its turn")),
            ):
                yield
                self.progress.synchronize()
        finally:
            self.fabric.leave(self.rank)

    def data_group(self, ranks: Sequence[int], name: str, *, messages: bool = False) -> StrictGroup | None:
        """See ``OrderedTransport``."""
        del messages
        self._groups_made += 1
        if self.rank not in ranks:
            return None
        return StrictGroup(self.endpoint, tuple(ranks), f"{name} (group {self._groups_made})")

    def record_event(self) -> Event:
        """See ``OrderedTransport``."""
        return (streams.current_stream() or self.endpoint.stream).record_event()

    def tell(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """See ``OrderedTransport``."""
        for tensor in tensors:
            refuse_on_device(tensor)
        return LocalTransport.send_described(self, tensors, peer, tag)

    def hear(self, peer: int, tag: int) -> Transfer[list[Tensor]]:
        """See ``OrderedTransport``."""
        return LocalTransport.receive_described(self, peer, tag)  # what is told is on the host

    def gather_objects(self, value: object) -> list[object]:
        """See ``Transport.gather_objects``; what travels is what is in memory now."""
        written = BytesIO()
        _Pickler(written).dump(value)
        told = cast("list[bytes]", super().gather_objects(written.getvalue()))
        return [pickle.loads(one) for one in told]  # noqa: S301 - from a thread of this process

    def meaning(self, error: RuntimeError, peer: int) -> Exception:
        """See ``OrderedTransport``."""
        del peer
        if self.hub.failed is None:
            raise error
        failed, why = self.hub.failed
        return Lost(failed, f"worker of rank {failed} failed: {why}")

    def release(self, groups: Any) -> None:
        """See ``Transport.release``."""
        del groups
        self.progress.synchronize()

    def statuses(self) -> list[Status | None]:
        """See ``Transport.statuses``."""
        return list(self.hub.statuses)

    def fail(self, error: BaseException) -> None:
        """See ``Transport.fail``; as the watch of each worker does, end what its device waits for."""
        LocalTransport.fail(self, error)
        for rank in range(self.world_size):
            self.fabric.abort(rank)


class _Pickler(pickle.Pickler):
    """Writes what is in the host's memory now."""

    def reducer_override(self, value: object) -> Any:
        """Refuse memory of a device, of which another process would have to have some."""
        if isinstance(value, Tensor):
            refuse_on_device(value)
        return NotImplemented


class _Endpoint(ThreadEndpoint):
    """A thread's end, whose waits are seen and have a limit."""

    def __init__(self, transport: StrictLocalTransport) -> None:
        super().__init__(transport.fabric, transport.rank)
        self.transport = transport

    def held(self, woken: threading.Event, peer: int) -> None:
        """See ``ThreadEndpoint``.

        Raises:
            TimedOut: it took longer than the timeout.
        """
        transport = self.transport
        transport.status.waiting_for = peer
        with elsewhere():
            came = woken.wait(transport.timeout_seconds)
        if not came:
            self.fabric.give_up(self.rank)
            raise TimedOut(peer if peer >= 0 else None, transport.timeout_seconds)
        transport.status.waiting_for = None
