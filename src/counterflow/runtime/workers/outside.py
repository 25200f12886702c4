"""Signals from outside to all processes of a command, and a process that ignores them. Knows no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver

FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or a batch system sends to all processes of a command."""

_SAFE_PATH = "PYTHONSAFEPATH"

_ENDING_SECONDS = 1.0
"""Time between the loss of a process's connections and its end."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let none of them into this thread in here, nor ever into the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Let Python processes that are started in here not import from the current folder.

    ``multiprocessing`` starts its own with ``-c``, which has the current folder before all others: a file
    there that is named like a module of Python would be run.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def server_end() -> str:
    """How the process that workers are forked from ended, in words; empty while it runs."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001
    if pid is None:
        return "ended"
    try:
        status = _wait_for(pid)
    except ChildProcessError:
        return "ended"
    if status is None:
        return ""
    if status.si_code == os.CLD_EXITED:
        return f"ended with exit code {status.si_status}; see its output"
    name = signal.Signals(status.si_status).name
    return f"was killed by {name}" + "; perhaps the machine ran out of memory" * (name == "SIGKILL")


def end_server() -> None:
    """End the process that workers are forked from, also while it loads; the next launch starts another."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            _wait_for(pid)  # one that has not ended yet would be asked for workers


def _wait_for(pid: int) -> os.waitid_result | None:
    """How a child process ended; None if it still runs after a moment. It stays to be waited for.

    Raises:
        ChildProcessError: there is no such child.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while (status := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return status
