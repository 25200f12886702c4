"""Units of seconds and of memory in pictures and tables, with their texts. This module draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from counterflow.common.number_texts import byte_size, compact


class AmountUnit(Enum):
    """The unit of a worker's memory."""

    BYTES = "bytes"
    ACTIVATIONS = "activations"

    def text(self, amount: float) -> str:
        """``amount`` with its unit.

        >>> AmountUnit.BYTES.text(3 * 2**30), AmountUnit.ACTIVATIONS.text(1.0)
        ('3 GiB', '1 activation')
        """
        if self is AmountUnit.BYTES:
            return byte_size(amount, digits=3)
        return f"{compact(amount)} activation{'' if amount == 1 else 's'}"

    def short(self, amount: float) -> str:
        """``amount`` in little space: activations without their unit."""
        return byte_size(amount, digits=3) if self is AmountUnit.BYTES else compact(amount)


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """A unit of time: its symbol and its seconds."""

    symbol: str
    seconds: float

    def text(self, seconds: float) -> str:
        """``seconds`` in this unit, with its symbol."""
        return f"{compact(seconds / self.seconds)} {self.symbol}"


def time_unit(makespan_seconds: float, *, in_forwards: bool = False) -> TimeUnit:
    """The unit in which a timeline of this length reads well.

    Args:
        makespan_seconds: length of the timeline.
        in_forwards: whether times are in units of a forward instead of seconds (``Costs.in_forwards``).

    >>> time_unit(30.0).text(30.0), time_unit(0.25).text(0.125), time_unit(3e-4).text(3e-4)
    ('30 s', '125 ms', '300 µs')
    >>> time_unit(30.0, in_forwards=True).text(30.0)
    '30 F'
    """
    if in_forwards:
        return TimeUnit("F", 1.0)
    if makespan_seconds >= 1 or makespan_seconds <= 0:
        return TimeUnit("s", 1.0)
    return TimeUnit("ms", 1e-3) if makespan_seconds >= 1e-3 else TimeUnit("µs", 1e-6)


def nice_step(span: float, most: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten that divides ``span`` into at most ``most`` parts.

    >>> nice_step(30, 8), nice_step(0.7, 10)
    (5.0, 0.1)
    """
    step = 1e-9
    while True:
        for factor in (1, 2, 5):
            if span <= step * factor * most * (1 + 1e-9):
                return float(f"{step * factor:.6g}")
        step *= 10
