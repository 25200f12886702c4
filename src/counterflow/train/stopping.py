"""How a run is ended early: a signal asks for it, and the step under way is finished first.

Invariant: a signal only leaves a note; whoever trains looks at it between steps, agrees with the other
workers, and writes what was reached. Who started the workers ends them at once at a second Ctrl-C; a worker
takes a second one for the same, because a terminal's signal also comes to it through who started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from counterflow.runtime.workers.forking import FROM_OUTSIDE

RESUBMIT = os.EX_TEMPFAIL
"""Exit code of a run that something other than Ctrl-C ended early: the same command goes on with it."""

_SIGNALLED = 128
"""Exit codes above it tell which signal ended a command, as in a shell."""

_STREAMS = (1, 2)


class Stop:
    """Whether the end of the run was asked for, and by which signal. One for a process and its threads."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """Of the signal."""
        return "" if self.signal is None else signal.Signals(self.signal).name

    @property
    def exit_code(self) -> int:
        """That of a run which was ended early: by Ctrl-C 130, by any other signal 75 ("resubmit me")."""
        by_hand = self.signal in (None, signal.SIGINT)
        return _SIGNALLED + signal.SIGINT if by_hand else RESUBMIT


STOP = Stop()


def listen(second: Callable[[], None] | None = None) -> dict[int, Any]:
    """Note signals from now on; elsewhere than in a process's main thread nothing is changed.

    Those are Ctrl-C, SIGTERM, SIGUSR1 (Slurm's warning before the end) and SIGHUP (a terminal is gone), but
    not the last where it was ignored, as nohup wants it.

    Args:
        second: called at a Ctrl-C after any of them, before ``KeyboardInterrupt`` is raised; None ignores it.

    Returns:
        The handlers there were.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    terminals = [stream for stream in _STREAMS if os.isatty(stream)]

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave(terminals)
        if not STOP:
            STOP.signal = number
        elif second is not None and number == signal.SIGINT:
            second()
            raise KeyboardInterrupt

    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before: dict[int, Any] = {
        number: signal.signal(number, handle) for number in FROM_OUTSIDE if number not in ignored
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)
    return before


def _leave(terminals: Sequence[int]) -> None:
    """Print to nowhere what went to a terminal that is gone, where printing would be an error."""
    for stream in terminals:
        if not os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, stream)
            os.close(nowhere)


@contextmanager
def listening(second: Callable[[], None] | None = None) -> Iterator[None]:
    """Note signals within this context only; see ``listen``."""
    before = listen(second=second)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def block() -> None:
    """Keep signals from this thread and the processes it starts, until ``listen`` there takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    resource_tracker.ensure_running()  # it unblocks signals where it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)


class Children:
    """The processes that this one starts through multiprocessing."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def stop(self) -> None:
        """Tell each once, as if by Ctrl-C; call it again for those that are started later."""
        for pid in self._running() - self._told:
            self._told.add(pid)
            _send(pid, signal.SIGINT)

    def kill(self) -> None:
        """End them at once."""
        for pid in self._running():
            _send(pid, signal.SIGKILL)

    def _running(self) -> set[int]:
        return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
