"""Signals from outside to all processes of a command, and a process that ignores them. Knows no torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or a batch system sends to all processes of a command."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let none of them into this thread in here, nor ever into the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_server() -> None:
    """End the process that workers are forked from, also while it loads; the next launch starts another."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
