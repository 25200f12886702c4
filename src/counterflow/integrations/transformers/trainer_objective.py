"""The computation of a trainer on a batch as one model: its loss, and the outputs that it evaluates.

Invariant: capturing the objective leaves the trainer unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import LossSum

from .trl import noting

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Inputs that tell flash attention where packed samples begin; they have no number for each sample."""


_CLASSIFIES = re.compile("For(Sequence|Image|Video|Audio)Classification$")


def settle_problem_type(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Set the kind of a classification as the model's first forward would set it in its config.

    A forward that changes the config cannot be recorded. The rule is that of transformers'
    ``ForSequenceClassificationLoss``.

    Args:
        model: the model.
        batch: inputs of the model, with labels.
    """
    config, labels = getattr(model, "config", None), batch.get("labels")
    if not _CLASSIFIES.search(type(model).__name__) or not isinstance(labels, Tensor):
        return
    if config is None or getattr(config, "problem_type", "") is not None:
        return
    if config.num_labels == 1:
        config.problem_type = "regression"
    elif labels.dtype in (torch.long, torch.int):
        config.problem_type = "single_label_classification"
    else:
        config.problem_type = "multi_label_classification"


class _Shared:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __deepcopy__(self, memo: object) -> Self:
        return self


class TrainerObjective(nn.Module):
    """A trainer's ``compute_loss`` around its model.

    Args:
        trainer: a trainer of transformers.
        model: the model that it trains.
    """

    unobserved = frozenset({"_metrics", "_total_train_tokens", "model", "model_wrapped"})
    """Attributes of the trainer that a forward sets and restores itself."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._shared = _Shared(trainer)

    def observed_objects(self) -> dict[str, Any]:
        """Objects around the model whose attributes ``compute_loss`` may read, by name, for recordings."""
        trainer = self._shared.trainer
        objects = {"trainer": trainer, "trainer.args": trainer.args, "trainer.state": trainer.state}
        return {label: object_ for label, object_ in objects.items() if object_ is not None}

    def forward(
        self,
        inputs: Mapping[str, Any],
        items: Tensor | None = None,
        twice: Mapping[str, Tensor] | None = None,
        packed: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The loss of a batch, the model's other outputs with samples, and what the trainer notes.

        Args:
            inputs: inputs of the model, with labels.
            items: for each sample, the divisor of the loss of the whole step.
            twice: further inputs, which have a number for each pair of samples, given twice.
            packed: further inputs of ``PACKED``.
        """
        trainer = self._shared.trainer
        fused = trainer.has_fused_head  # its outputs would take a second forward

        inputs = dict(inputs) | {name: tensor.chunk(2)[0] for name, tensor in (twice or {}).items()}
        inputs |= packed or {}

        def run() -> Any:
            models = trainer.model, trainer.model_wrapped
            trainer.model = trainer.model_wrapped = self.model  # its mode decides what is noted
            try:
                return trainer.compute_loss(
                    self.model,
                    dict(inputs),
                    return_outputs=not fused,
                    num_items_in_batch=None if items is None else items[0],
                )
            finally:
                trainer.model, trainer.model_wrapped = models

        result, metrics = noting(trainer, run)
        loss, outputs = (result, {}) if fused else result
        if not isinstance(outputs, Mapping):
            outputs = {str(number): value for number, value in enumerate(outputs[1:])}
        of_samples = {name: v for name, v in outputs.items() if name != "loss" and _is_of_samples(v)}
        return {"loss": loss, "outputs": of_samples, "metrics": metrics}


def _is_of_samples(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves)


@contextmanager
def as_it_was(trainer: Any) -> Iterator[None]:
    """Restore a trainer's attributes and metrics after this context."""
    before = dict(vars(trainer))
    try:
        yield
    finally:
        vars(trainer).update(before)


def weighed(output: Mapping[str, Any], target: Tensor) -> LossSum:
    """The loss of a micro-batch, weighted as it enters the step's.

    Args:
        output: output of an objective.
        target: for each sample (factor, factor for each sample, weight): the loss is multiplied by the first,
            and by the number of samples times the second; the weights of the samples add up to 1 in a step.
    """
    loss: Tensor = output["loss"]
    factor = target[0, 0] + target[0, 1] * len(target)
    weight = target[:, 2].sum()
    metrics = {name: value.to(weight.dtype) * weight for name, value in output["metrics"].items()}
    return LossSum(loss * factor.to(loss.dtype), weight, metrics)


def weights(samples: int, *, factor: float, per_sample: float, weight: float) -> Tensor:
    """A target of ``weighed``."""
    return torch.tensor([[factor, per_sample, weight]], dtype=torch.float64).repeat(samples, 1)
