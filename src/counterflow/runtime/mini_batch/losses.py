"""Losses that a function may return, and the mini-batch's loss as a sum of its micro-batches' losses.

Each micro-batch's loss enters as a sum: a mean over samples times their number, a mean over elements times
theirs, and a sum as it is. What the sums weigh is added up beside them. All are divided by one number that is
known before (the samples), so that gradients are of a size like one process's.

Invariant: gradients are divided by all that the mini-batch weighs once, before the update; so nothing has to
be known of what counts in a mini-batch before its first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from math import fsum, isfinite
from operator import or_
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import LossSum
from counterflow.common.tensors import devices
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor
from counterflow.errors import ConfigError

from ..messages.values import Unit
from .step_report import NOTHING, LossWeights, Normaliser, WorkerReport

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
        equal = not counts or max(counts) - min(counts) <= 1e-9 * abs(max(counts))
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
    """Factor of a loss, rounded to the loss's dtype.

    The sum of these factors divides later, so rounding occurs in both and equal
    micro-batches have exactly equal weights.
    """
    return torch.tensor(number, dtype=dtype).item() if dtype.itemsize < _SINGLE else number


_SINGLE = torch.float32.itemsize


def divisor_of(samples: int, *, flushes: bool) -> int:
    """Normaliser of a mini-batch's losses before all their weights are known.

    An asynchronous stage is updated before all losses are known, so it has to be exact as it is: a
    power of two, which is made the number of samples at the update.
    """
    return samples if flushes else 1 << (samples - 1).bit_length()


def _small(loss: Tensor) -> Tensor:
    """A loss in memory of its own size: torch's mse_loss returns a view of all elements' losses."""
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


def elements_in(output: Any) -> int:
    """The elements of an output's tensors; of one without any 1."""
    if isinstance(output, Tensor):
        return max(1, output.numel())
    return max(1, sum(leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)))


def refuse_other_counts(parts: Sequence[LossWeights]) -> None:
    """Refuse a loss that is no mean over what counts in the mini-batch.

    Raises:
        ConfigError: in some micro-batches other shares of the targets count.
    """
    least, most = min(part.least for part in parts), max(part.most for part in parts)
    if most - least > 1e-9 * abs(most):
        raise ConfigError(
            "micro-batches have other shares of targets that count (ignore_index, class weights, chosen "
            "elements, a LossSum's weight), and each would divide by its own: the loss has a cross entropy "
            "(or another error that is divided by what counts) among its parts, layers add to it by "
            "cf.add_loss, or the scheme is asynchronous. In a synchronous scheme return a cf.LossSum of sums "
            "(reduction='sum') and of what counts, or the cross entropy alone; or insist on what each "
            "divides by itself with per_micro_batch_loss=True"
        )


def refuse_mixed(parts: Sequence[LossWeights]) -> Normaliser:
    """Normaliser that the losses of a mini-batch share.

    Raises:
        ConfigError: some count one thing, some another.
    """
    normaliser = union_of(part.normaliser for part in parts)
    if not consistent(normaliser):
        raise ConfigError(
            "some losses of the mini-batch are a LossSum or one of torch's own errors or cross entropies, "
            "divided by what counts in it, and the others are not, or count something else; return a "
            "cf.LossSum for all micro-batches"
        )
    return normaliser


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


def refuse_no_graph(parts: Sequence[LossWeights]) -> None:
    """Refuse losses of which none depends on weights.

    Raises:
        ConfigError: no loss of the mini-batch has a graph.
    """
    if not any(part.has_graph for part in parts):
        raise ConfigError(
            "no loss of the mini-batch has a graph, so that nothing would be trained: the loss function, or "
            "a layer, detaches what it was given (.detach(), .item(), torch.no_grad(), numpy)"
        )


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


def _is_on_device(number: object) -> TypeGuard[Tensor]:
    """True if a device computes the number, so reading it waits."""
    return type(number) is Tensor and number.numel() == 1 and not number.is_complex()


def _device_values(entry: UnitLoss) -> list[Tensor]:
    if entry.plain:
        return [entry.loss] if _is_on_device(entry.loss) else []
    return [
        value
        for value in (entry.loss, entry.weight, entry.counts, *entry.metrics.values())
        if _is_on_device(value)
    ]


def _in_a_row(numbers: list[Tensor]) -> Tensor:
    first = numbers[0].dtype
    if all(number.dtype is first and not number.dim() for number in numbers):
        return torch.stack(numbers).double()
    return torch.stack([number.double().reshape(()) for number in numbers])


def _on_host_loss(entry: UnitLoss, arrived: Iterator[float]) -> UnitLoss:
    if entry.plain:
        return entry._replace(loss=next(arrived)) if _is_on_device(entry.loss) else entry

    def number(value: Any) -> Any:
        return next(arrived) if _is_on_device(value) else value

    loss, weight, counts = map(number, (entry.loss, entry.weight, entry.counts))
    metrics = {name: number(value) for name, value in entry.metrics.items()}
    return UnitLoss(entry.unit, loss, entry.by, weight, entry.normaliser, metrics, counts)


def added(values: Iterable[float]) -> float:
    """Sum of values; ``fsum`` rejects infinities of both signs."""
    terms = list(values)
    return fsum(terms) if all(map(isfinite, terms)) else sum(terms)


_NO_LOSSES = LossWeights()


@dataclass(slots=True)
class Losses:
    """The losses of a step's micro-batches on this worker, in the order of computation.

    Attributes:
        reports: whether this worker reports them; False if a worker with equal samples does.
        entries: one entry a unit.
        has_graph: whether any loss depends on weights.
        graphs_to_come: number of units for which this is unknown until their forwards are recomputed.
    """

    reports: bool = True
    entries: list[UnitLoss] = field(default_factory=list)
    has_graph: bool = False
    graphs_to_come: int = 0
    _copy: devices.HostCopy | None = None
    _on_host: int = 0

    def note_graph(self, loss: Tensor, *, recomputed: bool) -> None:
        """Note whether a unit's loss has a graph; a recomputed forward has one only the second time."""
        self.has_graph = self.has_graph or loss.requires_grad
        if recomputed:
            self.graphs_to_come -= 1
        elif not torch.is_grad_enabled():
            self.graphs_to_come += 1

    def start_reading(self) -> None:
        """Start copying all losses to the host, so reading them waits for no later op."""
        values = [number for entry in self.entries for number in _device_values(entry)]
        self._copy = devices.HostCopy(_in_a_row(values)) if values else None

    def _read_to_host(self) -> None:
        if self._on_host == len(self.entries):
            return
        if self._copy is None:
            self.start_reading()
        values = iter(() if self._copy is None else self._copy.read())
        self.entries, self._copy = [_on_host_loss(entry, values) for entry in self.entries], None
        self._on_host = len(self.entries)

    def report(self, squared_norm: float = 0.0) -> WorkerReport:
        """Report of this worker on the mini-batch, with its part of the gradients' squared norm."""
        if not (self.entries and self.reports):
            return WorkerReport(0.0, squared_norm, None, self.weights())
        weights = self.weights()
        refuse_other_counts([weights])
        values = [float(entry.loss) for entry in self.entries]
        non_finite = [
            e.unit.micro_batch for e, value in zip(self.entries, values, strict=True) if not isfinite(value)
        ]
        loss = added(v * e.by for e, v in zip(self.entries, values, strict=True))
        return WorkerReport(loss, squared_norm, min(non_finite, default=None), weights)

    def by_micro_batch(self) -> dict[int, float]:
        """Mean loss of each micro-batch whose loss this worker computed; NaN if its weight is 0."""
        if not self.entries:
            return {}
        self._read_to_host()
        losses: dict[int, float] = {}
        halves: dict[int, list[tuple[float, float]]] = {}
        for unit, loss, by, weight, *_ in self.entries:
            number, value = unit.micro_batch, float(loss)
            if unit.parts == 1 and weight == 1.0:
                losses[number] = value
            else:
                halves.setdefault(number, []).append((value * by, float(weight) * by))
        for number, pairs in halves.items():
            total = sum(weighs for _, weighs in pairs)
            losses[number] = sum(part for part, _ in pairs) / total if total else math.nan
        return losses

    def weights(self) -> LossWeights:
        """Weights of the losses."""
        if not (self.reports and self.entries):
            return _NO_LOSSES
        self._read_to_host()
        counts = [float(entry.counts) for entry in self.entries if entry.counts is not None]
        return LossWeights(
            fsum([float(entry.weight) * entry.by for entry in self.entries]),
            union_of({entry.normaliser for entry in self.entries}),
            any(entry.metrics for entry in self.entries),
            min(counts, default=math.inf),
            max(counts, default=-math.inf),
            self.has_graph or self.graphs_to_come > 0,
        )

    def metrics(self) -> dict[str, float]:
        """Sums of the worker's metrics."""
        self._read_to_host()
        sums: dict[str, float] = {}
        for entry in self.entries if self.reports else ():
            for name, value in entry.metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value) * entry.by
        return sums
