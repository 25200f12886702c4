"""A background thread of a worker with a queue of items, which it handles one after another.

Invariant: it releases an item before it waits for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class SideThread(Generic[T]):
    """A thread with a queue.

    Args:
        name: of the thread.
        handle: called in the thread with each item; an error would end the thread.
    """

    def __init__(self, name: str, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Enqueue an item."""
        self._queue.put(item)

    @property
    def is_drained(self) -> bool:
        """True if the queue is empty; the last item may still be handled."""
        return self._queue.empty()

    def close(self, within_seconds: float = 0.0) -> bool:
        """End the thread after the items in its queue; return True if it ended in time."""
        self._queue.put(None)
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._handle(item)
            del item
