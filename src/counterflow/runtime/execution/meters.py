"""What a worker's ops took: when each ran, and the bytes that autograd saves for backward.

Ops are timed by the machine's clock, or by events on a GPU, which are read when they are asked for: to note
an op costs no wait. Clocks of two machines are not compared.

A storage that autograd saves counts once however many nodes saved it; weights and buffers of the model do not
count. What a backward frees counts until the backward is over, as in the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from counterflow.schedule.ir import Op

from ..devices import module_of
from ..dtensors import parts
from ..graphs import pointer, pointers, saved_by
from ..host_copy import holds_host


class Ran(NamedTuple):
    """An op as it ran, in seconds since the clock was started.

    ``period_offset`` says how many periods later than the op says.
    """

    op: Op
    period_offset: int
    start: float
    end: float


class Clock(Protocol):
    """Notes ops between two starts."""

    began_seconds: float
    """When it was started, in seconds of ``time.perf_counter``."""

    def start(self) -> None:
        """Forget what was noted, and begin anew."""

    def begin(self) -> Any:
        """A mark, as an op begins."""

    def end(self, op: Op, period_offset: int, begin: Any) -> None:
        """Note an op that ends, with the mark of its beginning."""

    def ran(self) -> list[Ran]:
        """All that was noted, in order."""


class HostClock(Clock):
    """For ops that are over when they return."""

    def __init__(self) -> None:
        self.began_seconds = 0.0
        self._noted: list[tuple[Op, int, float, float]] = []

    @override
    def start(self) -> None:
        self._noted.clear()
        self.began_seconds = time.perf_counter()

    begin = staticmethod(time.perf_counter)
    """Seconds of the host's clock; a static method, for an action's host cost."""

    @override
    def end(self, op: Op, period_offset: int, begin: float) -> None:
        self._noted.append((op, period_offset, begin, time.perf_counter()))

    @override
    def ran(self) -> list[Ran]:
        zero = self.began_seconds
        return [
            Ran(op, period_offset, start - zero, end - zero) for op, period_offset, start, end in self._noted
        ]


class TimedEvent(Protocol):
    """A place in a device's stream, as ``torch.cuda.Event`` that times."""

    def record(self) -> None:
        """Put it at the end of the current stream."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds until another one."""


class EventClock(Clock):
    """For ops that are only in flight when they return.

    Args:
        make: an event.
        synchronize: holds the host until the device has come to all of them.
    """

    def __init__(self, make: Callable[[], TimedEvent], synchronize: Callable[[], None]) -> None:
        self.began_seconds = 0.0
        self._make = make
        self._synchronize = synchronize
        self._first: TimedEvent | None = None
        self._noted: list[tuple[Op, int, TimedEvent, TimedEvent]] = []
        self._free: list[TimedEvent] = []
        """What was noted before and is recorded again: to make an event asks the driver."""

    @override
    def start(self) -> None:
        for _, _, begin, end in self._noted:
            self._free += (begin, end)
        self._noted.clear()
        if self._first is not None:
            self._free.append(self._first)
        self.began_seconds = time.perf_counter()
        self._first = self.begin()

    @override
    def begin(self) -> TimedEvent:
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    @override
    def end(self, op: Op, period_offset: int, begin: TimedEvent) -> None:
        self._noted.append((op, period_offset, begin, self.begin()))

    @override
    def ran(self) -> list[Ran]:
        first = self._first
        if first is None:
            return []
        self._synchronize()
        return [
            Ran(op, period_offset, first.elapsed_time(start) / 1e3, first.elapsed_time(end) / 1e3)
            for op, period_offset, start, end in self._noted
        ]


def clock_of(device: torch.device) -> Clock:
    """The clock for ops on a device."""
    if holds_host(device):
        module = module_of(device)
        return EventClock(partial(module.Event, enable_timing=True), partial(module.synchronize, device))
    return HostClock()


class Kept:
    """A storage that is kept, and how many times."""

    __slots__ = ("alive", "pointer", "size", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.pointer = storage.data_ptr()
        self.size = storage.nbytes()
        self.alive = StorageWeakRef(storage)
        self.users = 0


class SavedBytes:
    """The count. What is kept for one unit is noted in a list; ``release`` lets the list go.

    Args:
        constant: tensors that do not count: parameters and buffers.
    """

    def __init__(self, constant: Iterable[Tensor]) -> None:
        self._constant = pointers(constant)
        self._given: set[int] = set()
        self._kept: dict[int, Kept] = {}
        self.counting = True
        """Whether anything is counted now."""
        self.current = 0
        self.peak = 0

    def never(self, tensors: Iterable[Tensor]) -> None:
        """These do not count either: new versions of parameters."""
        self._constant |= pointers(tensors)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These do not count, but those given before do: the mini-batches in flight are the user's."""
        self._given = pointers(tensors)

    def leave_out_also(self, tensors: Iterable[Tensor]) -> None:
        """Neither do these: further copies of such a mini-batch."""
        self._given |= pointers(tensors)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it has the memory of a parameter or buffer."""
        if type(tensor) is Tensor:
            return pointer(tensor) in self._constant
        return any(pointer(part) in self._constant for part in parts(tensor))

    def holds(self, collected: list[Kept]) -> Callable[[Tensor], None] | None:
        """What counts a tensor that is kept for backward; None: nothing does now."""
        return partial(self.hold, collected=collected) if self.counting else None

    def note(self, nodes: Iterable[Node], collected: list[Kept]) -> None:
        """Count what some nodes save, and note it in ``collected``.

        The graph stays as it is without a count: what hooks pack, a backward would find as another object,
        and a custom function that adds to ``weight.grad`` itself would add to that of nobody.
        """
        for tensor in saved_by(nodes):
            self.hold(tensor, collected)

    def hold(self, tensor: Tensor, collected: list[Kept]) -> None:
        """Count a tensor that is kept for backward."""
        for part in parts(tensor):
            self._hold(part, collected)

    def _hold(self, tensor: Tensor, collected: list[Kept]) -> None:
        at, storage = pointer(tensor), tensor.untyped_storage()
        if not at or at in self._constant or at in self._given:
            return
        kept = self._kept.get(at)
        # What a running backward freed still counts; its memory may be another storage's by now.
        if kept is None or kept.alive.expired():
            kept = self._kept[at] = Kept(storage)
            self.current += kept.size
            self.peak = max(self.peak, self.current)
        kept.users += 1
        collected.append(kept)

    def release(self, collected: list[Kept]) -> None:
        """What was collected is not kept any more."""
        for kept in collected:
            kept.users -= 1
            if not kept.users:
                self.current -= kept.size
                if self._kept.get(kept.pointer) is kept:
                    del self._kept[kept.pointer]
        collected.clear()
