"""Progress of a device that runs behind its host: for the watch, and to limit how far the host is ahead.

A GPU's host only launches: it does not see what the device waits for, and would launch a whole step, with all
that step's outputs in memory. So each op records an event and each wait for a message its work; the first of
them that is not over shows what the device does.

Invariant: one thread notes, another may look at any time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from .base import Status

OPS_AHEAD = 2
"""Maximum number of ops by which a host is ahead of its device: one that runs and one that is ready."""


class Event(Protocol):
    """A place in a device's stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has come."""

    def synchronize(self) -> None:
        """Hold the host until it comes."""


@dataclass(slots=True)
class _Noted:
    """Something on the stream: whether it is over, what it is part of, and for whom it waits."""

    over: Callable[[], bool]
    doing: object
    waiting_for: int | None


class Progress:
    """One worker's.

    Args:
        status: what its host does.
        record: an event at the end of the current stream.
    """

    def __init__(self, status: Status, record: Callable[[], Event]) -> None:
        self._status = status
        self._record = record
        self._noted: deque[_Noted] = deque()
        self._ends: deque[Event] = deque()
        self._lock = threading.Lock()
        self._head_since = 0.0

    def waits(self, over: Callable[[], bool], peer: int) -> None:
        """The stream waits for a rank, -1 for several."""
        self._note(_Noted(over, self._status.doing, peer))

    def computed(self) -> None:
        """An op was launched."""
        event = self._record()
        self._note(_Noted(event.query, self._status.doing, None))
        self._ends.append(event)

    def stay_near(self) -> None:
        """Hold the host until no more than ``OPS_AHEAD`` ops are launched and not over."""
        while len(self._ends) > OPS_AHEAD:
            self._ends.popleft().synchronize()

    @contextmanager
    def held(self, peer: int) -> Iterator[None]:
        """Around what holds the host until others come: -1 for several."""
        begun = [True]
        self._note(_Noted(lambda: not begun, self._status.doing, peer))
        try:
            yield
        finally:
            begun.clear()

    def synchronize(self) -> None:
        """Hold the host until the stream has come to its end."""
        self._ends.clear()
        self._record().synchronize()

    def _note(self, noted: _Noted) -> None:
        with self._lock:
            self._drop_what_is_over()
            if not self._noted:
                self._head_since = time.monotonic()
            self._noted.append(noted)

    def _drop_what_is_over(self) -> None:
        while self._noted and self._noted[0].over():
            self._noted.popleft()
            self._head_since = time.monotonic()

    def status(self) -> Status:
        """What the device does; the host, if that has nothing to do."""
        with self._lock:
            self._drop_what_is_over()
            if not self._noted:
                return self._status
            head = self._noted[0]
            return Status(self._status.rank, head.doing, head.waiting_for, self._head_since)
