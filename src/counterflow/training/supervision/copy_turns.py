"""Decides after which steps the training's state is copied to memory: after a fixed number, or as often as
time allows.

The cost of a copy is measured: how long it blocks the worker that begins it, and how much longer the next
step takes, during which it is written.

Invariant: all workers copy after the same steps, because they choose by the same numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

SHARE = 0.05
"""Maximum share of a run's time that copies cost."""

_LEAST = 2
"""Minimum steps between copies, so some steps follow no copy and show how long a step takes without one."""

_REMEMBERED = 5
"""Number of copies and steps whose median is used."""


class CopyTurns:
    """Decides when a copy is due.

    Args:
        every: steps between copies; None: chosen so copies cost at most ``SHARE`` of the time.
        first: number of updates made before.
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
        """Whether to copy after this many updates."""
        return done - self._last >= self.every if self._chosen else done % self.every == 0

    def copied(self, done: int, seconds: float) -> None:
        """Note a copy that was begun after ``done`` updates and blocked the worker for ``seconds``."""
        self._last = done
        self._held.append(seconds)

    def stepped(self, number: int, seconds: float) -> None:
        """Note a step that took ``seconds``; ``number`` updates were made before it."""
        after = self._held and number == self._last
        (self._after if after else self._plain).append(seconds)

    def row(self) -> list[float]:
        """Seconds of a copy on this worker, and of a step without one; 0: unknown."""
        step = statistics.median(self._plain) if self._plain else 0.0
        held = statistics.median(self._held) if self._held else 0.0
        late = statistics.median(self._after) - step if self._after and self._plain else 0.0
        return [held + max(0.0, late), step]

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Choose the steps between copies from all workers' ``row``."""
        cost, step = max(row[0] for row in rows), min(row[1] for row in rows)
        if self._chosen and cost and step:
            self.every = max(_LEAST, math.ceil(cost / (SHARE * step)))
