"""Early end of a run by a signal; its effect depends on the phase of the run.

Before anything is begun it ends the process. While workers start it unwinds, because there is nothing to
save. While workers train it only leaves a note: between steps they look for it, agree to end, and write what
was reached.

Invariant: a process that a signal shall end ends within seconds, whatever it is doing. Python handles a
signal between two instructions of the main thread, which may wait in torch for minutes, so a separate thread
ends the process.
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

from counterflow.common.external_signals import EXTERNAL_SIGNALS, end_fork_server

RESUBMIT = os.EX_TEMPFAIL
"""Exit code of a run that something other than Ctrl-C ended early: the same command resumes it."""

_SIGNALLED = 128
"""Exit codes above it say which signal ended a command, as in a shell."""

_STREAMS = (1, 2)

PATIENCE_SECONDS = 3.0
"""Seconds that unwinding may take."""


class Phase(enum.Enum):
    """The effect of a signal."""

    NOTE = enum.auto()
    """The signal is noted, however often it comes."""
    FINISH = enum.auto()
    """The signal is noted; Ctrl-C after it raises ``KeyboardInterrupt``."""
    UNWIND = enum.auto()
    """The signal raises ``KeyboardInterrupt`` in the main thread; the process ends if unwinding takes too
    long.
    """
    LEAVE = enum.auto()
    """The signal ends the process at once."""


class Stop:
    """Request to end the run, and the signal that made it. One per process, shared by its
    threads.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.phase = Phase.NOTE
        self._then = Phase.NOTE
        self._trains: Callable[[], bool] | None = None
        self.early = False
        """Whether the end was requested while workers started, so everything was unwound."""
        self.unwinds = False
        """Whether ``KeyboardInterrupt`` was raised."""
        self.ended = False
        """Whether the run has ended and is in its folder, so a signal changes nothing."""

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """Name of the signal."""
        return "" if self.signal is None else signal.Signals(self.signal).name

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was ended early: 130 by Ctrl-C, 75 by any other signal ("resubmit me")."""
        by_hand = self.signal in (None, signal.SIGINT)
        return _SIGNALLED + signal.SIGINT if by_hand else RESUBMIT

    def forget(self) -> None:
        """Forget earlier requests and runs."""
        self.signal, self.early, self.unwinds, self.ended = None, False, False, False

    def take(self, number: int) -> None:
        """Handle a signal as this phase requires.

        Raises:
            KeyboardInterrupt: unwind what was begun.
        """
        if self.ended:
            return
        self.look()
        repeated = self.signal is not None
        if not repeated:
            self.signal = number
        self.early = self.early or self.phase is Phase.UNWIND
        if self.phase is Phase.UNWIND or (
            self.phase is Phase.FINISH and repeated and number == signal.SIGINT
        ):
            self.phase, self.unwinds = Phase.NOTE, True  # nothing disturbs the unwinding
            raise KeyboardInterrupt

    @contextmanager
    def during(
        self, phase: Phase, then: Phase = Phase.NOTE, trains: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Handle signals as a phase requires; in ``UNWIND`` also one that came before.

        Args:
            phase: the phase.
            then: phase that follows within the context, once ``step_done`` was called.
            trains: called at a signal, returns whether a step was made; for a process that learns it late,
                from others.

        Raises:
            KeyboardInterrupt: a signal came before.
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
        """Ask whether a step was made, if that is not known yet."""
        if self.phase is Phase.UNWIND and self._trains is not None and self._trains():
            self.step_done()

    def step_done(self) -> None:
        """Note that a step was made: from now on a signal finishes the step instead of unwinding."""
        if self.phase is Phase.UNWIND:
            self.phase = self._then


STOP = Stop()


def listen() -> dict[int, Any]:
    """Handle signals as ``STOP.phase`` says from now on; outside the main thread nothing is changed.

    The signals are Ctrl-C, SIGTERM, SIGUSR1 (Slurm's warning before the end) and SIGHUP (a terminal is gone);
    SIGHUP stays ignored under nohup.

    Returns:
        The previous handlers.
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
        number: signal.signal(number, handle) for number in EXTERNAL_SIGNALS if number not in ignored
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EXTERNAL_SIGNALS)
    return before


def _leave(terminals: Sequence[int]) -> None:
    for stream in terminals:
        if not os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, stream)
            os.close(nowhere)


@contextmanager
def listening(*, ends_process: bool = False) -> Iterator[None]:
    """Handle signals within this context only, and end the process in time; see ``listen``.

    Args:
        ends_process: whether the process ends after this context, so signals after the end of the run are
            ignored until then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _Guard():
        before = listen()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if ends_process and STOP.ended else handler)


class _Guard:
    """Ends the process if a signal requires it and the main thread does not.

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
        signalled = False
        while data := os.read(self._reads, 1):
            number = data[0]
            if number not in EXTERNAL_SIGNALS or STOP.ended:
                continue
            STOP.look()
            phase = STOP.phase
            repeated = signalled and number == signal.SIGINT and phase is Phase.FINISH
            if phase is Phase.LEAVE:
                self._end(number, 0.0)
            elif phase is Phase.UNWIND or STOP.unwinds or repeated:  # the main thread unwinds, or is about to
                self._end(number, PATIENCE_SECONDS)
            signalled = True

    def _end(self, number: int, patience_seconds: float) -> None:
        if self._over.wait(patience_seconds):
            return
        STOP.signal = STOP.signal or number
        message = "Stopped\n" if STOP.signal == signal.SIGINT else f"Stopped by {STOP.name}\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        for child in multiprocessing.active_children():
            child.kill()
        end_fork_server()
        os._exit(STOP.exit_code)
