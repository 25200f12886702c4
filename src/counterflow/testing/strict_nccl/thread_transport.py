"""The strict transport between threads: NCCL's data plane on the strict groups, the rest as among threads.

The runtime's NCCL path runs here on the CPU, call by call; only the process groups differ.
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
from typing_extensions import override

from counterflow.runtime.transport.base import Status, TimedOut
from counterflow.runtime.transport.spi import (
    Event,
    Hub,
    OrderedTransport,
    ThreadControl,
    Transfer,
    Waited,
    rng_released,
    stream_synchronized_by,
)

from .. import STRICT_NCCL
from . import streams
from .device import Device, refuse_on_device
from .fabric import NcclRuleError
from .group import StrictGroup
from .operator_modes import computing
from .thread_ranks import ThreadEndpoint, thread_fabric


class NcclHub(Hub):
    """A ``Hub`` with the fabric that connects the threads' devices."""

    kind = STRICT_NCCL

    def __init__(self, world_size: int, *, timeout_seconds: float = 300.0) -> None:
        super().__init__(world_size, timeout_seconds=timeout_seconds)
        self.fabric = thread_fabric(world_size)

    @override
    def transport(self, rank: int, device: torch.device | str = "cpu") -> StrictLocalTransport:
        del device  # each has a pretended device
        return StrictLocalTransport(self, rank)

    def ended(self) -> None:
        """Check that everything ran, see ``Hub``.

        Raises:
            NcclRuleError: a launch never ran.
        """
        if unfinished := self.fabric.unfinished():
            raise NcclRuleError("at the end these had not run: " + "; ".join(unfinished))

    def _wait(self, event: Any, status: Status, waited: Waited) -> None:
        who = f"word of rank {waited.rank}" if waited.rank >= 0 else "word of all"
        with self.fabric.host_wait(status.rank, event.is_set, f"waits in {status.doing} for {who}"):
            super()._wait(event, status, waited)


class StrictControl(ThreadControl):
    """One thread's end of a ``NcclHub``, which accepts no memory of a device.

    Attributes:
        pretended: the device on which the thread computes.
        endpoint: the device's end of the fabric.
    """

    def __init__(self, hub: NcclHub, rank: int) -> None:
        super().__init__(hub, rank, torch.device("cpu"))
        self.fabric = hub.fabric
        self.endpoint = _Endpoint(self)
        self.pretended = Device(rank, self.endpoint.wait, lambda: self.status.doing)
        self.endpoint.stream = self.pretended.stream

    @override
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        for tensor in tensors:
            refuse_on_device(tensor)
        return super().send_described(tensors, peer, tag)

    def gather_objects(self, value: object) -> list[object]:
        """Gather values as they are in memory now, see ``Control.gather_objects``."""
        written = BytesIO()
        _Pickler(written).dump(value)
        rows = cast("list[bytes]", super().gather_objects(written.getvalue()))
        return [pickle.loads(row) for row in rows]  # noqa: S301 - from a thread of this process

    def fail(self, error: BaseException) -> None:
        """Fail, see ``Control.fail``; end what the device waits for, as each worker's watch does."""
        super().fail(error)
        for rank in range(self.world_size):
            self.fabric.abort(rank)


class StrictLocalTransport(OrderedTransport):
    """One thread's transport over the strict groups."""

    shares_process = True
    control: StrictControl

    def __init__(self, hub: NcclHub, rank: int) -> None:
        control = StrictControl(hub, rank)
        super().__init__(control, control.pretended.handle)
        self.kind = hub.kind
        self._groups_made = 0
        self.make_groups()

    @contextmanager
    @override
    def running(self) -> Iterator[None]:
        pretended = self.control.pretended
        try:
            with (
                computing(pretended.stream, pretended),
                stream_synchronized_by(partial(streams.settle, "has its turn")),
            ):
                yield
                self.progress.synchronize()
        finally:
            self.control.fabric.leave(self.rank)

    @override
    def data_group(self, ranks: Sequence[int], name: str, *, messages: bool = False) -> StrictGroup | None:
        del messages
        self._groups_made += 1
        if self.rank not in ranks:
            return None
        return StrictGroup(self.control.endpoint, tuple(ranks), f"{name} (group {self._groups_made})")

    @override
    def record_event(self) -> Event:
        return (streams.current_stream() or self.control.endpoint.stream).record_event()

    @override
    def release(self, groups: Any) -> None:
        del groups
        self.progress.synchronize()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        """Refuse memory of a device, which another process could not have."""
        if isinstance(value, Tensor):
            refuse_on_device(value)
        return NotImplemented


class _Endpoint(ThreadEndpoint):
    def __init__(self, control: StrictControl) -> None:
        super().__init__(control.fabric, control.rank)
        self.control = control

    def block_host(self, woken: threading.Event, peer: int) -> None:
        """Block the host, see ``ThreadEndpoint``.

        Raises:
            TimedOut: the wait exceeded the timeout.
        """
        control = self.control
        control.status.waiting_for = peer
        with rng_released():
            in_time = woken.wait(control.timeout_seconds)
        if not in_time:
            self.fabric.give_up(self.rank)
            raise TimedOut(peer if peer >= 0 else None, control.timeout_seconds)
        control.status.waiting_for = None
