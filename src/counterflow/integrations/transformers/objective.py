"""The computation of a trainer on a batch as one model: its loss, and the outputs that it evaluates.

Invariant: capturing the objective leaves the trainer unchanged; metrics that it noted from tensors without
values are removed.
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
    """A trainer, shared by copies of an objective."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Objective(nn.Module):
    """A trainer's ``compute_loss`` around its model.

    Args:
        trainer: a trainer of transformers.
        model: the model that it trains.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._shared = _Shared(trainer)

    def forward(self, inputs: Mapping[str, Any], items: Tensor | None = None) -> dict[str, Any]:
        """The loss of a batch, and the model's outputs without it.

        Args:
            inputs: inputs of the model, with labels.
            items: for each sample, the divisor of the loss of the whole step.
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
    """Restore a trainer's attributes and metrics after this context."""
    before = dict(vars(trainer))
    metrics = copy.deepcopy(before.get("_metrics"))
    try:
        yield
    finally:
        vars(trainer).update(before)
        if metrics is not None:
            trainer._metrics = metrics  # noqa: SLF001 - TRL's trainers have no other name for them


def weighed(output: Mapping[str, Any], target: Tensor) -> LossSum:
    """The loss of a micro-batch, weighted as it enters the step's.

    Args:
        output: output of an objective.
        target: for each sample (factor, factor for each sample, weight): the loss is multiplied by the first,
            and by the number of samples times the second; the weights of the samples add up to 1 in a step.
    """
    loss: Tensor = output["loss"]
    factor = target[0, 0] + target[0, 1] * len(target)
    return LossSum(loss * factor.to(loss.dtype), target[:, 2].sum())


def weights(samples: int, *, factor: float, per_sample: float, weight: float) -> Tensor:
    """A target of ``weighed``."""
    return torch.tensor([[factor, per_sample, weight]], dtype=torch.float64).repeat(samples, 1)
