"""Loss of one micro-batch, as a loss function or a last layer returned it.

Invariant: a loss enters the mini-batch's loss as a sum: a mean over samples times their number, a mean over
elements times theirs, and a sum as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.api.loss_sum import LossSum
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.tolerances import WEIGHTS

from ..messages.values import Unit
from ..stages.aux_loss import split_aux_losses
from .step_report import NOTHING, Normaliser

LossFunction = Callable[[Any, Any], Any]
"""Output of the last stage and target to the mean loss over the samples, this and a dict of metrics, or a
``LossSum``."""


class UnitLoss(NamedTuple):
    """A unit's loss.

    Attributes:
        unit: unit of the loss.
        loss: loss as it was returned: a mean or a sum.
        by: factor with which it enters the mini-batch's loss.
        weight: its weight in the mini-batch's loss, divided by ``by``.
        normaliser: what the weight counts.
        metrics: metrics, also to be multiplied by ``by``.
        counts: as in ``LossOutput``.
    """

    unit: Unit
    loss: Tensor | float
    by: float
    weight: Tensor | float
    normaliser: Normaliser
    metrics: Mapping[str, Tensor | float]
    counts: Tensor | float | None = None

    @property
    def plain(self) -> bool:
        """True if the loss alone is computed on a device."""
        return self.counts is None and not self.metrics and type(self.weight) is float

    def sums_with(self, parts: Sequence[UnitLoss]) -> bool:
        """Return whether losses of parts have the same normaliser, so that they can be summed."""
        entries = [self, *parts]
        counts = [float(entry.counts) for entry in entries if entry.counts is not None]
        equal = not counts or max(counts) - min(counts) <= WEIGHTS * abs(max(counts))
        return equal and consistent(union_of(entry.normaliser for entry in entries))


class LossOutput(NamedTuple):
    """Loss that a loss function, or a last layer, returned, and its metrics without a graph.

    Attributes:
        loss: a mean over samples, a mean over elements or a sum.
        weight: what a sum weighs; None: the loss is a mean.
        metrics: by name.
        counts: of a loss that has means of what counts among its parts: a number that is the same for all
            units if as much of a sample counts in each; None: it has none.
        elements: of a mean over elements, their number; None: the loss is a sum, or a mean over samples.
    """

    loss: Tensor
    weight: Tensor | float | None = None
    metrics: Mapping[str, Tensor | float] = {}
    counts: Tensor | float | None = None
    elements: int | None = None

    def with_added(self, terms: Mapping[str, Tensor]) -> LossOutput:
        """The loss with what layers added to it by ``cf.add_loss``, which weighs as the loss does."""
        by = 1.0 if self.weight is None else self.weight
        loss, metrics = self.loss, dict(self.metrics)
        for name, term in terms.items():
            if name in metrics:
                raise ConfigError(
                    f"{name!r} is a metric of the loss function, and the name of what a layer adds to the "
                    "loss; give cf.add_loss another name"
                )
            loss = loss + (term * by).to(loss)
            metrics[name] = term.detach() * by
        return self._replace(loss=loss, metrics=metrics)

    def with_shares(self, samples: float, size: int) -> LossOutput:
        """The loss with what it is divided by in ``counts``: parts are means of other things.

        Args:
            samples: samples of the unit; of a slice, multiplied by its share of the sequence.
            size: number of elements in the unit's output.
        """
        if self.weight is not None:
            return self._replace(counts=self.weight / samples)
        if self.elements is not None and self.elements != size:
            return self._replace(counts=self.elements / samples)
        return self

    def as_unit_loss(self, unit: Unit, samples: float, divisor: float, size: int) -> UnitLoss:
        """Return the unit's term in the mini-batch's loss.

        Args:
            unit: unit of the loss.
            samples: samples of the unit; of a slice, multiplied by its share of the sequence.
            divisor: normaliser of sums, over all units.
            size: number of elements in the unit's output.
        """
        loss, dtype = _small(self.loss.detach()), self.loss.dtype
        if self.weight is not None:
            by = _seed(1 / divisor, dtype)
            return UnitLoss(unit, loss, by, self.weight, Normaliser.WEIGHTS, self.metrics, self.counts)
        part, normaliser = 1.0, Normaliser.SAMPLES
        if self.elements is not None:
            part = self.elements / size
            normaliser = Normaliser.EITHER if self.elements == size else Normaliser.ELEMENTS
        by = _seed(samples * part / divisor, dtype)
        return UnitLoss(unit, loss, by, 1.0, normaliser, self.metrics, self.counts)


@lru_cache(maxsize=1024)
def _seed(number: float, dtype: torch.dtype) -> float:
    # The sum of these factors divides later, so rounding occurs in both and equal micro-batches weigh the
    # same.
    return torch.tensor(number, dtype=dtype).item() if dtype.itemsize < _SINGLE else number


_SINGLE = torch.float32.itemsize


def _small(loss: Tensor) -> Tensor:
    # The mean of torch's mse_loss is a view of all elements' losses.
    return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss


def read_loss(output: Any) -> LossOutput:
    """Read the output of a loss function, or of a last layer.

    Raises:
        ConfigError: it is no loss.
    """
    if type(output) is Tensor:
        result = LossOutput(output)
    elif isinstance(output, LossSum):
        result = LossOutput(output.sum, _plain(output.weight), _numbers(output.metrics))
    elif isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping):
        result = LossOutput(output[0], None, _numbers(output[1]))
    elif isinstance(output, Mapping):
        result = LossOutput(cast("Tensor", output.get("loss")), None, _numbers_among(output))
    else:
        attribute = getattr(output, "loss", None)
        result = LossOutput(output if isinstance(output, Tensor) else cast("Tensor", attribute))
    loss: object = result.loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        )
        raise ConfigError(
            f"the loss is {shown}; a loss function (or, without one, the last layer) gives one number as a "
            "tensor: the mean loss over the samples, (loss, dict of metrics), a dict of 'loss' and metrics, "
            "or a LossSum"
        )
    if not loss.is_floating_point():
        raise ConfigError(f"the loss is of dtype {loss.dtype}; give a real floating-point number")
    if is_dtensor(loss):
        loss = full_tensor(loss)
        result = result._replace(loss=loss)
    return result if not loss.dim() else result._replace(loss=loss.reshape(()))


def total_loss(loss_function: LossFunction, output: Any, target: Any) -> Tensor:
    """Loss of a stage's output with all auxiliary losses: of its layers, and of the loss function.

    Args:
        loss_function: the loss function.
        output: output of the last stage, with auxiliary losses of this and earlier stages.
        target: target of the loss.

    Raises:
        ConfigError: the result is no loss.
    """
    output, of_layers = split_aux_losses(output)
    with added_losses() as terms:
        loss = read_loss(loss_function(output, target))
    return loss.with_added(terms).with_added(of_layers).loss


def elements_in(output: Any) -> int:
    """The elements of an output's tensors; of one without any 1."""
    if isinstance(output, Tensor):
        return max(1, output.numel())
    return max(1, sum(leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)))


def union_of(normalisers: Iterable[Normaliser]) -> Normaliser:
    """Union of the normalisers of some losses."""
    return reduce(or_, {*normalisers}, NOTHING)


@cache
def consistent(normaliser: Normaliser) -> bool:
    """True if losses with these normalisers can be summed."""
    exclusive = Normaliser.SAMPLES | Normaliser.ELEMENTS
    if Normaliser.WEIGHTS in normaliser:
        return normaliser is Normaliser.WEIGHTS
    return normaliser & exclusive != exclusive


def _numbers_among(output: Mapping[str, Any]) -> dict[str, Tensor | float]:
    return {
        name: _plain(value)
        for name, value in output.items()
        if name != "loss"
        and (
            (value.numel() == 1 and not value.is_complex())
            if isinstance(value, Tensor)
            else isinstance(value, (int, float))
        )
    }


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Tensor | float]:
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            fits = value.numel() == 1 and not value.is_complex()
            shown = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
        else:
            fits, shown = hasattr(value, "__float__"), repr(value)
        if not fits:
            raise ConfigError(
                f"the metric {name!r} is {shown}; give real numbers, or tensors of one, in the dict beside "
                "the loss"
            )
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
