"""Results of forwards of one unit, and whether they agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.nearness import difference, tolerance

from ..mini_batch.batch import Batch
from ..mini_batch.unit_watch import UnitWatch
from .units import WitnessUnit


class Result(NamedTuple):
    """Result of a forward.

    Attributes:
        output: output of the model.
        loss: mean loss of the unit; None: the batch has no loss.
        draws: whether it drew random numbers.
        undecided: reason why nothing can be compared; empty: there is none.
        failure: error of the forward; empty: there is none.
        stateful: layer that keeps state between forwards; empty: there is none, or none was sought.
    """

    output: Any = None
    loss: float | None = None
    draws: bool = False
    undecided: str = ""
    failure: str = ""
    stateful: str = ""


@dataclass(slots=True)
class Comparison:
    """A comparison that is begun.

    Attributes:
        unit: unit that is compared.
        batch: mini-batch of the unit.
        watch: saves what the schedule computes.
        value: input of the model, on the worker that compares.
        target: target of the unit, on the worker that compares.
        result: result of the model's own forward, on the worker that compares.
    """

    unit: WitnessUnit
    batch: Batch
    watch: UnitWatch | None
    value: Any = None
    target: Any = None
    result: Result | None = None

    def schedule_result(self) -> Result:
        """Result that the schedule computed; of several slices only their mean loss."""
        assert self.watch is not None
        outputs = list(self.watch.outputs.values())
        return Result(outputs[0] if len(outputs) == 1 else None, self.watch.loss())


def same(one: Result, other: Result, least: float = 0.0) -> bool:
    """Return whether two results differ by rounding only.

    Args:
        one: a result with an output.
        other: a result; an output or a loss that is None is not compared.
        least: minimum of the relative difference that counts as rounding.
    """
    dtypes = [
        leaf.dtype
        for leaf in pytree.tree_leaves(one.output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    limit = tolerance(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32))
    limit = max(limit, least)
    if one.loss is not None and other.loss is not None and not _near(one.loss, other.loss, limit):
        return False
    return other.output is None or difference(one.output, other.output) <= limit


def _near(one: float, other: float, limit: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= limit * max(abs(one), abs(other))
    return math.isfinite(one) == math.isfinite(other)
