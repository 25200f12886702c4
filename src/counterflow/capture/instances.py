"""All live objects of a class."""

from __future__ import annotations

import gc
from typing import TypeVar

_T = TypeVar("_T")


def instances_of(kind: type[_T]) -> list[_T]:
    """Live instances of exactly this class that the garbage collector tracks.

    An instance refers to its class, so these are among the referrers of the class. ``gc.get_objects`` would
    also contain tuples that other threads build at this moment, which then could not grow: a
    ``SystemError`` there.
    """
    return [referrer for referrer in gc.get_referrers(kind) if type(referrer) is kind]
