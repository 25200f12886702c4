"""A loss as a sum and its weight, and targets of which a slice has a part.

A model's loss function returns the former and reads the latter; the runtime does the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .contexts import CONTEXT, gathered, share_sequence


class LossSum(NamedTuple):
    """A loss that is normalised over the whole mini-batch, for instance by the number of tokens that count.

    The mini-batch's loss is the sum of all ``sum`` divided by that of all ``weight``, over micro-batches and
    replicas, and so are the gradients; micro-batches of weight 0 are allowed.

    Attributes:
        sum: sum of the losses that count, not their mean; 0 if nothing counts.
        weight: weight of the sum, such as its number of tokens; 0 or more.
        metrics: further sums, which ``Step.metrics`` reports divided by the weight.
    """

    sum: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Tensor | float] = {}


class SliceOf(NamedTuple):
    """The target of which a slice is a part.

    Attributes:
        target: the target of the whole sequence.
        start: the slice's first position in it.
        dim: the dimension of the positions.
    """

    target: Tensor
    start: int
    dim: int


SLICE = "counterflow_slice"
"""Attribute of a slice of a target that contains its ``SliceOf``."""


def whole_target(target: Tensor) -> Tensor:
    """The target of the whole sequence if the target is of a slice, or a share; otherwise the target itself.

    A loss that divides by the number of tokens that count in each sample needs it: its value for a slice is
    divided by that number in the whole sample, times the whole length over the slice's.

    Args:
        target: a tensor of the targets that the loss function was given.
    """
    of = _slice_of(target)
    context = CONTEXT.get()
    return of.target if context is None else gathered(of.target, context, of.dim)


def next_target(target: Tensor, last: float) -> Tensor:
    """The target one position further on, of the same shape; so a loss shifts targets that are a slice's.

    Args:
        target: a tensor of the targets that the loss function was given.
        last: target of the sequence's last position, a value that does not count: -100 for torch's losses.
    """
    of, context = _slice_of(target), CONTEXT.get()
    length = target.shape[of.dim]
    if context is not None:
        following = _shifted(gathered(of.target, context, of.dim), of.dim, last)
        return share_sequence(following, context.share, of.dim).narrow(of.dim, of.start, length)
    rest = of.target.narrow(of.dim, of.start + 1, min(length, of.target.shape[of.dim] - of.start - 1))
    if rest.shape[of.dim] == length:
        return rest
    return _extended(rest, of.dim, last)


def _slice_of(target: Tensor) -> SliceOf:
    # A target that is not cut is a slice of all of it.
    of: SliceOf = getattr(target, SLICE, SliceOf(target, 0, min(1, target.dim() - 1)))
    return of


def _shifted(target: Tensor, dim: int, last: float) -> Tensor:
    return _extended(target.narrow(dim, 1, target.shape[dim] - 1), dim, last)


def _extended(target: Tensor, dim: int, last: float) -> Tensor:
    shape = (*target.shape[:dim], 1, *target.shape[dim + 1 :])
    return torch.cat([target, target.new_full(shape, last)], dim)
