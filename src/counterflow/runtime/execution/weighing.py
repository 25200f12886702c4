"""Loss normaliser: the weights of the losses of all steps of one update.

Invariant: gradients are divided by all that their losses weigh once, before the update.
"""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.tolerances import SUMS

from ..mini_batch.loss_output import consistent
from ..mini_batch.losses import refuse_no_graph
from ..mini_batch.step_report import LossWeights, Normaliser
from .step import Workers


class LossNormaliser:
    """Weights of the losses since the last update.

    Args:
        workers: where this worker is.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._weight, self._counted = 0.0, Normaliser(0)  # of the losses since the last update
        self.divisor: float | None = None
        """What those of the first step since then were divided by; None: there was none."""

    def add(
        self, parts: Sequence[LossWeights], step: int, samples: int, *, updates: bool
    ) -> tuple[float, float]:
        """Add up what a step's losses weigh.

        Args:
            parts: as for ``Workers.weight``.
            step: the step's number.
            samples: of all replicas, which it was divided by.
            updates: whether an update is made with it.

        Returns:
            What the gradients' sums are multiplied by, and what the step's own sums are.

        Raises:
            ConfigError: losses of this step, or of one since the last update, count something else.
        """
        refuse_no_graph(parts)
        weight, counted = self._workers.weight(parts, step)
        self._counted = self._counted | counted if self._counted else counted
        if not consistent(self._counted):
            raise ConfigError(
                "the losses of the steps of an update are divided by several things: by samples, elements, "
                "tokens or a LossSum's weight; return the same kind of loss in all of them"
            )
        self._weight += weight
        scale = 1 / self._weight
        if updates:
            self._weight, self._counted, self.divisor = 0.0, Normaliser(0), None
        elif self.divisor is None:
            self.divisor = float(samples)
        return 1.0 if abs(scale - 1.0) < SUMS else scale, 1 / weight
