"""A loss that is a sum and what it weighs, and the targets of which a slice has a part.

It is what a model's loss function gives and reads, and the runtime reads and gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


WHOLE = "counterflow_whole"
"""The attribute under which a slice of a target has the whole one."""


def whole_target(target: Tensor) -> Tensor:
    """The target of the whole sequence, where a loss function is given a slice's; else the target itself.

    A loss that divides by what counts in each sample needs it to know how much that is: what it returns for
    a slice is divided by what counts in the whole sample, times the whole length over the slice's.

    Args:
        target: a tensor of the targets, as the loss function was given it.
    """
    found: Any = getattr(target, WHOLE, target)
    return found  # type: ignore[no-any-return]
