"""The lock of a run's folder: one process writes at a time, however many are started for it and however one
ends.

It is a lock of the operating system on a file in the folder, which names the holder. It ends with the process
that holds it, so a killed run leaves none behind.

Invariant: while a lock is held its file exists and is the one that every other process would open.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from pathlib import Path

from counterflow.errors import ConfigError

_LOG = logging.getLogger(__name__)

LOCK = ".lock"


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
