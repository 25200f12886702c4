"""After which steps the training's state is copied to memory: each so many, or as often as time allows.

What a copy costs is measured: how long it holds the worker that begins it, and how much longer the next step
takes, beside which it is written.

Invariant: all workers copy after the same steps, because they choose by the same numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

SHARE = 0.05
"""The part of a run's time that copies may cost."""

_LEAST = 2
"""Steps between copies that are chosen: some steps follow none, and tell what a step takes without."""

_REMEMBERED = 5
"""Copies and steps whose median is what one takes."""


class CopyTurns:
    """When it is time for a copy.

    Args:
        every: steps between copies; None: chosen, so that they cost at most ``SHARE`` of the time.
        first: updates made before.
    """

    def __init__(self, every: int | None, first: int) -> None:
        self.every = _LEAST if every is None else every
        """Steps between copies."""
        self._chosen = every is None
        self._last = first
        self._held: deque[float] = deque(maxlen=_REMEMBERED)
        self._after: deque[float] = deque(maxlen=_REMEMBERED)
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)

    def due(self, done: int) -> bool:
        """Whether to copy after so many updates."""
        return done - self._last >= self.every if self._chosen else done % self.every == 0

    def copied(self, done: int, seconds: float) -> None:
        """A copy was begun after so many updates, and held the worker for so long."""
        self._last = done
        self._held.append(seconds)

    def stepped(self, number: int, seconds: float) -> None:
        """A step, whose number says how many updates were made before, took so long."""
        after = self._held and number == self._last
        (self._after if after else self._plain).append(seconds)

    def row(self) -> list[float]:
        """Seconds that a copy costs here, and that a step takes without; 0: not known."""
        step = statistics.median(self._plain) if self._plain else 0.0
        held = statistics.median(self._held) if self._held else 0.0
        late = statistics.median(self._after) - step if self._after and self._plain else 0.0
        return [held + max(0.0, late), step]

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Choose by what all workers' ``row`` says."""
        cost, step = max(row[0] for row in rows), min(row[1] for row in rows)
        if self._chosen and cost and step:
            self.every = max(_LEAST, math.ceil(cost / (SHARE * step)))
