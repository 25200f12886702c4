"""A run's timeline while it goes on: that of a step now and then, where whoever looks finds it.

Invariant: all workers are asked at the same step, and rank 0 alone decides; what is shown costs no more than
one part in a hundred of the time, whatever a timeline takes to be gathered and written.
"""

from __future__ import annotations

import time

EVERY_SECONDS = 1.0
"""How often at most."""

_SHARE = 0.01
"""Of a run's time, at most."""


class Live:
    """When the next timeline is due; made on every worker, asked on rank 0 alone."""

    def __init__(self) -> None:
        self._due = 0.0

    def due(self) -> bool:
        """Whether it is time for one."""
        return time.perf_counter() >= self._due

    def made(self, began: float) -> None:
        """One that was begun then (``perf_counter``) is made."""
        now = time.perf_counter()
        self._due = now + max(EVERY_SECONDS, (now - began) / _SHARE)
