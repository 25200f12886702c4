"""Disturbance of measurements by other programs: how it is noticed, and what remains of a time without it.

A processor that others use as well makes every time longer and none shorter. Three signs of it are read: time
in which threads were ready and had no processor, spread of repeats, and steps that are slower than the
fastest. Nothing is measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from counterflow.common.laps import Lap, Reading, lap

WAITING = 0.05
"""Share of a step's ops in which computing threads waited for a processor, from which it is disturbed."""

SLOWER = 1.25
"""Multiple of the fastest step from which a step is disturbed."""

LOW, HIGH = 0.1, 0.9
"""Quantiles of repeats between which a time is said to be."""


class ThreadTimes(NamedTuple):
    """Seconds of a thread on a processor, and seconds in which it was ready to run and had none."""

    processor: float
    waiting: float


def thread_times(tasks: Path = Path("/proc/self/task")) -> dict[str, ThreadTimes]:
    """Times of each thread of this process since it began, by its number.

    They are empty if the system does not count them; Linux does, in ``schedstat``.

    Args:
        tasks: folder with one of each thread.
    """
    times = {}
    for thread in tasks.glob("*"):
        try:
            numbers = (thread / "schedstat").read_text(encoding="ascii").split()
        except OSError:  # it has ended
            continue
        if len(numbers) > 1:
            times[thread.name] = ThreadTimes(int(numbers[0]) / 1e9, int(numbers[1]) / 1e9)
    return times


def computing_wait(begin: Mapping[str, ThreadTimes], end: Mapping[str, ThreadTimes]) -> float:
    """Seconds in which a computing thread had no processor between two readings: the longest of all threads'.

    Threads compute that had a processor for half as long as the busiest one, or longer. The others carry
    messages and wait for each other on a quiet machine, too.

    >>> before = {"1": ThreadTimes(1.0, 0.0), "2": ThreadTimes(0.0, 0.0)}
    >>> computing_wait(before, {"1": ThreadTimes(5.0, 0.5), "2": ThreadTimes(0.25, 3.0)})
    0.5
    """
    zero = ThreadTimes(0.0, 0.0)
    passed = []
    for thread, times in end.items():
        earlier = begin.get(thread, zero)
        passed.append(ThreadTimes(times.processor - earlier.processor, times.waiting - earlier.waiting))
    busiest = max((times.processor for times in passed), default=0.0)
    return max((times.waiting for times in passed if 2 * times.processor >= busiest), default=0.0)


def waiting_share(laps: Sequence[Lap]) -> float | None:
    """Share of laps' time in which others had their thread's processor; None if no lap tells.

    >>> waiting_share([Lap(2.0, 1.5, 0), Lap(2.0, 1.5, 0), Lap(9.0, 1.0, 2)])
    0.25
    """
    exact = [lap for lap in laps if lap.waits == 0]
    wall = sum(lap.wall for lap in exact)
    return max(0.0, 1.0 - sum(lap.processor for lap in exact) / wall) if wall else None


def thread_lap(begin: Reading, end: Reading) -> Lap:
    """The lap between two readings of a thread; one with which others compute is known by the wall alone."""
    result = lap(begin, end)
    return result if torch.get_num_threads() == 1 else result._replace(waits=None)


def is_exact(laps: Sequence[Lap]) -> bool:
    """True if in most laps the thread never waited by itself, so that these take their processor's seconds.

    In the few others a lock or a message was awaited that the work does not need. If most laps wait, waits
    belong to the work: it sleeps, or reads a file.
    """
    return bool(laps) and 2 * sum(lap.waits == 0 for lap in laps) >= len(laps)


def undisturbed(laps: Sequence[Lap], *, exact: bool | None = None) -> list[float]:
    """Seconds of laps of one kind without those in which others had the processor.

    Args:
        laps: the laps.
        exact: True: laps without waits, by their seconds of a processor; False: all, by the wall; None: as
            ``is_exact``.

    >>> undisturbed([Lap(2.0, 1.0, 0), Lap(1.0, 1.0, 0), Lap(9.0, 1.0, 2)])
    [1.0, 1.0]
    >>> undisturbed([Lap(2.0, 0.1, 1), Lap(2.0, 0.1, 1)])  # it sleeps
    [2.0, 2.0]
    """
    if is_exact(laps) if exact is None else exact:
        return [lap.processor for lap in laps if lap.waits == 0]
    return [lap.wall for lap in laps]


_ODD = 5
"""Multiple of the median from which a duration is discarded, because the machine was busy with something
else.
"""


def mean_seconds(seconds: Sequence[float]) -> float:
    """Mean of durations without the odd ones; 0 if there are none.

    >>> mean_seconds([1.0, 2.0, 3.0, 99.0])
    2.0
    """
    if not seconds:
        return 0.0
    most = _ODD * statistics.median(seconds)
    return statistics.fmean(duration for duration in seconds if duration <= most)


def quiet_seconds(seconds: Sequence[float], *, quiet: bool) -> float:
    """Seconds of an event that was repeated: the mean, or on a busy machine the minimum.

    A step is a sum of events, so one that now and then takes longer does so in a step, too. A busy machine
    makes an event longer and never shorter.

    Args:
        seconds: seconds of each, one or more.
        quiet: True if no other program had the processors.
    """
    return mean_seconds(seconds) if quiet else min(seconds)


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Steps that were timed, equal on all workers.

    Attributes:
        seconds: seconds of each step.
        waiting: share in which a worker's computing threads waited for a processor, of the worker that waited
            most: of its ops' time if their laps tell, otherwise of the step's.
    """

    seconds: tuple[float, ...]
    waiting: tuple[float, ...]

    @property
    def quiet(self) -> int:
        """Number of steps that were not disturbed."""
        most = SLOWER * min(self.seconds, default=0.0)
        rows = zip(self.seconds, self.waiting, strict=True)
        return sum(seconds <= most and waiting <= WAITING for seconds, waiting in rows)

    def suffice(self, repeats: int) -> bool:
        """True if as many steps as wanted were not disturbed, or twice as many were timed, which bounds the
        time that a busy machine can take, or none, as there is nothing to time.
        """
        nothing_timed = not self.seconds
        return nothing_timed or self.quiet >= repeats or len(self.seconds) >= 2 * repeats
