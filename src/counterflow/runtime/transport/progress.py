"""Progress of a device that runs behind its host: for the watch, and to limit how far the host is ahead.

A GPU's host only launches: it does not see what the device waits for, and would launch a whole step, with all
that step's outputs in memory. So each op records an event and each wait for a message its work; the first of
them that is not over is the device's current activity.

Invariant: one thread adds entries, another may read the status at any time.
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
    """A point in a device's stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """True if the stream has reached it."""

    def synchronize(self) -> None:
        """Block the host until the stream reaches it."""


@dataclass(slots=True)
class _Entry:
    over: Callable[[], bool]
    doing: object  # the host's action that launched the work
    waiting_for: int | None  # rank


class Progress:
    """Work of one worker's device that is launched and not over.

    Args:
        status: status of its host.
        record: returns an event at the end of the current stream.
    """

    def __init__(self, status: Status, record: Callable[[], Event]) -> None:
        self._status = status
        self._record = record
        self._entries: deque[_Entry] = deque()
        self._ends: deque[Event] = deque()
        self._lock = threading.Lock()
        self._head_since = 0.0

    def waits(self, over: Callable[[], bool], peer: int) -> None:
        """Note that the stream waits for a rank (-1: several)."""
        self._note(_Entry(over, self._status.doing, peer))

    def computed(self) -> None:
        """Note that an op was launched."""
        event = self._record()
        self._note(_Entry(event.query, self._status.doing, None))
        self._ends.append(event)

    def stay_near(self) -> None:
        """Block the host until at most ``OPS_AHEAD`` ops are launched and not over."""
        while len(self._ends) > OPS_AHEAD:
            self._ends.popleft().synchronize()

    @contextmanager
    def host_waiting(self, peer: int) -> Iterator[None]:
        """Note that the host is blocked until a rank (-1: several) takes part."""
        waiting = [True]
        self._note(_Entry(lambda: not waiting, self._status.doing, peer))
        try:
            yield
        finally:
            waiting.clear()

    def synchronize(self) -> None:
        """Block the host until all launched work is over."""
        self._ends.clear()
        self._record().synchronize()

    def _note(self, entry: _Entry) -> None:
        with self._lock:
            self._drop_what_is_over()
            if not self._entries:
                self._head_since = time.monotonic()
            self._entries.append(entry)

    def _drop_what_is_over(self) -> None:
        while self._entries and self._entries[0].over():
            self._entries.popleft()
            self._head_since = time.monotonic()

    def status(self) -> Status:
        """Status of the device, or of the host if the device is idle."""
        with self._lock:
            self._drop_what_is_over()
            if not self._entries:
                return self._status
            head = self._entries[0]
            return Status(self._status.rank, head.doing, head.waiting_for, self._head_since)
