"""The losses of transformers models, as sums over the labels that count.

Invariant: over a whole mini-batch, for any micro-batches, a loss equals the one that the model itself returns
with labels: the mean over all labels that are not -100.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from counterflow.api.contexts import CONTEXT
from counterflow.api.loss_sum import SLICE, LossSum, next_target
from counterflow.errors import ConfigError

IGNORED = -100
"""Label that does not count."""


def loss(output: Any, labels: Tensor) -> LossSum:
    """The loss of a transformers model, from its output and the labels.

    It supports causal models (labels are the token ids, which are shifted here, as by the model itself),
    masked ones, and classifiers of sequences or tokens.

    Args:
        output: output of the last of ``layers(model)``.
        labels: labels as the model accepts them; -100 does not count.

    Raises:
        ConfigError: the loss of such an output is unknown.
    """
    kind, logits = type(output).__name__, getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"a {kind} has no logits; give the Pipeline a loss function of your own")
    if getattr(output, "aux_loss", None) is not None:
        raise ConfigError(
            "the output has the loss of its routers (aux_loss), which this loss function does not add; give "
            "the Pipeline list_layers=counterflow.models.hf.layers, which adds it, or your own loss function"
        )
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if "CausalLMOutput" in kind:
        if hasattr(labels, SLICE) or CONTEXT.get() is not None:
            return _counted(logits, next_target(labels, IGNORED))
        return _counted(logits[:, :-1], labels[:, 1:])
    if kind in ("MaskedLMOutput", "TokenClassifierOutput"):
        return _counted(logits, labels)
    if "SequenceClassifierOutput" in kind:
        return _classified(logits, labels)
    raise ConfigError(
        f"the loss of a {kind} is unknown; give the Pipeline a loss function of your own, of the output "
        "and the labels"
    )


def _counted(logits: Tensor, labels: Tensor) -> LossSum:
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return LossSum(total, (labels != IGNORED).sum())


def _classified(logits: Tensor, labels: Tensor) -> LossSum:
    # As transformers interprets labels: whole numbers are classes, others values or probabilities.
    if logits.shape[1] == 1:
        loss_sum = functional.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype), reduction="sum")
        return LossSum(loss_sum, float(len(labels)))
    if not labels.is_floating_point():
        loss_sum = functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return LossSum(loss_sum, (labels != IGNORED).sum())
    loss_sum = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return LossSum(loss_sum, float(labels.numel()))
