"""A loss that is a sum and what it weighs; what a model's loss function gives and the runtime reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
