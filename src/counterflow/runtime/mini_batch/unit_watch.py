"""Output and loss of one unit of a mini-batch, saved as the schedule computes them."""

from __future__ import annotations

from typing import Any

from ..messages.values import Unit
from .loss_output import UnitLoss
from .losses import Losses


class UnitWatch:
    """Saves the outputs and losses of one unit on the worker that computes its loss.

    Args:
        micro_batch: number of the unit's micro-batch.
        part: number of the part of the micro-batch; None: all its slices.
        count: number of outputs to save.
        has_loss: whether losses are saved too.
    """

    def __init__(self, micro_batch: int, part: int | None, count: int, *, has_loss: bool) -> None:
        self.micro_batch, self.part, self.count = micro_batch, part, count
        self._has_loss = has_loss
        self.outputs: dict[int, Any] = {}
        """Outputs of the last layer by part."""
        self._entries: list[UnitLoss] = []

    def covers(self, unit: Unit) -> bool:
        """Return whether a unit is watched."""
        return unit.micro_batch == self.micro_batch and self.part in (None, unit.part)

    def save_loss(self, entry: UnitLoss) -> None:
        """Save the loss of a watched unit."""
        self._entries.append(entry)

    @property
    def complete(self) -> bool:
        """True if all outputs and losses are saved."""
        return len(self._entries if self._has_loss else self.outputs) == self.count

    def loss(self) -> float | None:
        """Mean loss of the unit; None: it has no loss."""
        return mean_loss(self._entries) if self._has_loss else None


def mean_loss(entries: list[UnitLoss]) -> float:
    """Mean loss of the units of one micro-batch."""
    (mean,) = Losses(entries=entries).by_micro_batch().values()
    return mean
