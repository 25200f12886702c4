"""Groups of a model's measured layers that fit into a worker, each a chain of its own.

A group that does not begin with the model's first layer takes values like those at its boundary, and one that
does not end with the last has a loss of its own.

Invariant: all workers measure the same groups, and a layer's numbers do not depend on its group's others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from counterflow.common.number_texts import byte_size
from counterflow.common.tensors.dtypes import dtype_of
from counterflow.common.trees import bytes_in, tensors_in
from counterflow.errors import ConfigError
from counterflow.runtime.counted_memory import available_bytes_here
from counterflow.runtime.workers.world import current_transport

from .boundary_values import BoundaryValues, LayerPass, passes_of
from .equal_layers import passes_values
from .layer_chain import LayerChain, with_values
from .layer_costs import layers_with_loss
from .layer_times import MICRO_BATCHES
from .optimizer_trial import states_per_byte
from .subject_pipeline import Subject

_COPIES = 2
"""Pipelines that are timed alternately, each with weights, gradients and states of its own."""


class _Source(nn.Module):
    """The layers before a group: from the model's input the value that the group takes."""

    def __init__(self, values: BoundaryValues, number: int) -> None:
        super().__init__()
        self.values, self.number = values, number

    @override
    def forward(self, inputs: Any) -> Any:
        return self.values.before(self.number, inputs)


class _Sink(nn.Module):
    """The layers after a group: squares of its outputs that have gradients, by sample and position."""

    @override
    def forward(self, value: Any) -> Any:
        tensors = [*tensors_in(value)]
        graded = [tensor for tensor in tensors if tensor.requires_grad]
        if not graded:  # a loss has a gradient
            graded = [tensor.float() + torch.zeros((), requires_grad=True) for tensor in tensors]
        return tuple(x.square().flatten(2).mean(-1) if x.dim() > 2 else x.square() for x in graded)


def _mean(output: tuple[Tensor, ...], _: Any) -> Tensor:
    return torch.stack([tensor.float().mean() for tensor in output]).sum()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Some layers of a chain, that follow each other.

    Attributes:
        start: number of the first one in the chain.
        stop: number after the last one.
        count: number of layers of the chain.
    """

    start: int
    stop: int
    count: int

    @property
    def before(self) -> int:
        """Number of layers that stand for those before the group: 0 or 1."""
        return int(self.start > 0)

    @property
    def after(self) -> int:
        """Number of layers that stand for those after the group: 0 or 1."""
        return int(self.stop < self.count)

    def of(self, row: Sequence[Any]) -> tuple[Any, ...]:
        """The items of the group's own layers, of a row with an item for each layer of its subject."""
        return tuple(row[self.before : len(row) - self.after])

    def subject(self, subject: Subject, chain: LayerChain, values: BoundaryValues) -> Subject:
        """The subject of the group's measurement.

        Args:
            subject: the model's.
            chain: its measured layers.
            values: values at their boundaries.
        """
        layers = [subject.layers[place] for place in chain.places[self.start : self.stop]]
        if subject.fills_meta:
            layers = with_values(layers)
        if self.before:
            layers = [_Source(values, self.start), *layers]
        if self.after:
            return replace(subject, layers=[*layers, _Sink()], loss=_mean)
        return replace(subject, layers=layers)


@dataclass(frozen=True, slots=True)
class LayerNeed:
    """Bytes of a layer while it is measured.

    Attributes:
        states: weights, gradients and states of the optimizer, of all copies.
        saved: tensors that are saved for backwards, and outputs, of all samples in a step.
    """

    states: float
    saved: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.states + self.saved

    @classmethod
    def of(cls, layer: nn.Module, layer_pass: LayerPass | None, states: float, copies: int) -> Self:
        """The need of a layer.

        Args:
            layer: the layer, on any device.
            layer_pass: forward of all samples; None: not known.
            states: bytes of the optimizer's states per byte of trained weights.
            copies: copies of weights.
        """
        weights = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
        trained = sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad)
        saved = 0 if layer_pass is None else layer_pass.saved_bytes + bytes_in(layer_pass.output)
        # A backward has gradients that are not added yet, an update scratch memory: one more weight each.
        return cls(copies * weights + _COPIES * (3 + states) * trained, saved)


def groups_of(
    subject: Subject, chain: LayerChain, sizes: Sequence[int], *, workers: int
) -> tuple[LayerGroup, ...]:
    """The groups in which layers are measured: one if all fit into a worker. All workers call it.

    Args:
        subject: the subject of the measurement.
        chain: its layers that are measured.
        sizes: samples of the measured micro-batches, ascending.
        workers: workers that share the machine's memory.

    Raises:
        ConfigError: a layer alone does not fit, or all together if they cannot be measured by themselves.
    """
    limit = _least_available_bytes(workers)
    layers = [subject.layers[place] for place in chain.places]
    if limit is None:
        return (LayerGroup(0, len(layers), len(layers)),)
    passes = _passes(subject, layers, sizes)
    states = states_per_byte(subject.optimizer)
    filled = subject.fills_meta and any(tensor.is_meta for layer in layers for tensor in layer.parameters())
    copies = _COPIES + int(filled and current_transport().device.type == "cpu")
    known: Sequence[LayerPass | None] = passes or [None] * len(layers)
    needs = [
        LayerNeed.of(layer, layer_pass, states, copies)
        for layer, layer_pass in zip(layers_with_loss(layers, subject.loss), known, strict=True)
    ]
    if passes is None or passes_values(subject.layers) or subject.execution.compile:
        total = sum(need.total for need in needs)
        if total > limit:
            raise ConfigError(
                f"the model's layers, which are measured together, need {byte_size(total)}, and a worker has "
                f"{byte_size(limit)}; layers are measured in groups that fit if none exchange values by Skip "
                "or need values of tensors, and none are compiled"
            )
        return (LayerGroup(0, len(layers), len(layers)),)
    for place, need in zip(chain.places, needs, strict=True):
        if need.total > limit:
            raise ConfigError(
                f"layer {place} ({chain.kinds[place]}) needs {byte_size(need.total)} to be measured with "
                f"{sizes[-1]} samples, {byte_size(need.states)} of it for weights, gradients and optimizer "
                f"states, and a worker has {byte_size(limit)}; take fewer workers, smaller sizes or smaller "
                "layers"
            )
    return tuple(LayerGroup(start, stop, len(layers)) for start, stop in cut([n.total for n in needs], limit))


def cut(amounts: Sequence[float], limit: float) -> list[tuple[int, int]]:
    """First and past-the-last numbers of the fewest runs of amounts whose sums are at most a limit.

    >>> cut([3, 1, 2, 2], 4), cut([9.0], 4)
    ([(0, 2), (2, 4)], [(0, 1)])
    """
    starts, total = [0], 0.0
    for number, amount in enumerate(amounts):
        if number and total + amount > limit:
            starts.append(number)
            total = 0.0
        total += amount
    return [*zip(starts, [*starts[1:], len(amounts)], strict=True)]


def values_of(subject: Subject, chain: LayerChain) -> BoundaryValues:
    """Values at the boundaries of a chain's layers."""
    layers = [subject.layers[place] for place in chain.places]
    return BoundaryValues(layers, dtype_of(subject.execution.compute_dtype))


def _least_available_bytes(workers: int) -> int | None:
    transport = current_transport()
    known = cast("list[int | None]", transport.gather_objects(available_bytes_here(workers)))
    return min((amount for amount in known if amount is not None), default=None)


def _passes(subject: Subject, layers: Sequence[nn.Module], sizes: Sequence[int]) -> list[LayerPass] | None:
    """Forwards of all samples that a step may have in flight; None: layers need values."""
    samples = MICRO_BATCHES * max(sizes[-1], 2 * sizes[len(sizes) // 2])
    try:
        return passes_of(layers, subject.batch(samples)[0], dtype_of(subject.execution.compute_dtype))[1]
    except Exception:
        return None
