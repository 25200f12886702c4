"""Turns of two functions that run at once: one computes while the all-to-all of the other is in flight.

::

    first   compute ── begin all-to-all        wait, compute ── begin all-to-all        wait, compute
    second                             compute ── begin all-to-all             compute

Each function has a thread, and one thread runs at a time, until it begins an all-to-all. So nothing that they
share needs a lock, and the order of all collectives follows from the functions alone: it is the same at all
positions, whose all-to-alls pair up in one process group. On a GPU both threads launch on one stream, and the
all-to-all runs on that of its communicator.

Invariant: the random generators of each function continue where it was interrupted.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol


class Generators(Protocol):
    """Random generators that both functions draw from."""

    def states(self) -> Any:
        """Return the current states."""

    def restore(self, states: Any) -> None:
        """Set the generators to states."""


class _PeerFailure(BaseException):
    pass


class _Current:
    turns: Turns | None = None
    """Turns of the functions that run now; not of a thread, because autograd has threads of its own."""


def next_turn() -> None:
    """Let the other function compute; return when it is this one's turn again.

    To be called between the begin of an all-to-all and the wait for it. Without another function it returns
    at once.
    """
    if _Current.turns is not None:
        _Current.turns.switch()


def has_turns() -> bool:
    """True if another function may compute while this one waits."""
    return _Current.turns is not None


class Turns:
    """Two functions that run at once.

    Args:
        first: the function that begins; it runs in the calling thread.
        second: the other one.
        generators: the random generators.
    """

    def __init__(self, first: Callable[[], None], second: Callable[[], None], generators: Generators) -> None:
        self._functions: Final[Sequence[Callable[[], None]]] = (first, second)
        self._generators = generators
        self._awake = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._running = 0
        self._error: BaseException | None = None

    def run(self, thread: ThreadPoolExecutor, begins: int = 0) -> None:
        """Run both functions to their ends.

        Args:
            thread: the thread of the second function.
            begins: number of the function that has the first turn.

        Raises:
            BaseException: what the first function to fail has raised; the other one is ended.
        """
        _Current.turns = self
        self._running = begins
        self._awake[begins].release()
        try:
            context = contextvars.copy_context()
            second = thread.submit(context.run, self._run, 1)
            self._run(0)
            second.result()
        finally:
            _Current.turns = None
        if self._error is not None:
            raise self._error

    def switch(self) -> None:
        """Give the turn to the other function, and wait for the next one."""
        side = self._running
        opposite = 1 - side
        if self._ended[opposite]:
            return
        states = self._generators.states()
        self._running = opposite
        self._awake[opposite].release()
        self._awake[side].acquire()
        if self._error is not None:
            raise _PeerFailure
        self._generators.restore(states)

    def _run(self, side: int) -> None:
        self._awake[side].acquire()
        try:
            if self._error is None:
                self._functions[side]()
        except _PeerFailure:
            pass
        except BaseException as error:  # raised in the calling thread
            self._error = error
        finally:
            self._ended[side] = True
            self._running = 1 - side
            if not self._ended[1 - side]:
                self._awake[1 - side].release()
