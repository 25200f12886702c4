"""Copies of the weights that a device is making while training goes on.

Invariant: what changes weights or optimiser state is ordered behind the copies that were begun before it.
"""

from __future__ import annotations

from collections.abc import Callable


class PendingCopies:
    """Copies of one worker's state that may not be complete."""

    def __init__(self) -> None:
        self._orders: list[Callable[[], None]] = []

    def add(self, order: Callable[[], None]) -> None:
        """Let the next change of weights or optimiser state (update, load, ``averaged``) call ``order``.

        Args:
            order: orders further work of the device behind a copy.
        """
        self._orders.append(order)

    def order(self) -> None:
        """Order what changes state from here on behind all pending copies; the host does not wait."""
        while self._orders:
            self._orders.pop()()
