"""One writer of a run's folder: a lock between processes, and a fence between attempts of the same run.

The lock is the operating system's, on a file in the folder, which names the holder. It ends with the process
that holds it, so a killed run leaves none behind.

Workers that were frozen or cut off cannot know that their attempt is over, so each attempt has a mark in a
file of the folder; the next attempt replaces it, and the end of the run removes it. A worker that is about to
write checks that the mark is still that of its own attempt.

Invariant: while a lock is held its file exists and is the one that every other process would open. An attempt
is over as soon as another has begun, or the run has ended; storage that cannot be read says nothing. Time
passes between the check and the write, so drafts have names of their own and are checked again once they
exist, and each attempt has a new file of metrics.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import secrets
from pathlib import Path

from counterflow.errors import ConfigError, WorkerError

_LOG = logging.getLogger(__name__)

LOCK = ".lock"
ATTEMPT = ".attempt"


class Lock:
    """A lock that is held from its construction until ``release``.

    Args:
        folder: folder of a run.

    Raises:
        ConfigError: another process holds the lock.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._handle: int | None = None
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(handle, 200).decode(errors="replace").strip()
                os.close(handle)
                raise ConfigError(
                    f"{folder}: {owner or 'another process'} writes a run there; wait for its end, or name "
                    "another folder"
                ) from None
            except OSError as error:
                _LOG.warning(
                    "%s cannot be locked (%s): make sure that no other run writes there",
                    folder,
                    error.strerror or error,
                )
            try:
                if os.path.samestat(self._path.stat(), os.fstat(handle)):
                    self._handle = handle
                    break
            except FileNotFoundError:
                pass
            os.close(handle)  # the last holder removed its file
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


class Fence:
    """Keeps one attempt at a run from writing after the next one has begun.

    Args:
        folder: folder of the run, on storage that all workers share; until ``join`` the one that this worker
            expects.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark: str | None = None
        """Mark of this attempt; None: unknown, and never over."""

    @property
    def _path(self) -> Path:
        return self.folder / ATTEMPT

    def join(self, folder: Path, mark: str | None) -> None:
        """Take folder and mark from rank 0, which may have numbered the folder."""
        self.folder, self.mark = folder, mark

    def begin(self) -> None:
        """Begin an attempt, which ends those before; only the process that holds the folder's lock may call
        it.
        """
        self.mark = secrets.token_hex(8)
        draft = self._path.with_name(f"{ATTEMPT}.{self.mark}")
        try:
            draft.write_text(self.mark, encoding="ascii")
            draft.replace(self._path)
        except OSError:  # on a full disk: without a mark earlier attempts are over too
            self.mark = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        finally:  # also if a signal ends the process here
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def current(self) -> str | None:
        """The mark in the folder; None if there is none, or storage cannot be read."""
        try:
            return self._path.read_text(encoding="ascii")
        except (OSError, ValueError):
            return None

    def over(self) -> bool:
        """True if another attempt has begun, or the run has ended."""
        if self.mark is None:
            return False
        try:
            return self._path.read_bytes() != self.mark.encode()
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def check(self) -> None:
        """Raise an error if the attempt is over.

        Raises:
            WorkerError: the attempt is over.
        """
        if self.over():
            if not self.folder.is_dir():
                raise WorkerError(
                    f"{self.folder} was removed while the run writes there; start the run again"
                )
            raise WorkerError(
                f"this attempt at the run in {self.folder} is over: another one has begun, or the run "
                "has ended; nothing more is written"
            )

    def end(self) -> None:
        """Remove the mark, unless it is another attempt's."""
        if self.mark is not None and not self.over():
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
