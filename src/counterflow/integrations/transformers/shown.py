"""The optimisers of a worker's stages, as one that a learning-rate scheduler and callbacks look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from counterflow.runtime.pipeline import Pipeline


class Shown(Optimizer):
    """Shows the groups of a pipeline's optimisers, whose options are theirs; its step updates them.

    Args:
        pipeline: whose.
        learning_rate: of a worker that trains nothing.
    """

    def __init__(self, pipeline: Pipeline, learning_rate: float) -> None:
        super().__init__([torch.zeros(1)], {"lr": learning_rate})
        groups = [group for one in pipeline.optimizers.values() for group in one.param_groups]
        self.param_groups = groups or self.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Nothing: the step of the pipeline has updated the weights."""
        del closure

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the pipeline sees to its gradients."""
        del set_to_none
