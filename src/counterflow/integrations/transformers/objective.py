"""What a trainer computes of a batch, as one model: its loss, and what it evaluates by.

Invariant: the trainer is as it was before the objective was captured; what it noted of tensors without
numbers is gone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from counterflow.loss_sum import LossSum


class _Shared:
    """A trainer, which copies of an objective share."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Objective(nn.Module):
    """A trainer's ``compute_loss`` around its model.

    Args:
        trainer: of transformers.
        model: that it trains.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._shared = _Shared(trainer)

    def forward(self, inputs: Mapping[str, Any], items: Tensor | None = None) -> dict[str, Any]:
        """The loss of a batch, and the model's outputs without it.

        Args:
            inputs: as the model takes them, with labels.
            items: for each sample, what the loss of the whole step is divided by.
        """
        loss, outputs = self._shared.trainer.compute_loss(
            self.model,
            dict(inputs),
            return_outputs=True,
            num_items_in_batch=None if items is None else items[0],
        )
        if isinstance(outputs, Mapping):
            left_out = {
                "loss",
                *getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ()),
            }
            found = [v for name, v in outputs.items() if name not in left_out]
        else:
            found = list(outputs[1:])
        return {"loss": loss, "outputs": [value for value in found if isinstance(value, Tensor)]}


@contextmanager
def as_it_was(trainer: Any) -> Iterator[None]:
    """After this context a trainer has the attributes that it had, and the metrics."""
    before = dict(vars(trainer))
    metrics = copy.deepcopy(before.get("_metrics"))
    try:
        yield
    finally:
        vars(trainer).update(before)
        if metrics is not None:
            trainer._metrics = metrics  # noqa: SLF001 - TRL's trainers have no other name for them


def weighed(output: Mapping[str, Any], target: Tensor) -> LossSum:
    """The loss of a micro-batch, as it enters the step's.

    Args:
        output: of an objective.
        target: for each sample (factor, factor for each sample, weight): the loss is multiplied by the first
            and the number of samples times the second; what the samples weigh adds up to 1 in a step.
    """
    loss: Tensor = output["loss"]
    factor = target[0, 0] + target[0, 1] * len(target)
    return LossSum(loss * factor.to(loss.dtype), target[:, 2].sum())


def weights(samples: int, *, factor: float, per_sample: float, weight: float) -> Tensor:
    """A target of ``weighed``."""
    return torch.tensor([[factor, per_sample, weight]], dtype=torch.float64).repeat(samples, 1)
