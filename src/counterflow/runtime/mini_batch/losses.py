"""What a loss function may return, and how the losses of micro-batches become that of the mini-batch.

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
from counterflow.errors import ConfigError

from .. import host_copy
from ..dtensors import is_dtensor, whole
from ..messages.values import Unit
from .told import NOTHING, Counts, Part, Weighed

LossFunction = Callable[[Any, Any], Any]
"""Output of the last stage and target to the mean loss over the samples, this and a dict of metrics, or a
``LossSum``."""


class Entry(NamedTuple):
    """A unit's loss.

    Attributes:
        unit: unit of the loss.
        loss: loss as it was returned: a mean or a sum.
        by: factor with which it enters the mini-batch's loss.
        weight: its weight in the mini-batch's loss, divided by ``by``.
        counted: what the weight counts.
        metrics: metrics, also to be multiplied by ``by``.
        counts: as in ``Found``.
    """

    unit: Unit
    loss: Tensor | float
    by: float
    weight: Tensor | float
    counted: Counts
    metrics: Mapping[str, Tensor | float]
    counts: Tensor | float | None = None

    @property
    def plain(self) -> bool:
        """Whether a device computes no more of it than the loss."""
        return self.counts is None and not self.metrics and type(self.weight) is float


class Found(NamedTuple):
    """A loss as it was found, and metrics without a graph.

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

    def with_added(self, terms: Mapping[str, Tensor]) -> Found:
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

    def with_shares(self, samples: float, size: int) -> Found:
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

    def entered(self, unit: Unit, samples: float, divisor: float, size: int) -> Entry:
        """Entry of a loss in the mini-batch's loss.

        Args:
            unit: unit of the loss.
            samples: samples of the unit; of a slice, multiplied by its share of the sequence.
            divisor: normaliser of sums, over all units.
            size: number of elements in the unit's output.
        """
        loss, dtype = _small(self.loss.detach()), self.loss.dtype
        if self.weight is not None:
            by = _seed(1 / divisor, dtype)
            return Entry(unit, loss, by, self.weight, Counts.OTHER, self.metrics, self.counts)
        part, counted = 1.0, Counts.SAMPLES
        if self.elements is not None:
            part = self.elements / size
            counted = Counts.EITHER if self.elements == size else Counts.ELEMENTS
        by = _seed(samples * part / divisor, dtype)
        return Entry(unit, loss, by, 1.0, counted, self.metrics, self.counts)


@lru_cache(maxsize=1024)
def _seed(number: float, dtype: torch.dtype) -> float:
    """What a loss is multiplied by, as its dtype holds it.

    The sum of what losses were multiplied by divides, so what is rounded here is rounded in both: equal
    micro-batches weigh alike, exactly.
    """
    return torch.tensor(number, dtype=dtype).item() if dtype.itemsize < _SINGLE else number


_SINGLE = torch.float32.itemsize


def divisor_of(samples: int, *, flushes: bool) -> int:
    """What the losses of a mini-batch are divided by as they enter.

    An asynchronous stage is updated before all losses are known, so it has to be exact as it is: a
    power of two, which is made the number of samples at the update.
    """
    return samples if flushes else 1 << (samples - 1).bit_length()


def _small(loss: Tensor) -> Tensor:
    """A loss in memory of its own size: torch's mse_loss gives it in that of all elements' losses."""
    return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss


def read_loss(found: Any) -> Found:
    """What a loss function, or a last layer, returned.

    Raises:
        ConfigError: it is no loss.
    """
    if type(found) is Tensor:
        read = Found(found)
    elif isinstance(found, LossSum):
        read = Found(found.sum, _plain(found.weight), _numbers(found.metrics))
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        read = Found(found[0], None, _numbers(found[1]))
    elif isinstance(found, Mapping):
        read = Found(cast("Tensor", found.get("loss")), None, _numbers_among(found))
    else:
        other = getattr(found, "loss", None)
        read = Found(found if isinstance(found, Tensor) else cast("Tensor", other))
    loss: object = read.loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(found).__name__
        raise ConfigError(
            f"the loss is {shown}; a loss function (or, without one, the last layer) gives one number as a "
            "tensor: the mean loss over the samples, (loss, dict of metrics), a dict of 'loss' and metrics, "
            "or a LossSum"
        )
    if not loss.is_floating_point():
        raise ConfigError(f"the loss is of dtype {loss.dtype}; give a real floating-point number")
    if is_dtensor(loss):
        loss = whole(loss)
        read = read._replace(loss=loss)
    return read if not loss.dim() else read._replace(loss=loss.reshape(()))


def elements_in(output: Any) -> int:
    """The elements of an output's tensors; of one without any 1."""
    if isinstance(output, Tensor):
        return max(1, output.numel())
    return max(1, sum(leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)))


def refuse_other_counts(parts: Sequence[Weighed]) -> None:
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


def refuse_mixed(parts: Sequence[Weighed]) -> Counts:
    """What the losses of a mini-batch count.

    Raises:
        ConfigError: some count one thing, some another.
    """
    found = counted(part.counted for part in parts)
    if not consistent(found):
        raise ConfigError(
            "some losses of the mini-batch are a LossSum or one of torch's own errors or cross entropies, "
            "divided by what counts in it, and the others are not, or count something else; return a "
            "cf.LossSum for all micro-batches"
        )
    return found


def counted(each: Iterable[Counts]) -> Counts:
    """All that some losses count."""
    return reduce(or_, {*each}, NOTHING)


@cache
def consistent(found: Counts) -> bool:
    """Whether losses that count this can be added up."""
    alone = Counts.SAMPLES | Counts.ELEMENTS
    if Counts.OTHER in found:
        return found is Counts.OTHER
    return found & alone != alone


def refuse_no_graph(parts: Sequence[Weighed]) -> None:
    """Refuse losses of which none depends on weights.

    Raises:
        ConfigError: no loss of the mini-batch has a graph.
    """
    if not any(part.has_graph for part in parts):
        raise ConfigError(
            "no loss of the mini-batch has a graph, so that nothing would be trained: the loss function, or "
            "a layer, detaches what it was given (.detach(), .item(), torch.no_grad(), numpy)"
        )


def _numbers_among(found: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """What a dict has beside its loss, as metrics; what is no number (logits, say) is none."""
    return {
        name: _plain(value)
        for name, value in found.items()
        if name != "loss"
        and (
            (value.numel() == 1 and not value.is_complex())
            if isinstance(value, Tensor)
            else isinstance(value, (int, float))
        )
    }


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
    """Whether a device computes it, and it takes a while to reach the host."""
    return type(number) is Tensor and number.numel() == 1 and not number.is_complex()


def _travelling(entry: Entry) -> list[Tensor]:
    """What of an entry travels to the host; mostly it is the loss alone."""
    if entry.plain:
        return [entry.loss] if _travels(entry.loss) else []
    return [one for one in (entry.loss, entry.weight, entry.counts, *entry.metrics.values()) if _travels(one)]


def _in_a_row(numbers: list[Tensor]) -> Tensor:
    """Numbers of any dtypes and shapes in a row, as float64."""
    first = numbers[0].dtype
    if all(number.dtype is first and not number.dim() for number in numbers):
        return torch.stack(numbers).double()
    return torch.stack([number.double().reshape(()) for number in numbers])


def _with_numbers(entry: Entry, arrived: Iterator[float]) -> Entry:
    """An entry with what has arrived in place of what travelled."""
    if entry.plain:
        return entry._replace(loss=next(arrived)) if _travels(entry.loss) else entry

    def number(value: Any) -> Any:
        return next(arrived) if _travels(value) else value

    loss, weight, counts = map(number, (entry.loss, entry.weight, entry.counts))
    metrics = {name: number(value) for name, value in entry.metrics.items()}
    return Entry(entry.unit, loss, entry.by, weight, entry.counted, metrics, counts)


def added(values: Iterable[float]) -> float:
    """Their sum; ``fsum`` takes no infinities of both signs."""
    found = list(values)
    return fsum(found) if all(map(isfinite, found)) else sum(found)


_NO_LOSSES = Weighed()


@dataclass(slots=True)
class Losses:
    """The losses of a step's micro-batches on this worker, in the order of computation.

    Attributes:
        told: whether this worker reports them; False if a worker with equal samples does.
        entries: one entry a unit.
        has_graph: whether any of them depends on weights.
        graphs_to_come: of how many units this is not known yet, as their forwards run again.
    """

    told: bool = True
    entries: list[Entry] = field(default_factory=list)
    has_graph: bool = False
    graphs_to_come: int = 0
    _later: host_copy.HostCopy | None = None
    _arrived: int = 0

    def note_graph(self, loss: Tensor, *, again: bool) -> None:
        """Whether a unit's loss has a graph, which a forward that runs again has the second time."""
        self.has_graph = self.has_graph or loss.requires_grad
        if again:
            self.graphs_to_come -= 1
        elif not torch.is_grad_enabled():
            self.graphs_to_come += 1

    def ask(self) -> None:
        """Start copying all losses to the host, so reading them waits for no later op."""
        there = [number for entry in self.entries for number in _travelling(entry)]
        self._later = host_copy.HostCopy(_in_a_row(there)) if there else None

    def _arrive(self) -> None:
        """Have all as numbers."""
        if self._arrived == len(self.entries):
            return
        if self._later is None:
            self.ask()
        values = iter(() if self._later is None else self._later.read())
        self.entries, self._later = [_with_numbers(entry, values) for entry in self.entries], None
        self._arrived = len(self.entries)

    def part(self, squared_norm: float = 0.0) -> Part:
        """Report of this worker on the mini-batch, with its part of the gradients' squared norm."""
        if not (self.entries and self.told):
            return Part(0.0, squared_norm, None, self.weighed())
        weighed = self.weighed()
        refuse_other_counts([weighed])
        values = [float(entry.loss) for entry in self.entries]
        non_finite = [
            e.unit.micro_batch for e, value in zip(self.entries, values, strict=True) if not isfinite(value)
        ]
        loss = added(v * e.by for e, v in zip(self.entries, values, strict=True))
        return Part(loss, squared_norm, min(non_finite, default=None), weighed)

    def by_micro_batch(self) -> dict[int, float]:
        """The mean loss of each micro-batch whose loss this worker made; of weight 0: NaN."""
        if not self.entries:
            return {}
        self._arrive()
        found: dict[int, float] = {}
        halves: dict[int, list[tuple[float, float]]] = {}
        for unit, loss, by, weight, *_ in self.entries:
            number, value = unit.micro_batch, float(loss)
            if unit.parts == 1 and weight == 1.0:
                found[number] = value
            else:
                halves.setdefault(number, []).append((value * by, float(weight) * by))
        for number, pairs in halves.items():
            whole = sum(weighs for _, weighs in pairs)
            found[number] = sum(part for part, _ in pairs) / whole if whole else math.nan
        return found

    def weighed(self) -> Weighed:
        """What the losses weigh."""
        if not (self.told and self.entries):
            return _NO_LOSSES
        self._arrive()
        counts = [float(entry.counts) for entry in self.entries if entry.counts is not None]
        return Weighed(
            fsum([float(entry.weight) * entry.by for entry in self.entries]),
            counted({entry.counted for entry in self.entries}),
            any(entry.metrics for entry in self.entries),
            min(counts, default=math.inf),
            max(counts, default=-math.inf),
            self.has_graph or self.graphs_to_come > 0,
        )

    def metrics(self) -> dict[str, float]:
        """The sums of the worker's metrics."""
        self._arrive()
        found: dict[str, float] = {}
        for entry in self.entries if self.told else ():
            for name, value in entry.metrics.items():
                found[name] = found.get(name, 0.0) + float(value) * entry.by
        return found
