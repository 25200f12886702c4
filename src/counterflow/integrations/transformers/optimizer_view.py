"""The optimisers of a worker's stages, shown as a single one to a learning-rate scheduler and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from counterflow.runtime.pipeline import Pipeline


class OptimizerView(Optimizer):
    """Shows the groups of a pipeline's optimisers with their own options; the pipeline's step updates them.

    Args:
        pipeline: pipeline of the optimisers.
        learning_rate: learning rate that a worker without trained weights shows.

    Attributes:
        step_was_skipped: whether the last step updated nothing, so the learning rate stays.
    """

    step_was_skipped = False

    def __init__(self, pipeline: Pipeline, learning_rate: float) -> None:
        super().__init__([torch.zeros(1)], {"lr": learning_rate})
        groups = [group for optimizer in pipeline.optimizers.values() for group in optimizer.param_groups]
        self.param_groups = groups or self.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the step of the pipeline has updated the weights."""
        del closure

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the pipeline resets its gradients."""
        del set_to_none
