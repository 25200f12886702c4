"""A CPU worker's streams: what is computed waits for what came, though the host does not.

A thread computes at once, so it *is* its stream's device. A wait (``Stream.wait_event``, ``Work.wait``)
returns at once, and is made up for before the next operator that touches memory: until then the host may
launch further work, as with a GPU. Copies between the host and a pretended device are different: who has not
waited for them (``synchronize``) finds nothing, or has overwritten what is still to be read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from counterflow.runtime.torch_private import without_modes

from .fabric import Launch
from .memory import Copy

Wait = Callable[[Sequence[Launch], str], None]
"""Holds the host until something has run."""


def _healthy() -> None:
    """No device has an error."""


class Event:
    """A place in a stream: all that it waited for and copied until then.

    Args:
        launches: what the stream waited for.
        wait: holds the host.
        copies: what was on its way.
        lag: so many looks at the event find that the device has not come to it.
        look: raises the device's error, if it has had one.
    """

    def __init__(
        self,
        launches: Iterable[Launch],
        wait: Wait,
        copies: Sequence[Copy] = (),
        lag: int = 0,
        look: Callable[[], None] = _healthy,
    ) -> None:
        look()
        self._launches = tuple(launches)
        self._wait = wait
        self._copies = copies
        self._lag = lag
        self._look = look
        self.recorded_seconds = time.perf_counter()

    def query(self) -> bool:
        """Whether it has come."""
        self._look()
        if not all(launch.over for launch in self._launches):
            return False
        self._lag -= 1
        if self._lag >= 0:
            return False
        self._finish()
        return True

    def synchronize(self) -> None:
        """Hold the host until it comes."""
        self._look()
        self._wait(self._launches, "synchronizes with an event")
        self._lag = 0
        self._finish()

    def _finish(self) -> None:
        copies, self._copies = self._copies, ()
        for copy in copies:
            copy.finish()


class Recorded(Protocol):
    """What was put at a place in a stream, and can be put at another."""

    recorded: Event | None


class Stream:
    """What is computed in order; of what it waits for, what has not run yet is ``pending``.

    Args:
        wait: holds the host.
        lag: draws how far an event is behind the host.
        look: raises the device's error, if it has had one.
    """

    def __init__(self, wait: Wait, lag: Callable[[], int] = int, look: Callable[[], None] = _healthy) -> None:
        self._wait = wait
        self._lag = lag
        self._look = look
        self._pending: dict[Launch, None] = {}
        self._copies: list[Copy] = []

    @property
    def pending(self) -> tuple[Launch, ...]:
        """What has to run before anything further does."""
        return tuple(launch for launch in self._pending if not launch.over)

    def wait_for(self, launch: Launch) -> None:
        """Let all that follows wait; the host does not."""
        if not launch.over:
            self._pending[launch] = None

    def copy(self, copy: Copy) -> None:
        """Note a copy that the host does not wait for."""
        self._copies.append(copy)

    def holds(self, tensor: Tensor) -> None:
        """Memory is not given to anybody else while the CPU's allocator has it in use."""

    def record_event(self) -> Event:
        """An event that comes when all before it has run."""
        self._copies = [copy for copy in self._copies if not copy.over]
        return Event(self._pending, self._wait, tuple(self._copies), self._lag(), self._look)

    def wait_event(self, event: Event | Recorded) -> None:
        """As ``wait_for``."""
        found = event if isinstance(event, Event) else event.recorded
        if found is None:
            return
        event = found
        for launch in event._launches:  # noqa: SLF001 - of this module
            self.wait_for(launch)
        coming = [copy for copy in event._copies if not copy.over]  # noqa: SLF001 - of this module
        with without_modes():
            for copy in coming:
                copy.order()
        self._copies += coming

    def wait_stream(self, stream: Stream) -> None:
        """As ``wait_for``, for all that another stream waits for."""
        self.wait_event(stream.record_event())

    def run(self, why: str) -> None:
        """Let the device come to its next operator: the thread that is it waits, for its host none does."""
        if self._pending:
            launches, self._pending = tuple(self._pending), {}
            if not all(launch.over for launch in launches):
                self._wait(launches, why)

    def synchronize(self, why: str = "synchronizes with its stream") -> None:
        """Hold the host until all has run."""
        self._look()
        self.run(why)
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.finish()


class _ThreadStreams(threading.local):
    stream: Stream | None = None


_thread = _ThreadStreams()


def current_stream() -> Stream | None:
    """The stream on which this thread computes."""
    return _thread.stream


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Compute on a stream: as ``with torch.cuda.stream(stream):``."""
    before, _thread.stream = _thread.stream, stream
    try:
        yield
    finally:
        _thread.stream = before


def settle(why: str = "computes") -> None:
    """Hold the host until what the current stream waits for has run."""
    if _thread.stream is not None:
        _thread.stream.run(why)


@contextmanager
def as_the_network() -> Iterator[None]:
    """Around what is no worker's: it moves data, whatever thread it is done in."""
    with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
        yield
