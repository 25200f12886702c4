"""The losses of models of transformers, as sums over what counts.

Invariant: over a whole mini-batch, whatever its micro-batches, a loss is the one that the model itself gives
with labels: the mean over all labels that are not -100.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from counterflow.errors import ConfigError
from counterflow.loss_sum import SLICE, LossSum, next_target

IGNORED = -100
"""The label of what does not count."""


def loss(output: Any, labels: Tensor) -> LossSum:
    """The loss of a model of transformers, from what it gives and the labels.

    Of a causal model (labels are the token ids, shifted here, as by the model itself), a masked one, and a
    classifier of sequences or tokens.

    Args:
        output: what the last of ``layers(model)`` gives.
        labels: as the model takes them; -100 does not count.

    Raises:
        ConfigError: the loss of such an output is not known.
    """
    kind, logits = type(output).__name__, getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"a {kind} has no logits; give the Pipeline a loss function of your own")
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if "CausalLMOutput" in kind:
        if hasattr(labels, SLICE):
            return _counted(logits, next_target(labels, IGNORED))
        return _counted(logits[:, :-1], labels[:, 1:])
    if kind in ("MaskedLMOutput", "TokenClassifierOutput"):
        return _counted(logits, labels)
    if "SequenceClassifierOutput" in kind:
        return _classified(logits, labels)
    raise ConfigError(
        f"the loss of a {kind} is not known; give the Pipeline a loss function of your own, of the output "
        "and the labels"
    )


def _counted(logits: Tensor, labels: Tensor) -> LossSum:
    """Cross-entropy where there are labels."""
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return LossSum(total, (labels != IGNORED).sum())


def _classified(logits: Tensor, labels: Tensor) -> LossSum:
    """As transformers takes them: whole numbers are classes, others values or chances of several."""
    if logits.shape[1] == 1:
        found = functional.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype), reduction="sum")
        return LossSum(found, float(len(labels)))
    if not labels.is_floating_point():
        found = functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return LossSum(found, (labels != IGNORED).sum())
    found = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return LossSum(found, float(labels.numel()))
