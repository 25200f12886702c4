"""The processes of a launch: started together, supervised until they end, none orphaned.

torch's elastic launch waits for ever if a process ends without a report and with exit code 0, as its own
wrapper of a process does after an interrupt. Here a process that ends before it is released has failed,
whatever its code.

Invariant: after ``end`` none is running, whatever signals were received. The module does not know their work.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from counterflow.common.external_signals import (
    end_fork_server,
    fork_server_failure,
    safe_path,
    signals_blocked,
)
from counterflow.errors import WorkerError

SendSignal = Callable[[int], None]
"""Sends each worker process a signal, once; threads get none."""

Supervisor = Callable[[SendSignal], None]
"""Called by a launch about ten times a second while its workers run; an error that it raises ends them
all."""

_MOMENT_SECONDS = 3.0
"""Time for processes to end before those that still run are reported."""

_KILLED_SECONDS = 5.0
"""Maximum time to wait for a killed process: one that a device blocks may never end."""


class Children:
    """Processes, by rank.

    Args:
        method: start method of ``multiprocessing``.
    """

    def __init__(self, method: Literal["forkserver", "spawn"]) -> None:
        self._context = multiprocessing.get_context(method)
        self._forked = method == "forkserver"
        self._processes: list[BaseProcess] = []
        self._ended: set[int] = set()
        self._signalled: set[int] = set()
        self._reads, self._writes = self._context.Pipe(duplex=False)

    def start(self, work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Start a process for each tuple of arguments, which gets also the connection for ``stay``.

        The process that workers are forked from may still be loading: this waits for it, unless it is
        interrupted.

        Raises:
            WorkerError: that process is gone, or the machine has no room for another one.
        """
        for rank, process_arguments in enumerate(arguments):
            process = self._context.Process(  # type: ignore[attr-defined]
                target=work, args=(*process_arguments, self._reads), name=f"counterflow worker {rank}"
            )
            with safe_path(), contextlib.nullcontext() if self._forked else signals_blocked():
                try:
                    process.start()
                except (EOFError, OSError) as error:
                    raise self._failed_start(error) from error
            self._processes.append(process)

    def _failed_start(self, error: EOFError | OSError) -> BaseException:
        end = fork_server_failure() if self._forked and isinstance(error, EOFError | ConnectionError) else ""
        if end:
            failed = WorkerError(f"the process that starts the workers {end}")
        elif isinstance(error, OSError) and error.errno in {errno.EAGAIN, errno.ENOMEM}:
            failed = WorkerError(f"no further process can be started: {error.strerror}")
        else:
            return error
        failed.lost = True
        return failed

    def ended(self, within_seconds: float) -> dict[int, int]:
        """Exit codes of processes that have ended since the last call, by rank; waits so long for one."""
        running = {p.sentinel: rank for rank, p in enumerate(self._processes) if rank not in self._ended}
        codes = {}
        for sentinel in connection.wait(list(running), within_seconds):
            assert isinstance(sentinel, int)
            rank = running[sentinel]
            self._processes[rank].join()
            self._ended.add(rank)
            codes[rank] = self._processes[rank].exitcode or 0
        return codes

    def signal_once(self, number: int) -> None:
        """Send each process that received no signal this one."""
        for process in self._processes:
            if process.pid is not None and process.pid not in self._signalled:
                self._signalled.add(process.pid)
                _send(process, number)

    def release(self) -> None:
        """Let processes end whose work is done; see ``stay``."""
        self._writes.close()

    def end(
        self,
        within_seconds: float,
        number: int | None = None,
        late: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Wait until all processes have ended; kill those that have not in time.

        Args:
            within_seconds: maximum time.
            number: signal to send first; None: they end by themselves.
            late: called with the ranks of those that have not ended after a moment.
        """
        self.release()
        with signals_blocked():
            deadline = time.monotonic() + within_seconds
            for process in self._processes:
                if number is not None:
                    _send(process, number)
            moment = min(within_seconds, _MOMENT_SECONDS)
            self._join(time.monotonic() + moment)
            running = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
            if late is not None and running:
                late(running)
                for rank in running:
                    if _is_stopped(self._processes[rank]):  # it handles no other signal
                        _send(self._processes[rank], signal.SIGKILL)
            self._join(deadline)
            for process in self._processes:
                _send(process, signal.SIGKILL)
            for process in self._processes:
                process.join(_KILLED_SECONDS)

    def _join(self, deadline: float) -> None:
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def abandon(self) -> None:
        """Terminate all processes, and the fork server, so that no late process starts."""
        self.end(0.0)
        if self._forked:
            end_fork_server()


def stay(connection: Connection) -> None:
    """Wait in a process whose work is done until all are done, as they may still need this process.

    Args:
        connection: connection from ``Children``.
    """
    with contextlib.suppress(EOFError, OSError):
        connection.recv()


def _is_stopped(process: BaseProcess) -> bool:
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] == ["T"]


def _send(process: BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
