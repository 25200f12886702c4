"""Tensors without values that a recording left in an object of the user's, and their removal.

Invariant: after ``remove_leaks`` no such tensor is left, or an error names the object that has it.
"""

from __future__ import annotations

import gc
from collections import deque
from types import CellType, ModuleType
from typing import Any

from counterflow.errors import ConfigError

from .instances import instances_of
from .tracing_internals import FakeTensor, RecordingMode
from .walk import LRU_CACHE

_DEEPEST = 4
"""Largest number of tuples, lists and dicts around a tensor that a cache has as one entry."""


def remove_leaks() -> None:
    """Remove the tensors of recordings, of which none is in progress, from caches.

    Raises:
        ConfigError: an object that is no cache has one.
    """
    if not _leaks():
        return
    gc.collect()
    level: list[Any] = [*_leaks()]
    for _ in range(_DEEPEST + 1):
        level = _remove(level)
        if not level:
            return


def _leaks() -> list[FakeTensor]:
    return [fake for fake in instances_of(FakeTensor) if type(fake.fake_mode) is RecordingMode]


def _remove(objects: list[Any]) -> list[Any]:
    """Remove objects from the caches and dicts that refer to them; return further containers that do."""
    containers: list[Any] = []
    numbers = set(map(id, objects))
    # One search for all of them: each goes through all objects of the process.
    for owner in gc.get_referrers(*objects):
        if owner is objects:
            continue
        if type(owner) is LRU_CACHE:
            owner.cache_clear()
        elif isinstance(owner, dict):
            _remove_entries(owner, numbers)
        elif isinstance(owner, (list, tuple, set, deque, CellType)):
            containers.append(owner)
    return containers


def _remove_entries(entries: dict[Any, Any], numbers: set[int]) -> None:
    owners = [o for o in gc.get_referrers(entries) if getattr(o, "__dict__", None) is entries]
    names = [name for name, value in list(entries.items()) if id(value) in numbers]
    caches = [o for o in gc.get_referrers(entries) if type(o) is LRU_CACHE]
    for cache in caches:
        cache.cache_clear()
    if not owners:
        for name in names:
            entries.pop(name, None)
        return
    owner = owners[0]
    place = f"module {owner.__name__}" if isinstance(owner, ModuleType) else f"a {type(owner).__name__}"
    raise ConfigError(
        f"a forward sets {', '.join(map(repr, names))} of {place} to a tensor that it computes, which no "
        "layers found automatically would do; keep it in the module whose forward makes it"
    )
