"""Laps of a thread: seconds by the wall, seconds of a processor, and whether the thread waited by itself.

A thread that computes and never waits takes as many seconds by the wall as of a processor, unless other
threads and programs have its processor in between. So for such a lap the processor's seconds are what a quiet
machine takes: exactly, as the difference is time in which the thread was ready to run and did not.
"""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from typing import Any, NamedTuple

if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage

    def _switches() -> int:
        return getrusage(RUSAGE_THREAD).ru_nvcsw
else:

    def _switches() -> int | None:
        return None


class Reading(NamedTuple):
    """Clocks of a thread at one moment.

    ``switches`` counts how often the thread gave up its processor by itself: for a lock, a message, a sleep.
    None: the system does not count.
    """

    wall: float
    processor: float
    switches: int | None


class Lap(NamedTuple):
    """Seconds of a thread between two readings, by the wall and of a processor.

    ``waits`` is how often it gave up its processor by itself; None: not known, or other threads compute with
    it.
    """

    wall: float
    processor: float
    waits: int | None


def read_start() -> Reading:
    """Read the clocks as a lap begins."""
    switches = _switches()
    return Reading(time.perf_counter(), time.thread_time(), switches)


def read_stop() -> Reading:
    """Read the clocks as a lap ends."""
    processor = time.thread_time()
    return Reading(time.perf_counter(), processor, _switches())


def lap(begin: Reading, end: Reading) -> Lap:
    """The lap between two readings.

    >>> lap(Reading(1.0, 0.5, 3), Reading(2.0, 0.75, 4))
    Lap(wall=1.0, processor=0.25, waits=1)
    """
    waits = None if begin.switches is None or end.switches is None else end.switches - begin.switches
    return Lap(end.wall - begin.wall, end.processor - begin.processor, waits)


class OpLap(NamedTuple):
    """An op that ran, its readings as it began and ended."""

    op: Any
    begin: Reading
    end: Reading


OP_LAPS: ContextVar[list[OpLap] | None] = ContextVar("counterflow_op_laps", default=None)
"""List for the laps of the last step's ops, of a pipeline that is made in this context; None: none are read.
"""
