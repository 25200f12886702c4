"""The processes of a launch: started together, watched until they end, and none left behind.

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

from counterflow.errors import WorkerError

from .outside import end_server, safe_path, server_end, undisturbed

Tell = Callable[[int], None]
"""Sends each worker a signal, once; to threads nothing."""

Meanwhile = Callable[[Tell], None]
"""What a launch calls about ten times a second while its workers run; what it raises ends them all."""

_MOMENT_SECONDS = 3.0
"""Time for processes to end before those that still run are reported."""

_KILLED_SECONDS = 5.0
"""How long a process that was killed is waited for: one that a device holds may never go."""


class Children:
    """Processes, by rank.

    Args:
        method: how they are started.
    """

    def __init__(self, method: Literal["forkserver", "spawn"]) -> None:
        self._context = multiprocessing.get_context(method)
        self._forked = method == "forkserver"
        self._every: list[BaseProcess] = []
        self._ended: set[int] = set()
        self._told: set[int] = set()
        self._reads, self._writes = self._context.Pipe(duplex=False)

    def start(self, work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Start a process for each tuple of arguments; each gets also the line for ``stay``.

        The process that workers are forked from may still be loading: this waits for it, unless it is
        interrupted.

        Raises:
            WorkerError: that process is gone, or the machine has no room for another one.
        """
        for rank, given in enumerate(arguments):
            process = self._context.Process(  # type: ignore[attr-defined]
                target=work, args=(*given, self._reads), name=f"counterflow worker {rank}"
            )
            with safe_path(), contextlib.nullcontext() if self._forked else undisturbed():
                try:
                    process.start()
                except (EOFError, OSError) as error:
                    raise self._failed_start(error) from error
            self._every.append(process)

    def _failed_start(self, error: EOFError | OSError) -> BaseException:
        """The error to raise if a process cannot be started."""
        end = server_end() if self._forked and isinstance(error, EOFError | ConnectionError) else ""
        if end:
            failed = WorkerError(f"the process that starts the workers {end}")
        elif isinstance(error, OSError) and error.errno in {errno.EAGAIN, errno.ENOMEM}:
            failed = WorkerError(f"no further process can be started: {error.strerror}")
        else:
            return error
        failed.lost = True
        return failed

    def ended(self, within_seconds: float) -> dict[int, int]:
        """Exit codes of those that have ended since the last call, by rank; waits so long for one."""
        running = {p.sentinel: rank for rank, p in enumerate(self._every) if rank not in self._ended}
        found = {}
        for sentinel in connection.wait(list(running), within_seconds):
            assert isinstance(sentinel, int)
            rank = running[sentinel]
            self._every[rank].join()
            self._ended.add(rank)
            found[rank] = self._every[rank].exitcode or 0
        return found

    def tell(self, number: int) -> None:
        """Send each process one signal, and never another."""
        for process in self._every:
            if process.pid is not None and process.pid not in self._told:
                self._told.add(process.pid)
                _send(process, number)

    def let_go(self) -> None:
        """Let those end that have done their work; see ``stay``."""
        self._writes.close()

    def end(
        self,
        within_seconds: float,
        number: int | None = None,
        late: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Wait until all have ended; those that have not in time are killed.

        Args:
            within_seconds: how long they may take.
            number: the signal that asks them to; None: they end by themselves.
            late: called with the ranks of those that have not ended after a moment.
        """
        self.let_go()
        with undisturbed():
            deadline = time.monotonic() + within_seconds
            for process in self._every:
                if number is not None:
                    _send(process, number)
            moment = min(within_seconds, _MOMENT_SECONDS)
            self._join(time.monotonic() + moment)
            running = [rank for rank, process in enumerate(self._every) if process.is_alive()]
            if late is not None and running:
                late(running)
                for rank in running:
                    if _is_stopped(self._every[rank]):  # it handles no other signal
                        _send(self._every[rank], signal.SIGKILL)
            self._join(deadline)
            for process in self._every:
                _send(process, signal.SIGKILL)
            for process in self._every:
                process.join(_KILLED_SECONDS)

    def _join(self, deadline: float) -> None:
        """Wait for all until this time of ``time.monotonic``."""
        for process in self._every:
            process.join(max(0.0, deadline - time.monotonic()))

    def abandon(self) -> None:
        """End all at once, also what would fork one that nobody here knows of yet."""
        self.end(0.0)
        if self._forked:
            end_server()


def stay(line: Connection) -> None:
    """Wait in a process whose work is done until all are done, as others may still need this process.

    Args:
        line: connection from ``Children``.
    """
    with contextlib.suppress(EOFError, OSError):
        line.recv()


def _is_stopped(process: BaseProcess) -> bool:
    """Whether a signal has stopped a process; False where the system does not say."""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] == ["T"]


def _send(process: BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
