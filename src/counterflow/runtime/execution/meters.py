"""Clocks of a worker's ops: when each ran.

Ops are timed by the machine's clock, or by events on a GPU, which are read when they are asked for: to note
an op costs no wait. Clocks of two machines are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import override

from counterflow.common.laps import OP_LAPS, OpLap, Reading, read_start, read_stop
from counterflow.common.tensors.devices import holds_host, module_of
from counterflow.schedule.ir import Op


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


class LapClock(Clock):
    """For ops that are over when they return, with their seconds of a processor.

    Args:
        laps: list of the laps since it was started.
    """

    def __init__(self, laps: list[OpLap]) -> None:
        self.began_seconds = 0.0
        self._laps = laps
        self._offsets: list[int] = []

    @override
    def start(self) -> None:
        self._laps.clear()
        self._offsets.clear()
        self.began_seconds = time.perf_counter()

    begin = staticmethod(read_start)

    @override
    def end(self, op: Op, period_offset: int, begin: Reading) -> None:
        self._laps.append(OpLap(op, begin, read_stop()))
        self._offsets.append(period_offset)

    @override
    def ran(self) -> list[Ran]:
        zero = self.began_seconds
        return [
            Ran(lap.op, offset, lap.begin.wall - zero, lap.end.wall - zero)
            for lap, offset in zip(self._laps, self._offsets, strict=True)
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
    """The clock for ops on a device, which reads laps if ``OP_LAPS`` is set."""
    if holds_host(device):
        module = module_of(device)
        return EventClock(partial(module.Event, enable_timing=True), partial(module.synchronize, device))
    laps = OP_LAPS.get()
    return HostClock() if laps is None else LapClock(laps)
