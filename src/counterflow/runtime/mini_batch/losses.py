"""What a loss function may return, and how the losses of micro-batches become that of the mini-batch.

Invariant: every loss enters linearly, so that gradients made before all weights are known are right but for
one factor, the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.loss_sum import LossSum

from .. import later
from ..mesh.dtensors import is_dtensor, whole
from ..messages.values import Unit
from ..torch_private import is_loss

LossFunction = Callable[[Any, Any], Any]
"""Output of the last stage and target to the mean loss over the samples, this and a dict of metrics, or a
``LossSum``."""


class Entry(NamedTuple):
    """A unit's loss: its mean and its share in the mini-batch, or its sum and one over all samples.

    ``counts`` is as in ``Found``; ``divisor`` is what gradients were divided by, if not by all samples.
    """

    unit: Unit
    loss: Tensor | float
    share: float
    weight: Tensor | float | None
    metrics: Mapping[str, Tensor | float]
    counts: Tensor | float | None = None
    divisor: Tensor | float | None = None


class Found(NamedTuple):
    """A loss, what it weighs if it is a sum, and metrics without a graph.

    Attributes:
        counts: of a loss that has means of what counts among its parts: a number that is the same for all
            units if as much of a sample counts in each; None: it has none.
    """

    loss: Tensor
    weight: Tensor | float | None = None
    metrics: Mapping[str, Tensor | float] = {}
    counts: Tensor | None = None


def read_loss(found: Any) -> Found:
    """What a loss function, or a last layer, returned.

    Raises:
        ConfigError: it is no loss.
    """
    if isinstance(found, LossSum):
        read = Found(found.sum, _plain(found.weight), _numbers(found.metrics))
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        read = Found(found[0], None, _numbers(found[1]))
    else:
        other = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        read = Found(found if isinstance(found, Tensor) else cast("Tensor", other))
    loss: object = read.loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(found).__name__
        raise ConfigError(
            f"the loss is {shown}; a loss function (or, without one, the last layer) gives one number as a "
            "tensor: the mean loss over the samples, (loss, dict of metrics), or a LossSum"
        )
    if not loss.is_floating_point():
        raise ConfigError(f"the loss is of dtype {loss.dtype}; give a real floating-point number")
    if is_dtensor(loss):
        loss = whole(loss)
        read = read._replace(loss=loss)
    return read if not loss.dim() else read._replace(loss=loss.reshape(()))


def refuse_no_mean(function: object) -> None:
    """Refuse one of torch's losses that gives a sum over samples, or a loss for each.

    Raises:
        ConfigError: it is one.
    """
    if is_loss(function) and function.reduction not in ("mean", "batchmean"):
        raise ConfigError(
            f"the loss function is a {type(function).__name__} with reduction={function.reduction!r}, "
            "and each micro-batch gives the mean over its samples; take reduction='mean', or a function that "
            "returns a cf.LossSum"
        )


def refuse_other_counts(rows: Sequence[Sequence[float]]) -> None:
    """Refuse a loss that is no mean over what counts in the mini-batch; ``rows`` as ``weighed`` gives.

    Raises:
        ConfigError: in some micro-batches other shares of the targets count.
    """
    least, most = min(row[3] for row in rows), max(row[4] for row in rows)
    if most - least > 1e-9 * abs(most):
        raise ConfigError(
            "the loss has a cross entropy (or negative log-likelihood) among its parts, and micro-batches "
            "have other shares of targets that count (ignore_index), or other class weights: each would "
            "divide by its own; return a cf.LossSum of sums (reduction='sum') and of what counts, or the "
            "cross entropy alone"
        )


def refuse_no_graph(rows: Sequence[Sequence[float]]) -> None:
    """Refuse losses of which none depends on weights; ``rows`` as ``weighed`` gives.

    Raises:
        ConfigError: no loss of the mini-batch has a graph.
    """
    if not any(row[6] for row in rows):
        raise ConfigError(
            "no loss of the mini-batch has a graph, so that nothing would be trained: the loss function, or "
            "a layer, detaches what it was given (.detach(), .item(), torch.no_grad(), numpy)"
        )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """Metrics without a graph.

    Raises:
        ConfigError: one is no number.
    """
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


def _travels(number: object) -> TypeGuard[Tensor]:
    """Whether it is a device's, which takes a while to come to the host."""
    return (
        type(number) is Tensor
        and number.numel() == 1
        and not number.is_complex()
        and later.holds_host(number.device)
    )


def _with_numbers(entry: Entry, arrived: Iterator[float]) -> Entry:
    """An entry with what has arrived in place of what travelled."""

    def number(value: Any) -> Any:
        return next(arrived) if _travels(value) else value

    loss, weight, counts, divisor = map(number, (entry.loss, entry.weight, entry.counts, entry.divisor))
    metrics = {name: number(value) for name, value in entry.metrics.items()}
    return Entry(entry.unit, loss, entry.share, weight, metrics, counts, divisor)


def added(values: Iterable[float]) -> float:
    """Their sum; ``fsum`` takes no infinities of both signs."""
    found = list(values)
    return fsum(found) if all(map(isfinite, found)) else sum(found)


@dataclass(slots=True)
class Losses:
    """The losses of a step's micro-batches on this worker, as they come.

    Attributes:
        told: whether this worker tells them; not where others were given the same samples and do.
        entries: one a unit.
        has_graph: whether any of them depends on weights.
        graphs_to_come: of how many units this is not known yet, as their forwards run again.
    """

    told: bool = True
    entries: list[Entry] = field(default_factory=list)
    has_graph: bool = False
    graphs_to_come: int = 0
    _later: later.Later | None = None

    def note_graph(self, loss: Tensor, *, again: bool) -> None:
        """Whether a unit's loss has a graph, which a forward that runs again has the second time."""
        self.has_graph = self.has_graph or loss.requires_grad
        if again:
            self.graphs_to_come -= 1
        elif not torch.is_grad_enabled():
            self.graphs_to_come += 1

    def ask(self) -> None:
        """All are made: let a device's begin their way, so that who reads them waits for no later op."""
        if self.told:
            every = (
                number
                for e in self.entries
                for number in (e.loss, e.weight, e.counts, e.divisor, *e.metrics.values())
            )
            there = [number.double().reshape(()) for number in every if _travels(number)]
            self._later = later.Later(torch.stack(there)) if there else None

    def _arrive(self) -> None:
        """Have as numbers what was asked for."""
        if self._later is not None:
            values, self._later = iter(self._later.read()), None
            self.entries = [_with_numbers(entry, values) for entry in self.entries]

    def summed(self) -> tuple[float, int]:
        """The worker's part of the mini-batch's loss; the first micro-batch whose is not finite, or -1."""
        if not (self.entries and self.told):
            return 0.0, -1
        refuse_other_counts([self.weighed()])
        losses = [entry.loss for entry in self.entries]
        if any(isinstance(loss, Tensor) for loss in losses):
            losses = torch.stack(cast("list[Tensor]", losses)).tolist()  # from a GPU all at once
        values = cast("list[float]", losses)
        odd = [
            e.unit.micro_batch for e, value in zip(self.entries, values, strict=True) if not isfinite(value)
        ]
        return added(v * e.share for e, v in zip(self.entries, values, strict=True)), min(odd, default=-1)

    def weighed(self) -> tuple[float, ...]:
        """What is told of the losses beside their sum.

        Sum of the weights; how many losses have one; whether there are metrics; extremes of ``counts``; what
        gradients were divided by, 0 if by the samples; whether any may have a graph.
        """
        if not self.told:
            return 0.0, 0, 0.0, math.inf, -math.inf, 0.0, 0.0
        self._arrive()
        weights = [float(entry.weight) for entry in self.entries if entry.weight is not None]
        if len(weights) not in (0, len(self.entries)):
            raise ConfigError(
                "the loss function returned a LossSum for some micro-batches, a mean for others"
            )
        counts = [float(entry.counts) for entry in self.entries if entry.counts is not None]
        some = float(any(entry.metrics for entry in self.entries))
        return (
            fsum(weights),
            len(weights),
            some,
            min(counts, default=math.inf),
            max(counts, default=-math.inf),
            max((float(e.divisor) for e in self.entries if e.divisor is not None), default=0.0),
            float(self.has_graph or self.graphs_to_come > 0),
        )

    def metrics(self) -> dict[str, float]:
        """The worker's part of the mini-batch's metrics."""
        self._arrive()
        found: dict[str, float] = {}
        for entry in self.entries if self.told else ():
            for name, value in entry.metrics.items():
                found[name] = found.get(name, 0.0) + float(value) * entry.share
        return found
