"""Renames that give a checkpoint its name: at every moment the old or the new one has it, or can get it back.

Linux exchanges two names in one call, if the file system supports it. Otherwise the old checkpoint is renamed
aside first, to a name by which it still counts.

Invariant: a process that is killed between any two calls leaves a whole checkpoint of that step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

_FROM_HERE, _EXCHANGE = -100, 2
"""Constants of renameat2: names are relative to the working folder, and both remain."""


def aside(folder: Path) -> Path:
    """Name of a checkpoint while another of the same step takes its place."""
    return folder.with_name(f".{folder.name}.old")


def put(draft: Path, folder: Path) -> None:
    """Give a complete draft its name, in place of an existing checkpoint of that name.

    Raises:
        OSError: renaming failed; an existing checkpoint keeps its name.
    """
    if not folder.exists():
        rename(draft, folder)
        return
    if exchange(draft, folder):
        shutil.rmtree(draft, ignore_errors=True)
        return
    old = aside(folder)
    shutil.rmtree(old, ignore_errors=True)
    rename(folder, old)
    try:
        rename(draft, folder)
    except OSError:
        rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def rename(source: Path, target: Path) -> None:
    """Rename a folder; tolerates a repeated request: NFS then does not find what it has just renamed.

    Raises:
        OSError: the folder is not renamed.
    """
    before = source.stat()
    try:
        source.rename(target)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if os.path.samestat(target.stat(), before):
                return
        raise


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders at once; False if unsupported, and nothing changed."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return bool(call(_FROM_HERE, os.fsencode(first), _FROM_HERE, os.fsencode(second), _EXCHANGE) == 0)
