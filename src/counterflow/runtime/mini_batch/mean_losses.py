"""Detection of torch's own means, which are divided by targets, weights or chosen elements that count.

One process divides by that of the whole mini-batch; a micro-batch knows its own. So a loss that is such a
mean, times a number perhaps, is taken with what it was divided by, wherever it is called: by a loss function
or the last layer. What else such means become part of is not known. There, micro-batches in which as much of
a sample counts give the same as one process; others are refused.

Invariant: a sum replaces its mean only if nothing was done to the mean since: no change in place, no hook,
no other place in autograd's graph.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from counterflow.api.loss_sum import LossSum
from counterflow.api.torch_internals import in_checkpoint
from counterflow.common.tensors.dtensors import full_tensor
from counterflow.common.tensors.torch_private import has_hooks, whole_call
from counterflow.common.trees import version_of

from ..messages.values import Value
from ..stages.named_layer import LOSS, NamedLayer
from ..stages.sample_rows import SampleRows
from ..stages.stage_wrappers import Run, StageWrapper
from .loss_output import LossOutput, read_loss

_NOTHING = nullcontext()
_SCALING: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__", "multiply_"), torch.mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide", "divide"), torch.div),
    **dict.fromkeys(("div_", "__itruediv__", "true_divide_", "divide_"), torch.div),
}
"""Operators by name, those in place too, that multiply or divide by a number."""


class _Mean(NamedTuple):
    """Division that made a mean, a tensor that has it as an attribute.

    Attributes:
        sum: the sum before the division; None: a mean over elements, which stays as it is.
        weight: divisor.
        version: changes of the mean in place.
        node: its node of autograd; None: it had none, as in a checkpoint or in a custom function's forward.
        factor: the mean that it is a multiple of; None: it is none.
    """

    sum: Tensor | None
    weight: Tensor | int
    version: int
    node: Node | None
    factor: Tensor | None = None


def _note(mean: Tensor, total: Tensor | None, weight: Tensor | int, factor: Tensor | None = None) -> None:
    setattr(mean, _NAME, _Mean(total, weight, version_of(mean), mean.grad_fn, factor))


def _noted(mean: object) -> _Mean | None:
    """Return the division that made a tensor; None: there is none, or something was done to its result."""
    division: _Mean | None = getattr(mean, _NAME, None)
    if division is None or not isinstance(mean, Tensor):
        return None
    if version_of(mean) != division.version or mean.grad_fn is not division.node:
        return None
    tensor: Tensor | None = mean
    while tensor is not None:  # hooks may have been registered after it was multiplied
        if has_hooks(tensor):
            return None
        tensor = getattr(tensor, _NAME).factor
    return division


class MeanLossDetector(StageWrapper):
    """Detects such means in the computation of a unit's loss, and their divisors.

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
        self._recorder = _MeanRecorder()

    def watching(self) -> AbstractContextManager[object]:
        """Context in which a unit's loss is computed."""
        self._recorder.weights.clear()
        return _NOTHING if self._layer is None else self._recorder

    @override
    def applies_to(self, layer: NamedLayer) -> bool:
        return layer.index == self._layer

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        del layer
        with self.watching():
            return run(value, step, rows)

    def read(self, output: Any, samples: float) -> LossOutput:
        """Loss of one micro-batch, with the normaliser of the last observed mean.

        Args:
            output: output of the loss function, or of the last layer.
            samples: of the unit; of a slice, times its share of the sequence.

        Raises:
            ConfigError: it is no loss.
        """
        loss, weights = read_loss(output), self._recorder.weights
        self._recorder.weights = []
        if isinstance(output, LossSum) or not weights:
            return loss
        mean = _noted(loss.loss)
        if mean is None or not self.divides:
            return loss._replace(counts=_fingerprint(weights, samples)) if self.compares else loss
        weight = mean.weight
        if mean.sum is None or not isinstance(weight, Tensor):
            return loss._replace(elements=int(weight))
        metrics = {
            name: torch.where(weight > 0, torch.as_tensor(value, device=weight.device) * weight, 0)
            for name, value in loss.metrics.items()
        }
        return LossOutput(mean.sum, weight, metrics)


_NAME = "counterflow_counted"


def _fingerprint(weights: list[Tensor | int], samples: float) -> Tensor | float:
    """Number that identifies weights: no multiples of different weights by these factors sum to it."""
    factors = [math.exp(1 / index) / samples for index in range(1, len(weights) + 1)]
    number: Tensor | float = 0.0
    for weight, factor in zip(weights, factors, strict=True):
        number = number + (weight.double() if isinstance(weight, Tensor) else weight) * factor
    return number


class _MeanRecorder(TorchFunctionMode):
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
        arguments = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
        reduction = arguments.get("reduction", "mean")
        by_batch = reduction == "batchmean" and func is functional.kl_div
        if not (reduction == "mean" or by_batch) or any(arguments.get(name) is not None for name in _OLD):
            return func(*args, **kwargs)
        weight, total = _DIVISORS[func](arguments), None
        if in_checkpoint():  # it runs again without this mode, and has to save the same tensors
            self.weights.append(weight.detach() if isinstance(weight, Tensor) else weight)
            return func(*args, **kwargs)
        if isinstance(weight, int):  # of no elements their sum, 0, for their mean would not be finite
            mean = full_tensor(func(*args, **kwargs) if weight else func(**{**arguments, "reduction": "sum"}))
        elif weight.requires_grad:  # it is no part of a sum's gradient
            self.weights.append(weight.detach())
            return func(*args, **kwargs)
        else:
            total, weight = full_tensor(func(**{**arguments, "reduction": "sum"})), full_tensor(weight)
            mean = total / weight.to(total.dtype)
        _note(mean, total, weight)
        self.weights.append(weight)
        return mean


_OLD = "size_average", "reduce"
"""torch's older arguments for a reduction."""


def _by_targets(arguments: Mapping[str, Any]) -> Tensor | int:
    target: Tensor = arguments["target"]
    classes, ignored = arguments.get("weight"), arguments.get("ignore_index")
    if target.is_floating_point():
        return target.numel() // target.shape[min(1, target.dim() - 1)]
    counts = target != (-100 if ignored is None else ignored)
    if classes is None:
        return counts.sum()
    by: Tensor = classes.detach().double()
    return (by[target.where(counts, 0)] * counts).sum()


def _by_weights(arguments: Mapping[str, Any]) -> Tensor | int:
    weight = arguments.get("weight")
    return weight.double().sum() if isinstance(weight, Tensor) else _by_elements(arguments)


def _by_elements(arguments: Mapping[str, Any]) -> int:
    first, target = arguments["input"], arguments["target"]
    if first.shape == target.shape:
        return first.numel()  # type: ignore[no-any-return]
    return math.prod(torch.broadcast_shapes(first.shape, target.shape))


def _by_rows(arguments: Mapping[str, Any]) -> int:
    first: Tensor = arguments["input"]
    return first.shape[0] if first.dim() > 1 else 1


def _by_pairs(arguments: Mapping[str, Any]) -> int:
    return math.prod(
        torch.broadcast_shapes(
            arguments["input1"].shape, arguments["input2"].shape, arguments["target"].shape
        )
    )


def _by_divergence(arguments: Mapping[str, Any]) -> int:
    return (
        arguments["input"].shape[0] if arguments.get("reduction") == "batchmean" else _by_elements(arguments)
    )


def _scaled(func: Any, args: Any) -> Any:
    first, second = args
    mean = _noted(first) if isinstance(second, (int, float)) else None
    result = func(*args)
    if mean is not None:
        total = None if mean.sum is None else _SCALING[func.__name__](mean.sum, second)
        _note(result, total, mean.weight, mean.factor if result is first else first)
    return result


_LINEAR_CROSS_ENTROPY = getattr(functional, "linear_cross_entropy", functional.cross_entropy)
"""torch has it since 2.13."""

_DIVISORS: dict[Any, Callable[[Mapping[str, Any]], Tensor | int]] = {
    **dict.fromkeys((functional.cross_entropy, functional.nll_loss, _LINEAR_CROSS_ENTROPY), _by_targets),
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
    functional.cosine_embedding_loss: lambda arguments: arguments["target"].numel(),
    **dict.fromkeys(
        (
            functional.multilabel_margin_loss,
            functional.multi_margin_loss,
            functional.multilabel_soft_margin_loss,
        ),
        _by_rows,
    ),
}
"""Divisors of torch's functions, computed from their arguments by name."""

_ARGUMENTS = {function: tuple(inspect.signature(function).parameters) for function in _DIVISORS}
"""Argument names of these functions, in order."""

UNWATCHED = MeanLossDetector(None)
"""Detector of stages without a loss."""
