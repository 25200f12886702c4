"""The factor of losses whose gradients would be too small for float16, as of ``torch.amp.GradScaler``.

Invariant: it is a power of two, so that scaling rounds nothing that does not overflow; and it follows from
what all workers gathered, so that it is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from counterflow.errors import ConfigError, WorkerError
from counterflow.execution import LARGEST_SCALE, SMALLEST_SCALE, Execution, is_scale

GROWTH, BACKOFF = 2.0, 0.5
"""What the scale is multiplied by after enough updates in a row, and after a skipped one."""


@dataclass(slots=True)
class LossScale:
    """A dynamic loss scale.

    Attributes:
        scale: what the losses of the next step are multiplied by.
        interval: updates in a row after which it grows.
        steady_updates: updates since it changed.
    """

    scale: float
    interval: int
    steady_updates: int = 0

    @classmethod
    def of(cls, execution: Execution) -> LossScale | None:
        """The one with which a run begins; None: its losses are not scaled."""
        first = execution.first_scale
        return None if first is None else cls(first, execution.loss_scale_interval)

    def update(self, step: int, *, skipped: bool) -> None:
        """Change it after the update of a step, or after one that was skipped.

        Raises:
            WorkerError: it would be too small for float32.
        """
        if skipped:
            if self.scale <= SMALLEST_SCALE:
                raise WorkerError(
                    f"step {step}: the loss or a gradient is not finite, though losses are scaled by "
                    f"{self.scale:g} only, after updates were skipped again and again; look for what is not "
                    "finite in the model, in its inputs or its targets"
                )
            self.scale, self.steady_updates = self.scale * BACKOFF, 0
            return
        self.steady_updates += 1
        if self.steady_updates >= self.interval:
            self.scale, self.steady_updates = min(self.scale * GROWTH, LARGEST_SCALE), 0

    def state(self) -> dict[str, float | int]:
        """State with which a run resumes."""
        return {"scale": self.scale, "growth_tracker": self.steady_updates}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume with what ``state`` returned."""
        self.scale, self.steady_updates = float(state["scale"]), state["growth_tracker"]

    def refuse_other(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that ``state`` did not return.

        Raises:
            ConfigError: it is one.
        """
        scale, updates = state.get("scale"), state.get("growth_tracker")
        if (
            not (isinstance(scale, int | float) and is_scale(scale))
            or not isinstance(updates, int)
            or updates < 0
        ):
            raise ConfigError(
                f"the training state has a loss scale of {scale!r} after {updates!r} updates; the scale must "
                "be a power of 2 from 2**-126 to 2**127, and the updates a count"
            )
