"""A thread beside a worker, which handles what it is given, one thing after another.

Invariant: what was handled is let go of before the next thing is waited for.
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
        handle: called in the thread with each thing; an error would end the thread.
    """

    def __init__(self, name: str, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self._given: SimpleQueue[T | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, thing: T) -> None:
        """Let the thread handle something, after all that it was given before."""
        self._given.put(thing)

    @property
    def waits(self) -> bool:
        """Whether nothing is left to handle but what is handled now."""
        return self._given.empty()

    def close(self, within_seconds: float = 0.0) -> bool:
        """Let the thread end after what it was given; whether it did so in time."""
        self._given.put(None)
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (thing := self._given.get()) is not None:
            self._handle(thing)
            del thing
