"""Loss of a mini-batch as a sum of its micro-batches' losses.

What the sums weigh is added up beside them. All are divided by one number that is known before (the samples),
so gradients are of a size like one process's.

Invariant: gradients are divided by all that the mini-batch weighs once, before the update; so nothing has to
be known of what counts in a mini-batch before its first backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any, TypeGuard

import torch
from torch import Tensor

from counterflow.common.tensors import devices
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.tolerances import WEIGHTS

from .loss_output import UnitLoss, consistent, union_of
from .step_report import LossWeights, Normaliser, WorkerReport


def divisor_of(samples: int, *, flushes: bool) -> int:
    """Normaliser of a mini-batch's losses before all their weights are known.

    An asynchronous stage is updated before all losses are known, so it has to be exact as it is: a
    power of two, which is made the number of samples at the update.
    """
    return samples if flushes else 1 << (samples - 1).bit_length()


def refuse_other_counts(parts: Sequence[LossWeights]) -> None:
    """Refuse a loss that is no mean over what counts in the mini-batch.

    Raises:
        ConfigError: in some micro-batches other shares of the targets count.
    """
    least, most = min(part.least for part in parts), max(part.most for part in parts)
    if most - least > WEIGHTS * abs(most):
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


def _needs_transfer(number: object) -> TypeGuard[Tensor]:
    return type(number) is Tensor and number.numel() == 1 and not number.is_complex()


def _device_values(entry: UnitLoss) -> list[Tensor]:
    if entry.plain:
        return [entry.loss] if _needs_transfer(entry.loss) else []
    return [
        value
        for value in (entry.loss, entry.weight, entry.counts, *entry.metrics.values())
        if _needs_transfer(value)
    ]


def _in_a_row(numbers: list[Tensor]) -> Tensor:
    first = numbers[0].dtype
    if all(number.dtype is first and not number.dim() for number in numbers):
        return torch.stack(numbers).double()
    return torch.stack([number.double().reshape(()) for number in numbers])


def _on_host_loss(entry: UnitLoss, arrived: Iterator[float]) -> UnitLoss:
    if entry.plain:
        return entry._replace(loss=next(arrived)) if _needs_transfer(entry.loss) else entry

    def number(value: Any) -> Any:
        return next(arrived) if _needs_transfer(value) else value

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
