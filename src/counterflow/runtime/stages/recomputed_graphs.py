"""CUDA graphs of a stage whose layers are computed again one by one (``recompute="layer"``).

::

    inputs ──copy──▸ static inputs ─[layer]─ entry ─[layer]─▸ static outputs ──copy──▸ outputs
    gradients ──copy──▸ static gradients ─[layer again, its backward]─ ... ─▸ gradients of inputs and weights

The forward graphs save the input of each layer and nothing else. The backward graphs run a layer again from
its saved input and differentiate it, from the last layer to the first. What a layer saves in between is
temporary memory of the graph, which the next layer uses again.

A layer that draws random numbers is a graph of its own in both directions, and is seeded before both replays.

Like ``stage_graphs.py`` this code has run on the pretended device and never on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from counterflow.common.trees import mapped

from ..messages.values import Structure, Value, flatten_value, unflatten_value
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_graphs import CapturedLayers, GradientOfWeight, StageGraphs, add_gradients
from .stage_wrappers import called

_Entry = tuple[Structure | None, list[Tensor]]
"""Input of a layer, as leaves."""

_Gradients = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class BackwardChain:
    """Backward of all layers.

    Attributes:
        outputs: static gradients of the outputs that have one.
        graphs: graphs in order, each with its first layer.
        of_inputs: gradients of the inputs that require one.
        of_weights: weights and their gradients.
    """

    outputs: Sequence[Tensor]
    graphs: Sequence[tuple[Any, NamedLayer]]
    of_inputs: _Gradients
    of_weights: Sequence[GradientOfWeight]


class RecomputedStageGraphs(StageGraphs):
    """Graphs of one unit in flight whose layers are computed again in the backward.

    Args:
        stage: as of the base.
        structure: as of the base.
        tensors: as of the base.
    """

    def __init__(self, stage: CapturedLayers, structure: Structure | None, tensors: Sequence[Tensor]) -> None:
        super().__init__(stage, structure, tensors)
        self._entries: dict[int, _Entry] = {}
        """Inputs of the layers by the number of the layer."""
        self._chains: dict[tuple[bool, ...], BackwardChain] = {}
        self._draws: tuple[int, SampleRows]
        """Number of the step and samples of the unit, on which its draws depend."""

    @override
    def forward(self, tensors: Sequence[Tensor], step: int, rows: SampleRows) -> tuple[Value, list[Tensor]]:
        self._draws = step, rows
        return super().forward(tensors, step, rows)

    @override
    def backward(self, gradients: _Gradients, *, direct: bool, defers: bool = False) -> list[Tensor | None]:
        assert not defers
        graded = tuple(gradient is not None for gradient in gradients)
        if not any(graded):
            return [None] * len(self._graded_inputs)
        chain = self._chains.get(graded)
        if chain is None:  # which outputs have a gradient may depend on the unit
            chain = self._chains[graded] = self._captured_chain(graded)
        known = (gradient for gradient in gradients if gradient is not None)
        for static, gradient in zip(chain.outputs, known, strict=True):
            static.copy_(gradient)
        for graph, layer in chain.graphs:
            self._replay(graph, layer, *self._draws)
        add_gradients(chain.of_weights, direct=direct)
        return [None if gradient is None else gradient.clone() for gradient in chain.of_inputs]

    @override
    def _run_group(self, group: Sequence[NamedLayer], value: Value, step: int, rows: SampleRows) -> Value:
        with saved_tensors_hooks(_nothing, _missing):
            for layer in group:
                structure, tensors = flatten_value(value, self._stage.place)
                self._entries[layer.index] = structure, [_leaf(tensor) for tensor in tensors]
                value = mapped(_leaf, self._run_layer(layer, value, step, rows))
        return value

    def _run_layer(self, layer: NamedLayer, value: Value, step: int, rows: SampleRows) -> Value:
        stage = self._stage
        if layer.index in stage.changing:
            value = mapped(torch.clone, value)
        value = stage.precision.enter(value) if layer is stage.layers[0] else value
        value = called(layer.module, value, step, rows)
        return stage.precision.leave(value) if layer is stage.layers[-1] else value

    def _captured_chain(self, graded: Sequence[bool]) -> BackwardChain:
        stage, (step, rows) = self._stage, self._draws
        outputs = [
            torch.empty_like(tensor, requires_grad=False) if has else None
            for tensor, has in zip(self._outputs, graded, strict=True)
        ]
        gradients: _Gradients = outputs
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        graphs: list[tuple[Any, NamedLayer]] = []
        with stage.precision.computing(), self._with_aliases(stage.modules()):
            for group in reversed(stage.groups()):
                graph = self._device.CUDAGraph()
                with self._seeded(group[0], step, rows), self._capturing(graph):
                    for layer in reversed(group):
                        gradients = self._layer_gradients(layer, gradients, sums)
                graphs.append((graph, group[0]))
        _, entry = self._entries[stage.layers[0].index]
        of_inputs = [g for tensor, g in zip(entry, gradients, strict=True) if tensor.requires_grad]
        of_weights = self._of_weights([w for w, _ in sums.values()], iter([g for _, g in sums.values()]))
        return BackwardChain([t for t in outputs if t is not None], graphs, of_inputs, of_weights)

    def _layer_gradients(
        self, layer: NamedLayer, gradients: _Gradients, sums: dict[int, tuple[Tensor, Tensor]]
    ) -> _Gradients:
        # Of the layer's input; gradients of weights, which several layers may have, are added to the sums.
        structure, tensors = self._entries[layer.index]
        leaves = [_leaf(tensor) for tensor in tensors]
        output = self._run_layer(layer, unflatten_value(structure, leaves), *self._draws)
        _, outputs = flatten_value(output, self._stage.place)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        weights = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
        wanted = [*(leaf for leaf in leaves if leaf.requires_grad), *weights]
        if not pairs or not wanted:
            return [None] * len(leaves)
        results = iter(self._gradients([t for t, _ in pairs], wanted, [g for _, g in pairs]))
        of_leaves = [next(results) if leaf.requires_grad else None for leaf in leaves]
        for weight, gradient in zip(weights, results, strict=True):
            if gradient is not None:
                _, total = sums.get(id(weight), (weight, None))
                sums[id(weight)] = weight, gradient if total is None else total + gradient
        return of_leaves


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _nothing(_: Tensor) -> None:
    return None


def _missing(_: None) -> Tensor:
    raise RuntimeError("a layer that is computed again uses what its first run did not save")
