"""The models' losses, each the mean over its samples.

Invariant: for a batch cut into parts, ``loss(batch)`` is the sum of ``n_i/n · loss(part_i)``, ``n_i`` being
the samples of part i. So a pipeline may weight its micro-batches by their samples, however many positions
count in each sample.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from counterflow.api.loss_sum import whole_target
from counterflow.errors import ConfigError

IGNORED = -100
"""Target of a position that does not count (torch's own default)."""


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the next token: the mean over samples of each sample's mean over its positions.

    Args:
        output: logits, [samples, positions, vocabulary].
        target: int64, [samples, positions]; -100 if a position does not count (padding).

    Raises:
        ConfigError: the shapes do not fit each other.

    >>> import torch
    >>> round(next_token_loss(torch.zeros(1, 2, 4), torch.tensor([[3, 1]])).item(), 4)  # ln 4
    1.3863
    """
    if output.dim() != 3 or output.shape[:2] != target.shape:
        raise ConfigError(
            f"logits of shape {list(output.shape)} for targets of shape {list(target.shape)}: "
            "must be [samples, positions, vocabulary] and [samples, positions]"
        )
    losses = functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORED
    ).view(target.shape)
    full_target = whole_target(target)
    counted = (full_target != IGNORED).sum(dim=1).clamp(min=1)
    return (losses.sum(dim=1) / counted).mean() * (full_target.shape[1] / target.shape[1])


def masked_token_loss(
    output: Tensor | tuple[Tensor, Tensor], target: Tensor | tuple[Tensor, Tensor]
) -> Tensor:
    """Cross-entropy of the masked tokens, plus that of the next sentence if there are labels for it.

    Every sample is divided by its own number of masked tokens, and then the mean is over samples; a sample
    without one adds 0.

    Args:
        output: logits [samples, positions, vocabulary], or a tuple of these and of logits [samples, 2].
        target: int64, [samples, positions], -100 if a token is not masked; or a tuple of this and of
            labels [samples], 0 or 1.

    Raises:
        ConfigError: the shapes do not fit each other, or there are labels for a head that the model does not
            have.
    """
    tokens, follows = output if isinstance(output, tuple) else (output, None)
    masked, labels = target if isinstance(target, tuple) else (target, None)
    loss = next_token_loss(tokens, masked)
    if labels is None:
        return loss
    if follows is None:
        raise ConfigError("next-sentence labels for a model without that head: give the masked tokens alone")
    return loss + classification_loss(follows, labels)


def classification_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, the mean over samples.

    Args:
        output: logits, [samples, classes].
        target: int64, [samples].

    Raises:
        ConfigError: the shapes do not fit each other.
    """
    if output.dim() != 2 or output.shape[:1] != target.shape:
        raise ConfigError(
            f"logits of shape {list(output.shape)} for targets of shape {list(target.shape)}: "
            "must be [samples, classes] and [samples]"
        )
    return functional.cross_entropy(output, target)
