"""Growth of a layer's seconds with the length of a sequence, which slices divide.

A layer takes f + l s + a s² for a share s of a sequence: a fixed part, one for each position, and attention
of each position to all before it. The three follow from the seconds of a whole sequence, of half and of a
quarter of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from counterflow.errors import ConfigError
from counterflow.execution import Batching
from counterflow.runtime.mini_batch.samples import cut, samples_in

LENGTHS = 1.0, 0.5, 0.25
"""The timed shares of a sequence."""

FEWEST = 4
"""Positions of the shortest sequence that has a quarter."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Shares of the seconds of a whole sequence.

    Attributes:
        attention: the share that grows with the square of the length.
        fixed: the share that is the same for any length.
    """

    attention: float = 0.0
    fixed: float = 0.0

    @classmethod
    def of(cls, lengths: Sequence[float], seconds: Sequence[float], *, attends: bool = True) -> Growth:
        """The growth that the seconds of some lengths show: the one without negative parts that fits best.

        Args:
            lengths: shares of a sequence, 1 first.
            seconds: duration at each length.
            attends: whether positions are affected by those before them; if not, there is no attention.

        >>> Growth.of(LENGTHS, [8.0, 3.0, 1.625])  # 1 + 1 s + 6 s²
        Growth(attention=0.75, fixed=0.125)
        >>> Growth.of(LENGTHS, [4.0, 2.0, 1.0]), Growth.of(LENGTHS, [3.0, 3.0, 3.0])
        (Growth(attention=0.0, fixed=0.0), Growth(attention=0.0, fixed=1.0))
        """
        if len(lengths) < len(LENGTHS) or min(seconds) <= 0:
            return cls()
        powers = (0, 1, 2) if attends else (0, 1)
        # Errors are proportional to what is measured, so that all equations are to count alike.
        rows = np.array([[s**p / t for p in powers] for s, t in zip(lengths, seconds, strict=True)])
        least, best = np.inf, np.zeros(3)
        for count in range(1, len(powers) + 1):
            for chosen in map(list, combinations(powers, count)):
                parts = np.zeros(3)
                parts[chosen] = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
                error = float(np.square(rows @ parts[: len(powers)] - 1).sum())
                if parts.min() >= 0 and error < least:
                    least, best = error, parts
        fixed, _, attention = (round(float(part / best.sum()), _DIGITS) for part in best)
        return cls(min(attention, round(1.0 - fixed, _DIGITS)), fixed)


_DIGITS = 6
"""Digits of a share; no timer knows more."""


def positions_of_batch(inputs: Any, targets: Any, batching: Batching) -> int:
    """Positions of a mini-batch's sequences; 0 if inputs and targets have no such dimension, or too few of it
    for their quarter.
    """
    try:
        positions = samples_in(inputs, batching.sequence_dims, "inputs", uncut=True)
        of_targets = samples_in(targets, batching.target_sequence_dims, "targets", uncut=True)
    except ConfigError:
        return 0
    return positions if positions == of_targets and positions >= FEWEST else 0


def at_lengths(inputs: Any, targets: Any, batching: Batching) -> list[tuple[float, Any, Any]]:
    """A mini-batch whose sequences end after each of the timed shares: that share, inputs and targets.

    It is the mini-batch alone if ``positions_of_batch`` finds no positions.
    """
    positions = positions_of_batch(inputs, targets, batching)
    if not positions:
        return [(1.0, inputs, targets)]
    batches = []
    for share in LENGTHS:
        count = int(share * positions)
        shorter = cut(inputs, slice(0, count), batching.sequence_dims)
        shorter_targets = cut(targets, slice(0, count), batching.target_sequence_dims)
        batches.append((count / positions, shorter, shorter_targets))
    return batches
