"""torch's own means, which are divided by what counts in them: targets, weights, chosen elements.

One process divides by that of the whole mini-batch; a micro-batch knows its own. So a loss that is such a
mean, times a number perhaps, is taken with what it was divided by, wherever it is called: by a loss function
or the last layer. What else such means become part of is not known. There, micro-batches in which as much of
a sample counts give the same as one process; others are refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from counterflow.api.loss_sum import LossSum

from ..dtensors import whole
from ..messages.values import Value
from ..stages.named_layer import LOSS, NamedLayer
from ..stages.sample_rows import SampleRows
from ..stages.stage_wrappers import Run, StageWrapper
from ..torch_private import LINEAR_CROSS_ENTROPY, whole_call
from .losses import Found, read_loss

_NOTHING = nullcontext()
_SCALING = frozenset(
    {"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide"}
)


class _Counted(NamedTuple):
    """The parts of a mean.

    Attributes:
        sum: sum before the division; None for a mean over elements, which stays as it is.
        weight: divisor.
    """

    sum: Tensor | None
    weight: Tensor | int


class Means(StageWrapper):
    """Finds such means in what makes a unit's loss, and what they are divided by.

    Args:
        layer: the number of the layer, or loss function, that gives the loss; None: nothing is watched.
        divides: whether a loss that is such a mean enters as a sum, divided by all that counts in the
            mini-batch. Where weights are updated before that is known it stays the micro-batch's mean, which
            is right where as much of a sample counts in each.
        compares: whether other losses are refused where more of a sample counts in some micro-batches.
    """

    break_reason = "it gives the loss"

    def __init__(self, layer: int | None = LOSS, *, divides: bool = True, compares: bool = True) -> None:
        self._layer, self.divides, self.compares = layer, divides, compares
        self._watch = _Watch()

    def watching(self) -> AbstractContextManager[object]:
        """Around what makes a unit's loss."""
        self._watch.weights.clear()
        return _NOTHING if self._layer is None else self._watch

    @override
    def applies_to(self, layer: NamedLayer) -> bool:
        return layer.index == self._layer

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        del layer
        with self.watching():
            return run(value, step, rows)

    def read(self, output: Any, samples: float) -> Found:
        """A unit's loss, of what was given by that which was watched last.

        Args:
            output: what it gave.
            samples: of the unit; of a slice, times its share of the sequence.

        Raises:
            ConfigError: it is no loss.
        """
        found, weights = read_loss(output), self._watch.weights
        self._watch.weights = []
        if isinstance(output, LossSum) or not weights:
            return found
        counted: _Counted | None = getattr(found.loss, _NAME, None)
        if counted is None or not self.divides:
            return found._replace(counts=_one_of(weights, samples)) if self.compares else found
        weight = counted.weight
        if counted.sum is None or not isinstance(weight, Tensor):
            return found._replace(elements=int(weight))
        metrics = {
            name: torch.where(weight > 0, torch.as_tensor(value, device=weight.device) * weight, 0)
            for name, value in found.metrics.items()
        }
        return Found(counted.sum, weight, metrics)


_NAME = "counterflow_counted"


def _one_of(weights: list[Tensor | int], samples: float) -> Tensor | float:
    """A number that identifies some weights: multiples of others by these factors never add up to it."""
    factors = [math.exp(1 / number) / samples for number in range(1, len(weights) + 1)]
    found: Tensor | float = 0.0
    for weight, factor in zip(weights, factors, strict=True):
        found = found + (weight.double() if isinstance(weight, Tensor) else weight) * factor
    return found


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor | int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = whole_call(func, kwargs or {})
        if func in _DIVISORS:
            return self._mean(func, args, kwargs)
        if len(args) == 2 and not kwargs and getattr(func, "__name__", "") in _SCALING:
            return _scaled(func, args)
        return func(*args, **kwargs)

    def _mean(self, func: Any, args: Any, kwargs: Any) -> Any:
        its = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
        reduction = its.get("reduction", "mean")
        by_batch = reduction == "batchmean" and func is functional.kl_div
        if not (reduction == "mean" or by_batch) or any(its.get(name) is not None for name in _OLD):
            return func(*args, **kwargs)
        weight, total = _DIVISORS[func](its), None
        if isinstance(weight, int):  # of no elements their sum, 0, for their mean would not be finite
            mean = whole(func(*args, **kwargs) if weight else func(**{**its, "reduction": "sum"}))
        elif weight.requires_grad:  # it is no part of a sum's gradient
            self.weights.append(weight.detach())
            return func(*args, **kwargs)
        else:
            total, weight = whole(func(**{**its, "reduction": "sum"})), whole(weight)
            mean = total / weight.to(total.dtype)
        setattr(mean, _NAME, _Counted(total, weight))
        self.weights.append(weight)
        return mean


_OLD = "size_average", "reduce"
"""torch's older arguments for a reduction."""


def _by_targets(its: Mapping[str, Any]) -> Tensor | int:
    """What counts of a cross entropy's targets; of targets that are shares of classes each."""
    target: Tensor = its["target"]
    classes, ignored = its.get("weight"), its.get("ignore_index")
    if target.is_floating_point():
        return target.numel() // target.shape[min(1, target.dim() - 1)]
    counts = target != (-100 if ignored is None else ignored)
    if classes is None:
        return counts.sum()
    by: Tensor = classes.detach().double()
    return (by[target.where(counts, 0)] * counts).sum()


def _by_weights(its: Mapping[str, Any]) -> Tensor | int:
    """The weights' sum, of an error that is divided by it."""
    weight = its.get("weight")
    return weight.double().sum() if isinstance(weight, Tensor) else _by_elements(its)


def _by_elements(its: Mapping[str, Any]) -> int:
    first, target = its["input"], its["target"]
    if first.shape == target.shape:
        return first.numel()  # type: ignore[no-any-return]
    return math.prod(torch.broadcast_shapes(first.shape, target.shape))


def _by_rows(its: Mapping[str, Any]) -> int:
    """The rows of an error that is made of each."""
    first: Tensor = its["input"]
    return first.shape[0] if first.dim() > 1 else 1


def _by_pairs(its: Mapping[str, Any]) -> int:
    return math.prod(torch.broadcast_shapes(its["input1"].shape, its["input2"].shape, its["target"].shape))


def _by_divergence(its: Mapping[str, Any]) -> int:
    return its["input"].shape[0] if its.get("reduction") == "batchmean" else _by_elements(its)


def _scaled(func: Any, args: Any) -> Any:
    """A mean times, or divided by, a number is one too."""
    result = func(*args)
    first, second = args
    counted: _Counted | None = getattr(first, _NAME, None)
    if counted is not None and isinstance(second, (int, float)):
        total = None if counted.sum is None else func(counted.sum, second)
        setattr(result, _NAME, _Counted(total, counted.weight))
    return result


_DIVISORS: dict[Any, Callable[[Mapping[str, Any]], Tensor | int]] = {
    **dict.fromkeys((functional.cross_entropy, functional.nll_loss, *LINEAR_CROSS_ENTROPY), _by_targets),
    **dict.fromkeys((functional.mse_loss, functional.l1_loss), _by_weights),
    **dict.fromkeys(
        (
            functional.smooth_l1_loss,
            functional.huber_loss,
            functional.binary_cross_entropy,
            functional.binary_cross_entropy_with_logits,
            functional.poisson_nll_loss,
            functional.soft_margin_loss,
            functional.hinge_embedding_loss,
            functional.gaussian_nll_loss,
        ),
        _by_elements,
    ),
    functional.kl_div: _by_divergence,
    functional.margin_ranking_loss: _by_pairs,
    functional.cosine_embedding_loss: lambda its: its["target"].numel(),
    **dict.fromkeys(
        (
            functional.multilabel_margin_loss,
            functional.multi_margin_loss,
            functional.multilabel_soft_margin_loss,
        ),
        _by_rows,
    ),
}
"""What each of torch's functions divides by, of its arguments by name."""

_ARGUMENTS = {function: tuple(inspect.signature(function).parameters) for function in _DIVISORS}
"""Their arguments' names, in order."""

UNWATCHED = Means(None)
"""Means of stages without a loss."""
