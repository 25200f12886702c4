"""Folders in the system's temporary folder, and the removal of those of killed processes.

A process locks a file in each of its folders. The operating system ends the lock with the process, so a
folder whose file is not locked is abandoned: the next launch of this user removes it.

Invariant: a folder without such a file is never removed; a file appears in its folder when it is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = "counterflow.lock"

_NAMES = ("counterflow-*", "pymp-*")
"""Folders of launches, and of the sockets of processes to fork from, which ``multiprocessing`` makes."""

_locks: dict[Path, int] = {}
"""Open locks of this process by folder."""


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Make the folder of one launch; abandoned ones are removed first."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix="counterflow-") as name:
        lock(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(_locks.pop(Path(name)))


def lock(folder: Path) -> None:
    """Mark a folder as used by this process until it ends; a second call does nothing."""
    if folder in _locks:
        return
    draft = folder / f"{_LOCK}.draft"
    handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # without locks the folder counts as abandoned by nobody
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(folder / _LOCK)
    _locks[folder] = handle


def remove_abandoned() -> None:
    """Remove folders of processes of this user that are gone."""
    root = Path(tempfile.gettempdir())
    for pattern in _NAMES:
        for folder in root.glob(pattern):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            return False
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
