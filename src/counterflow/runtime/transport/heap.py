"""Memory that a worker on cores has freed, and needs again in the next step."""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # numbers of glibc's parameters, from malloc.h

_MMAP_BYTES = 32 << 20
"""Bytes of a block from which it is mapped by itself: the most that glibc's own adjustment reaches."""

_TRIM_BYTES = 1 << 30
"""Bytes of free memory at the end of the heap from which glibc returns them to the system."""


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that a step frees; return True if it does.

    By default it returns the end of its heap to the system as soon as twice the largest block is free there.
    The next step gets the same pages again, and the system clears each: 2 to 9 % of a step
    (``benchmarks/heap.py``). An environment that tunes glibc's malloc, and another C library, stay as they
    are.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    library = ctypes.CDLL(None)
    if (
        "glibc.malloc" in tunables
        or any(name.startswith("MALLOC_") for name in os.environ)
        or not hasattr(library, "gnu_get_libc_version")
    ):
        return False
    set_option = library.mallopt
    return bool(set_option(_MMAP_THRESHOLD, _MMAP_BYTES) and set_option(_TRIM_THRESHOLD, _TRIM_BYTES))
