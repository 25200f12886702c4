"""A file that grows by whole lines, although storage may be full, slow or hang: adding a line does not block.

Invariant: the file contains the lines in their order, each one whole or not at all; lines that are not
written yet wait here. torch is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_LOG = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
"""Seconds that a line is waited for, so it is in the file whatever happens to this process next."""

_SETTLE_SECONDS = 60.0

_PIECE_BYTES = 65_536
"""Bytes of the file that are read at once."""


class Appending:
    """Appends to a file in a thread of its own.

    Args:
        path: an existing file; if it is removed or replaced, nothing is written.
        patience_seconds: maximum wait for a line.
        over: called before each write; returns whether nothing more may be written.
    """

    def __init__(
        self,
        path: Path,
        patience_seconds: float = _PATIENCE_SECONDS,
        *,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path, self.patience_seconds = path, patience_seconds
        self._over = over
        self._changed = threading.Condition()
        self._file = path.stat()
        self._written = self._file.st_size
        self._waiting = b""
        self._busy = False
        self._warned = False
        """Whether a warning said that lines wait."""

    def add(self, line: bytes) -> None:
        """Add a line; return when the line is in the file, or when that takes long or is impossible now.

        A warning reports waiting lines once; they are tried again with the next line.
        """
        with self._changed:
            self._waiting += line
            patience = (
                0.0 if self._busy else self.patience_seconds
            )  # storage that hangs is not waited for twice
            self._begin()
            self._changed.wait_for(lambda: not self._busy, patience)
            if self._busy and not self._warned:
                self._warn(f"it takes more than {self.patience_seconds:g} s")

    def settle(self, seconds: float = _SETTLE_SECONDS) -> None:
        """Try once more, and wait at most this long."""
        with self._changed:
            self._begin()
            self._changed.wait_for(lambda: not self._busy, seconds)

    def pieces(self, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes of the file and the waiting lines, piece by piece.

        A run's history grows with its steps, so a thread that copied it whole would need that much memory.
        """
        with self._changed:
            written, waiting = self._written, self._waiting
        remaining = min(size, written)
        with self.path.open("rb", buffering=0) as file:
            while remaining and (piece := file.read(min(remaining, _PIECE_BYTES))):
                remaining -= len(piece)
                yield piece
        if size > written:
            yield waiting[: size - written]

    @property
    def size(self) -> int:
        """Bytes of the file and the waiting lines; storage is not accessed."""
        with self._changed:
            return self._written + len(self._waiting)

    def _begin(self) -> None:
        if self._waiting and not self._busy:
            self._busy = True
            # A thread that waits for a lost mount must not keep the process from ending.
            threading.Thread(target=self._run, name="counterflow metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                lines = self._waiting
            problem = self._append(lines)
            with self._changed:
                if not problem:
                    self._written += len(lines)
                    self._waiting = self._waiting[len(lines) :]
                    self._warned = False
                elif not self._warned:
                    self._warn(problem)
                if problem or not self._waiting:
                    self._busy = False
                    self._changed.notify_all()
                    return

    def _append(self, lines: bytes) -> str:
        if self._over():
            return ""
        try:
            handle = os.open(self.path, os.O_WRONLY)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error.strerror)
        try:
            if not os.path.samestat(self._file, os.fstat(handle)):
                return ""
            done = os.pwrite(handle, lines, self._written)
            if done < len(lines):
                done += os.pwrite(
                    handle, lines[done:], self._written + done
                )  # raises the error that stopped the write
            return "" if done == len(lines) else "only a part of a line was written"
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(handle, self._written)
            return str(error.strerror)
        finally:
            os.close(handle)

    def _warn(self, problem: str) -> None:
        self._warned = True
        _LOG.warning("%s cannot be written: %s; training continues", self.path, problem)
