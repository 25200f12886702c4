"""A CPU worker's streams: computation waits for launches, although the host does not.

A thread computes at once, so it *is* its stream's device. A wait (``Stream.wait_event``, ``Work.wait``)
returns at once, and is carried out before the next operator that touches memory: until then the host may
launch further work, as with a GPU. Copies between the host and a pretended device differ: without a wait
(``synchronize``) their result is invalid, or their source was overwritten too early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from counterflow.common.tensors.torch_private import without_modes

from .device_memory import Copy
from .fabric import Launch

Wait = Callable[[Sequence[Launch], str], None]
"""Blocks the host until launches have run."""


def _healthy() -> None:
    pass


class StreamEvent:
    """A place in a stream: all waits and copies up to it.

    Args:
        launches: launches that the stream waited for.
        wait: function that blocks the host.
        copies: copies in flight.
        lag: number of queries for which the event is not yet reached.
        look: function that raises the device's error, if there was one.
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
        """True if the event is reached."""
        self._look()
        if not all(launch.over for launch in self._launches):
            return False
        self._lag -= 1
        if self._lag >= 0:
            return False
        self._finish()
        return True

    def synchronize(self) -> None:
        """Block the host until the event."""
        self._look()
        self._wait(self._launches, "synchronizes with an event")
        self._lag = 0
        self._finish()

    def _finish(self) -> None:
        copies, self._copies = self._copies, ()
        for copy in copies:
            copy.finish()


class Recorded(Protocol):
    """A recorded place in a stream, for which another stream can wait."""

    recorded: StreamEvent | None


class Stream:
    """Work in order; ``pending`` contains launches it waits for that have not run.

    Args:
        wait: function that blocks the host.
        lag: function that draws the lag of an event behind the host.
        look: function that raises the device's error, if there was one.
    """

    def __init__(self, wait: Wait, lag: Callable[[], int] = int, look: Callable[[], None] = _healthy) -> None:
        self._wait = wait
        self._lag = lag
        self._look = look
        self._pending: dict[Launch, None] = {}
        self._copies: list[Copy] = []

    @property
    def pending(self) -> tuple[Launch, ...]:
        """Launches that have to run before anything further does."""
        return tuple(launch for launch in self._pending if not launch.over)

    def wait_for(self, launch: Launch) -> None:
        """Make all further work wait; the host does not."""
        if not launch.over:
            self._pending[launch] = None

    def copy(self, copy: Copy) -> None:
        """Note a copy for which the host does not wait."""
        self._copies.append(copy)

    def holds(self, tensor: Tensor) -> None:
        """Do nothing: memory is not reused while the CPU's allocator has it in use."""

    def record_event(self) -> StreamEvent:
        """An event that completes when all before it has run."""
        self._copies = [copy for copy in self._copies if not copy.over]
        return StreamEvent(self._pending, self._wait, tuple(self._copies), self._lag(), self._look)

    def wait_event(self, event: StreamEvent | Recorded) -> None:
        """Make the stream wait for an event."""
        recorded = event if isinstance(event, StreamEvent) else event.recorded
        if recorded is None:
            return
        event = recorded
        for launch in event._launches:  # noqa: SLF001 - of this module
            self.wait_for(launch)
        coming = [copy for copy in event._copies if not copy.over]  # noqa: SLF001 - of this module
        with without_modes():
            for copy in coming:
                copy.order()
        self._copies += coming

    def wait_stream(self, stream: Stream) -> None:
        """Make the stream wait for everything that another stream waits for."""
        self.wait_event(stream.record_event())

    def run(self, why: str) -> None:
        """Let the device reach its next operator: the thread that is the device waits."""
        if self._pending:
            launches, self._pending = tuple(self._pending), {}
            if not all(launch.over for launch in launches):
                self._wait(launches, why)

    def synchronize(self, why: str = "synchronizes with its stream") -> None:
        """Block the host until everything has run."""
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
    """Compute on a stream, as in ``with torch.cuda.stream(stream):``."""
    before, _thread.stream = _thread.stream, stream
    try:
        yield
    finally:
        _thread.stream = before


def settle(why: str = "computes") -> None:
    """Block the host until everything that the current stream waits for has run."""
    if _thread.stream is not None:
        _thread.stream.run(why)


@contextmanager
def as_the_network() -> Iterator[None]:
    """Surrounds work of the network: it moves data, in whatever thread."""
    with without_modes(), torch.no_grad(), torch.inference_mode(mode=False):
        yield
