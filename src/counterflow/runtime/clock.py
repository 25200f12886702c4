"""When ops ran: by the machine's clock, or by events on a GPU, which are read when they are asked for.

Invariant: to note an op costs no wait. What it does not do: compare the clocks of two machines.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch

from counterflow.schedule.ir import Op


class Ran(NamedTuple):
    """An op as it ran, in seconds since the clock was started.

    ``later`` tells how many periods later than the op says.
    """

    op: Op
    later: int
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

    def end(self, op: Op, later: int, begin: Any) -> None:
        """Note an op that ends, with the mark of its beginning."""

    def ran(self) -> list[Ran]:
        """All that was noted, in order."""


class HostClock:
    """For ops that are over when they return."""

    def __init__(self) -> None:
        self.began_seconds = 0.0
        self._noted: list[tuple[Op, int, float, float]] = []

    def start(self) -> None:
        """See ``Clock``."""
        self._noted.clear()
        self.began_seconds = time.perf_counter()

    def begin(self) -> float:
        """See ``Clock``."""
        return time.perf_counter()

    def end(self, op: Op, later: int, begin: float) -> None:
        """See ``Clock``."""
        self._noted.append((op, later, begin, time.perf_counter()))

    def ran(self) -> list[Ran]:
        """See ``Clock``."""
        zero = self.began_seconds
        return [Ran(op, later, start - zero, end - zero) for op, later, start, end in self._noted]


class CudaClock:
    """For ops that are only under way when they return.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.began_seconds = 0.0
        self._device = device
        self._first: torch.cuda.Event | None = None
        self._noted: list[tuple[Op, int, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """See ``Clock``."""
        self._noted.clear()
        self.began_seconds = time.perf_counter()
        self._first = self.begin()

    def begin(self) -> torch.cuda.Event:
        """See ``Clock``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, op: Op, later: int, begin: torch.cuda.Event) -> None:
        """See ``Clock``."""
        self._noted.append((op, later, begin, self.begin()))

    def ran(self) -> list[Ran]:
        """See ``Clock``."""
        first = self._first
        if first is None:
            return []
        torch.cuda.synchronize(self._device)
        return [
            Ran(op, later, first.elapsed_time(start) / 1e3, first.elapsed_time(end) / 1e3)
            for op, later, start, end in self._noted
        ]


def clock_of(device: torch.device) -> Clock:
    """The clock for ops on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
