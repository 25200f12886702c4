"""A loss that is a sum and what it weighs, and the targets of which a slice has a part.

It is what a model's loss function gives and reads, and the runtime reads and gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LossSum(NamedTuple):
    """A loss that is normalised over the whole mini-batch: by tokens that count, say.

    The mini-batch's loss is the sum of all ``sum`` divided by that of all ``weight``, over micro-batches and
    replicas, and so are the gradients; a micro-batch of weight 0 is one of many.

    Attributes:
        sum: over what counts, not its mean; 0 where nothing counts.
        weight: how much counts, 0 or more.
        metrics: likewise sums, told divided by the weight in ``Step.metrics``.
    """

    sum: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Tensor | float] = {}


class SliceOf(NamedTuple):
    """What a slice of a target is of.

    Attributes:
        whole: the target of the whole sequence.
        start: the slice's first position in it.
        dim: the dimension of the positions.
    """

    whole: Tensor
    start: int
    dim: int


SLICE = "counterflow_slice"
"""The attribute under which a slice of a target has a ``SliceOf``."""


def whole_target(target: Tensor) -> Tensor:
    """The target of the whole sequence, where a loss function is given a slice's; else the target itself.

    A loss that divides by what counts in each sample needs it to know how much that is: what it returns for
    a slice is divided by what counts in the whole sample, times the whole length over the slice's.

    Args:
        target: a tensor of the targets, as the loss function was given it.
    """
    of: SliceOf | None = getattr(target, SLICE, None)
    return target if of is None else of.whole


def next_target(target: Tensor, last: float) -> Tensor:
    """The target one position further on, of the same shape; so a loss shifts targets that are a slice's.

    Args:
        target: a tensor of the targets, as the loss function was given it.
        last: what the sequence's last position gets, one that does not count: -100 for torch's losses.
    """
    of: SliceOf = getattr(target, SLICE, SliceOf(target, 0, min(1, target.dim() - 1)))
    length = target.shape[of.dim]
    rest = of.whole.narrow(of.dim, of.start + 1, min(length, of.whole.shape[of.dim] - of.start - 1))
    if rest.shape[of.dim] == length:
        return rest
    shape = (*target.shape[: of.dim], 1, *target.shape[of.dim + 1 :])
    return torch.cat([rest, rest.new_full(shape, last)], of.dim)
