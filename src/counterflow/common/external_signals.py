"""Signals that a terminal or a batch system sends to a command, and the fork server, which ignores them.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver

EXTERNAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or a batch system sends to all processes of a command."""

_SAFE_PATH = "PYTHONSAFEPATH"

_ENDING_SECONDS = 1.0
"""Time between the loss of a process's connections and its end."""


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block them in this thread within the context, and for good in processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXTERNAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Exclude the current folder from the import path of Python processes started within the context.

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


def fork_server_failure() -> str:
    """Clause about the end of the process that workers are forked from; empty while it runs."""
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


def end_fork_server() -> None:
    """End the process that workers are forked from, even while it loads; the next launch starts another."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            _wait_for(pid)  # one that has not ended yet would still be used to fork workers


def _wait_for(pid: int) -> os.waitid_result | None:
    """Wait for a moment for the end of a child process, which is not reaped; None if it still runs.

    Raises:
        ChildProcessError: there is no such child.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while (status := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return status
