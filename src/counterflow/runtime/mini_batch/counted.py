"""Cross entropies, negative log-likelihoods and weighted errors, which torch divides by what counts in them.

One process divides by that of the whole mini-batch; a micro-batch knows its own. So a loss that is such a
mean, times a number perhaps, is taken as its sum and what it is divided by, wherever it is called: by a
loss function or the last layer. What else such means become part of is not known. There, micro-batches in
which as many targets a sample count give the same as one process; others are refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from counterflow.loss_sum import LossSum

from ..mesh.dtensors import whole
from ..torch_private import whole_call
from .losses import Found, read_loss
from .tape import Recorder, Tape

_SCALING = frozenset(
    {"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide"}
)


class _Counted(NamedTuple):
    """Of a mean: what it is made of."""

    sum: Tensor
    weight: Tensor


class Means:
    """Finds such means in what makes a unit's loss, and what they are divided by.

    Args:
        in_layer: the number of the layer that gives the loss; None: a loss function does.
    """

    def __init__(self, *, in_layer: int | None = None) -> None:
        self.in_layer = in_layer
        self._watch = _Watch()
        self._tried = in_layer is not None  # a layer's targets come through the stages
        self._rule: Tape | None = None

    @property
    def has_rule(self) -> bool:
        """Whether it is known how what counts comes of the targets."""
        return self._rule is not None

    def watching(self, output: Any = None, target: Any = None) -> AbstractContextManager[object]:
        """Around what makes a unit's loss; ``output`` and ``target`` are the loss function's."""
        self._watch.weights.clear()
        self._watch.recorder = None if self._tried else Recorder(output, target)
        return self._watch

    def count(self, targets: Sequence[Any] | None) -> Tensor | float | None:
        """What counts in some units, from their targets; None if that is not known."""
        if self._rule is None or not targets:
            return None
        try:
            return self._rule.of(targets)
        except Exception:
            return None

    def read(self, output: Any, samples: int) -> Found:
        """A unit's loss, of what was given by that which was watched last.

        Args:
            output: what it gave.
            samples: of the unit.

        Raises:
            ConfigError: it is no loss.
        """
        found, weights = read_loss(output), list(self._watch.weights)
        self._watch.weights.clear()
        counted: _Counted | None = getattr(found.loss, _NAME, None)
        recorder, self._watch.recorder = self._watch.recorder, None
        if recorder is not None:
            self._tried = True
            weight = output.weight if isinstance(output, LossSum) else counted and counted.weight
            self._rule = None if weight is None else recorder.tape(weight)
        if found.weight is not None or not weights:
            return found
        if counted is None:
            return found._replace(counts=_one_of(weights) / samples)
        weight = counted.weight
        metrics = {
            name: torch.where(weight > 0, torch.as_tensor(value, device=weight.device) * weight, 0)
            for name, value in found.metrics.items()
        }
        return Found(counted.sum, weight, metrics)


_NAME = "counterflow_counted"


def _one_of(weights: list[Tensor]) -> Tensor:
    """One number that tells some weights from others: their multiples by these factors never add up alike."""
    return torch.stack([w.double() * math.exp(1 / number) for number, w in enumerate(weights, 1)]).sum()


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.recorder: Recorder | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = whole_call(func, kwargs or {})
        if func in _MEANS:
            result = self._mean(func, args, kwargs)
        elif len(args) == 2 and not kwargs and getattr(func, "__name__", "") in _SCALING:
            result = _scaled(func, args)
        else:
            result = func(*args, **kwargs)
        if self.recorder is not None:
            self.recorder.note(func, args, kwargs, result)
        return result

    def _mean(self, func: Any, args: Any, kwargs: Any) -> Any:
        signature, divisor = _MEANS[func]
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        its = given.arguments
        as_mean = its["reduction"] == "mean" and its.get("size_average") is None and its.get("reduce") is None
        divided = divisor(its) if as_mean else None
        if divided is None:
            return func(*args, **kwargs)
        count, by = divided
        weight = count(*by)
        if weight.requires_grad:  # it is no part of a sum's gradient
            self.weights.append(weight.detach())
            return func(*args, **kwargs)
        its["reduction"] = "sum"
        total, weight = whole(func(*given.args, **given.kwargs)), whole(weight)
        if self.recorder is not None:
            self.recorder.note(count, by, {}, weight)
        mean = total / weight.to(total.dtype)
        setattr(mean, _NAME, _Counted(total, weight))
        self.weights.append(weight)
        return mean


_Divisor = Callable[[Mapping[str, Any]], "tuple[Callable[..., Tensor], tuple[Any, ...]] | None"]
"""Of a mean's arguments to what it is divided by, as a function and its arguments; None: its elements."""


def _by_targets(its: Mapping[str, Any]) -> tuple[Callable[..., Tensor], tuple[Any, ...]] | None:
    target, classes, ignored = its["target"], its["weight"], its["ignore_index"]
    if target.is_floating_point():
        return None
    return _count, (
        target,
        -100 if ignored is None else ignored,
        classes if classes is None else classes.detach(),
    )


def _by_weights(its: Mapping[str, Any]) -> tuple[Callable[..., Tensor], tuple[Any, ...]] | None:
    weight = its["weight"]
    return None if weight is None else (_added, (weight,))


def _added(weight: Tensor) -> Tensor:
    return weight.double().sum()


def _count(target: Tensor, ignored: int, classes: Tensor | None) -> Tensor:
    """How much of the targets counts."""
    counts = target != ignored
    return counts.sum() if classes is None else (classes.double()[target.where(counts, 0)] * counts).sum()


def _scaled(func: Any, args: Any) -> Any:
    """A mean times, or divided by, a number is one too."""
    result = func(*args)
    first, second = args
    counted: _Counted | None = getattr(first, _NAME, None)
    if counted is not None and isinstance(second, (int, float)):
        setattr(result, _NAME, _Counted(func(counted.sum, second), counted.weight))
    return result


def _of(*functions: Any, divisor: _Divisor) -> dict[Any, tuple[inspect.Signature, _Divisor]]:
    return {function: (inspect.signature(function), divisor) for function in functions}


_MEANS = {
    **_of(
        functional.cross_entropy, functional.nll_loss, functional.linear_cross_entropy, divisor=_by_targets
    ),
    **_of(functional.mse_loss, functional.l1_loss, divisor=_by_weights),
}
