"""Disturbance of measurements by other programs: how it is noticed, and what remains of a time without it.

A processor that others use as well makes every time longer and none shorter. Three signs of it are read: time
in which threads were ready and had no processor, spread of repeats, and steps that are slower than the
fastest. Nothing is measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from counterflow.common.laps import Lap, Reading, lap

WAITING = 0.05
"""Share of a step in which threads waited for a processor, from which the step is disturbed."""

SLOWER = 1.25
"""Multiple of the fastest step from which a step is disturbed."""

LOW, HIGH = 0.1, 0.9
"""Quantiles of repeats between which a time is said to be."""


def waiting_seconds(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds in which threads of this process were ready to run and had no processor, in total.

    It is 0 if the system does not count them; Linux does, in the second number of ``schedstat``.

    Args:
        tasks: folder with one of each thread.
    """
    nanoseconds = 0
    for thread in tasks.glob("*"):
        try:
            numbers = (thread / "schedstat").read_text(encoding="ascii").split()
        except OSError:  # it has ended
            continue
        nanoseconds += int(numbers[1]) if len(numbers) > 1 else 0
    return nanoseconds / 1e9


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


def quiet_seconds(seconds: Sequence[float], waiting: Sequence[float]) -> float:
    """Seconds of one event of several, of which some were disturbed.

    It is the median of those in which no thread waited for a processor, as long as they are a third or more;
    otherwise the minimum of all, because a wait makes an event longer and never shorter.

    Args:
        seconds: seconds of each, one or more.
        waiting: share of each in which threads waited for a processor.

    >>> quiet_seconds([1.0, 9.0, 3.0], [0.0, 0.8, 0.0])
    2.0
    >>> quiet_seconds([2.0, 9.0, 8.0, 9.0], [0.1, 0.8, 0.8, 0.8])
    2.0
    """
    rows = zip(seconds, waiting, strict=True)
    quiet = [duration for duration, share in rows if share <= WAITING]
    return statistics.median(quiet) if 3 * len(quiet) >= len(seconds) else min(seconds)


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Steps that were timed, equal on all workers.

    Attributes:
        seconds: seconds of each step.
        waiting: share of each step in which threads of a worker waited for a processor, of the worker that
            waited most.
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
