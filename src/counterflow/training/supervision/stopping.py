"""How a run is ended early: by a signal, which means something else in each phase of a run.

Before anything is begun it ends the process; while workers start it unwinds what was begun, for nothing was
made that could be kept; and while they train it only leaves a note, which whoever trains looks at between
steps, agrees on with the other workers, and writes what was reached.

Invariant: a process that a signal is to end ends within seconds, whatever it is in. What Python does at a
signal it does between two instructions of the main thread, and that may be waiting in torch for minutes: so
a thread of its own sees to it.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from counterflow.runtime.workers.outside import FROM_OUTSIDE, end_server

RESUBMIT = os.EX_TEMPFAIL
"""Exit code of a run that something other than Ctrl-C ended early: the same command goes on with it."""

_SIGNALLED = 128
"""Exit codes above it tell which signal ended a command, as in a shell."""

_STREAMS = (1, 2)

PATIENCE_SECONDS = 3.0
"""How long what was begun may take to unwind."""


class Phase(enum.Enum):
    """What a signal does."""

    NOTE = enum.auto()
    """It is noted, however often it comes."""
    FINISH = enum.auto()
    """It is noted; Ctrl-C after it raises ``KeyboardInterrupt``."""
    UNWIND = enum.auto()
    """It raises ``KeyboardInterrupt`` in the main thread; what has not unwound in time is left."""
    LEAVE = enum.auto()
    """It ends the process where it is."""


class Stop:
    """Whether the end of the run was asked for, and by which signal. One for a process and its threads."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.phase = Phase.NOTE
        self._then = Phase.NOTE
        self._trains: Callable[[], bool] | None = None
        self.early = False
        """Whether it was asked for, and everything unwound, while workers started."""
        self.unwinds = False
        """Whether ``KeyboardInterrupt`` was raised."""

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

    def forget(self) -> None:
        """Begin anew: nobody has asked."""
        self.signal, self.early, self.unwinds = None, False, False

    def take(self, number: int) -> None:
        """Do what a signal means in this phase.

        Raises:
            KeyboardInterrupt: what was begun is to be unwound.
        """
        self.look()
        again = self.signal is not None
        if not again:
            self.signal = number
        self.early = self.early or self.phase is Phase.UNWIND
        if self.phase is Phase.UNWIND or (self.phase is Phase.FINISH and again and number == signal.SIGINT):
            self.phase, self.unwinds = Phase.NOTE, True  # nothing disturbs the unwinding
            raise KeyboardInterrupt

    @contextmanager
    def during(
        self, phase: Phase, then: Phase = Phase.NOTE, trains: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Let signals mean what they mean in a phase; in ``UNWIND`` also one that came before.

        Args:
            phase: which.
            then: which one follows within the context, once something is ``made``.
            trains: whether something is, asked at a signal; for who learns it late, from other processes.

        Raises:
            KeyboardInterrupt: one came before.
        """
        before = self.phase, self._then, self._trains
        self.phase, self._then, self._trains = phase, then, trains
        try:
            if phase is Phase.UNWIND and self.signal is not None:
                self.take(self.signal)
            yield
        finally:
            self.phase, self._then, self._trains = before

    def look(self) -> None:
        """Ask whether a step was made, where nobody said so yet."""
        if self.phase is Phase.UNWIND and self._trains is not None and self._trains():
            self.made()

    def made(self) -> None:
        """A step was made: from now on there is something to finish, and not to unwind."""
        if self.phase is Phase.UNWIND:
            self.phase = self._then


STOP = Stop()


def listen() -> dict[int, Any]:
    """Take signals as ``STOP.phase`` says from now on; elsewhere than in a main thread nothing is changed.

    Those are Ctrl-C, SIGTERM, SIGUSR1 (Slurm's warning before the end) and SIGHUP (a terminal is gone), but
    not the last where it was ignored, as nohup wants it.

    Returns:
        The handlers there were.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    terminals = [stream for stream in _STREAMS if os.isatty(stream)]

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave(terminals)
        STOP.take(number)

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
def listening() -> Iterator[None]:
    """Take signals within this context only, and end the process in time; see ``listen``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _Guard():
        before = listen()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Guard:
    """Ends the process if a signal is to, and the main thread does not come to it.

    Every signal that Python has a handler for is also written into a pipe, at once.
    """

    def __init__(self) -> None:
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="counterflow signals", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        self._over.set()
        os.close(self._writes)
        self._thread.join()
        os.close(self._reads)

    def _run(self) -> None:
        asked = False
        while data := os.read(self._reads, 1):
            number = data[0]
            if number not in FROM_OUTSIDE:
                continue
            STOP.look()
            phase = STOP.phase
            again = asked and number == signal.SIGINT and phase is Phase.FINISH
            if phase is Phase.LEAVE:
                self._end(number, 0.0)
            elif phase is Phase.UNWIND or STOP.unwinds or again:  # the main thread unwinds, or is to
                self._end(number, PATIENCE_SECONDS)
            asked = True

    def _end(self, number: int, patience_seconds: float) -> None:
        if self._over.wait(patience_seconds):
            return
        STOP.signal = STOP.signal or number
        told = "Stopped\n" if STOP.signal == signal.SIGINT else f"Stopped by {STOP.name}\n"
        with contextlib.suppress(OSError):
            os.write(2, told.encode())
        for child in multiprocessing.active_children():
            child.kill()
        end_server()
        os._exit(STOP.exit_code)
