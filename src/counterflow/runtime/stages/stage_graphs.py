"""CUDA graphs of a stage's forward and backward for one unit in flight, with the tensors at their addresses.

::

    inputs ──copy──▸ static inputs ─[forward graphs]─▸ static outputs ──copy──▸ outputs
    gradients ──copy──▸ static gradients ─[backward graph]─▸ gradients of inputs (copied) and weights (added)

A backward in two ops is two graphs, of which the first leaves static gradients at the boundaries of
``graph_split.py`` to the second.

What leaves the graphs is copied, so nothing outside of them refers to static memory when it is used for the
next unit. Weights' gradients are added outside, as hooks and sums of replicas see these additions.

The graphs of one unit share a pool of memory, those of several units do not: then units may be in flight in
any order, and steps may overlap, as no replay overwrites memory that another unit still needs. A unit
therefore keeps the temporary memory of its backward too.

A layer that draws random numbers is a graph of its own, before whose replay the generator is seeded as before
the layer's run: torch's graphs read the generator's seed from the device.

This code has run on the pretended device (``testing/strict_nccl/captured_graphs.py``) and never on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from counterflow.common.tensors.graphs import gradient_edge
from counterflow.common.tensors.torch_private import has_hooks, parameters_of
from counterflow.errors import ConfigError

from ..messages.values import Structure, Value, flatten_value, unflatten_value
from .graph_split import partition_graph, traverse
from .input_guard import copied
from .named_layer import NamedLayer
from .precision import Precision
from .randomness import RandomStreams
from .sample_rows import SampleRows
from .stage_wrappers import called
from .weight_gradients import accumulate

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """What the graphs of all units of a stage have in common.

    Attributes:
        place: the stage, for messages.
        layers: its layers.
        drawing: numbers of the layers that draw random numbers.
        streams: random streams.
        precision: precision in which they run.
        changing: numbers of the layers that may change their input in place.
    """

    place: str
    layers: Sequence[NamedLayer]
    drawing: frozenset[int]
    streams: RandomStreams
    precision: Precision
    changing: frozenset[int] = frozenset()

    @property
    def device(self) -> Any:
        """Module of torch with the graphs of the layers' device; its names are those of ``torch.cuda``."""
        return torch.get_device_module(self.streams.device)

    def modules(self) -> list[nn.Module]:
        """Return all modules of the layers, each once."""
        return list({id(m): m for layer in self.layers for m in layer.module.modules()}.values())

    def groups(self) -> list[list[NamedLayer]]:
        """Return the layers of each forward graph."""
        groups: list[list[NamedLayer]] = []
        alone = True
        for layer in self.layers:
            draws = layer.index in self.drawing
            if alone or draws:
                groups.append([])
            groups[-1].append(layer)
            alone = draws
        return groups


class StageGraphs:
    """Graphs of one unit in flight.

    Args:
        stage: the stage.
        structure: structure of the input.
        tensors: tensors of the input, whose shapes, strides and types all inputs have.
    """

    def __init__(self, stage: CapturedLayers, structure: Structure | None, tensors: Sequence[Tensor]) -> None:
        self._stage, self._structure = stage, structure
        self._device = stage.device
        self._pool = self._device.graph_pool_handle()
        self._inputs = [copied(tensor) for tensor in tensors]
        self._aliases: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Weights, and leaves with the memory of these or of their casts, by what the layers have while they
        are captured: no hook of a weight runs within a graph.
        """
        self._forwards: list[tuple[Any, NamedLayer]] = []
        self._layout: Structure | None = None
        self._outputs: list[Tensor] = []
        self._backwards: dict[tuple[tuple[bool, ...], bool], _Backward] = {}
        self._unfinished: _Backward | None = None
        """Backward whose second graph is due."""
        self._changed: list[Tensor] = []
        """Buffers that the forward changes in place."""

    def forward(self, tensors: Sequence[Tensor], step: int, rows: SampleRows) -> tuple[Value, list[Tensor]]:
        """Run the layers by their graphs, which are captured the first time.

        Args:
            tensors: tensors of the input.
            step: number of the step.
            rows: samples of the unit.

        Returns:
            The output, and its tensors as leaves, whose gradients ``backward`` accepts.
        """
        for static, tensor in zip(self._inputs, tensors, strict=True):
            static.data.copy_(tensor.detach())
        if not self._forwards:
            self._capture(step, rows)
        else:
            for graph, layer in self._forwards:
                self._replay(graph, layer, step, rows)
            if self._changed:  # a replay changes no tensor's version
                torch.autograd.graph.increment_version(self._changed)
        leaves = [copied(tensor) for tensor in self._outputs]
        return unflatten_value(self._layout, leaves), leaves

    def backward(
        self, gradients: Sequence[Tensor | None], *, direct: bool, defers: bool = False
    ) -> list[Tensor | None]:
        """Run the backward by its graph, and add the gradients of weights to those that exist.

        Args:
            gradients: gradients of the leaves of ``forward``.
            direct: as of ``weight_gradients.accumulate``.
            defers: True to leave gradients of weights to ``weight_gradients``.

        Returns:
            The gradients of the input's tensors that require one, in their order.
        """
        graded = tuple(gradient is not None for gradient in gradients)
        if not any(graded):
            return [None] * len(self._graded_inputs)
        backward = self._backwards.get((graded, defers))
        if backward is None:  # which outputs have a gradient may depend on the unit
            backward = self._backwards[graded, defers] = self._captured_backward(graded, defers=defers)
        known = (gradient for gradient in gradients if gradient is not None)
        for static, gradient in zip(backward.outputs, known, strict=True):
            static.copy_(gradient)
        self._unfinished = backward if backward.pending else None
        of_inputs = backward.first.run(direct=direct)
        return [None if gradient is None else gradient.clone() for gradient in of_inputs]

    def weight_gradients(self, *, direct: bool) -> None:
        """Add the gradients that ``backward`` has left, by a graph of their own."""
        backward, self._unfinished = self._unfinished, None
        if backward is None:
            return
        if backward.second is None:
            backward.second = self._captured_weight_gradients(backward.pending)
        backward.second.run(direct=direct)

    @property
    def _graded_inputs(self) -> list[Tensor]:
        return [tensor for tensor in self._inputs if tensor.requires_grad]

    def _replay(self, graph: Any, layer: NamedLayer, step: int, rows: SampleRows) -> None:
        with self._seeded(layer, step, rows):
            graph.replay()

    def _seeded(self, layer: NamedLayer, step: int, rows: SampleRows) -> Any:
        draws = layer.index in self._stage.drawing
        return self._stage.streams.layer(layer.index, step, rows) if draws else _NOTHING

    def _capture(self, step: int, rows: SampleRows) -> None:
        stage = self._stage
        modules = stage.modules()
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        before = [buffer._version for buffer in buffers]  # noqa: SLF001 - documented as it
        value, groups = unflatten_value(self._structure, self._inputs), stage.groups()
        with self._with_aliases(modules):
            for group in groups:
                graph = self._device.CUDAGraph()
                with self._seeded(group[0], step, rows), self._capturing(graph):
                    value = self._run_group(group, value, step, rows)
                self._forwards.append((graph, group[0]))
                self._replay(graph, group[0], step, rows)  # a capture computes nothing
        pairs = zip(buffers, before, strict=True)
        self._changed = [b for b, version in pairs if b._version != version]  # noqa: SLF001
        self._layout, self._outputs = flatten_value(value, stage.place)

    def _run_group(self, group: Sequence[NamedLayer], value: Value, step: int, rows: SampleRows) -> Value:
        # Layers that are one graph, within its capture.
        stage = self._stage
        value = stage.precision.enter(value) if group[0] is stage.layers[0] else value
        for layer in group:
            value = called(layer.module, value, step, rows)
        return stage.precision.leave(value) if group[-1] is stage.layers[-1] else value

    def _captured_backward(self, graded: Sequence[bool], *, defers: bool) -> _Backward:
        outputs = [tensor for tensor, has in zip(self._outputs, graded, strict=True) if has]
        gradients = [torch.empty_like(tensor, requires_grad=False) for tensor in outputs]
        aliases = [alias for _, alias in self._aliases.values()]
        inputs, roots = self._graded_inputs, [gradient_edge(tensor) for tensor in outputs]
        if defers and not inputs:
            return _Backward(gradients, _Gradients(None), [_PendingGradients(roots, gradients, aliases)])
        early, places = _split(roots, inputs, aliases) if defers else (aliases, [])
        wanted = [*inputs, *early, *(edge for edges, _ in places for edge in edges)]
        graph = self._device.CUDAGraph()
        with self._capturing(graph):
            results = self._gradients(outputs, wanted, gradients)
        rest = iter(results[len(inputs) :])
        first = _Gradients(graph, results[: len(inputs)], self._of_weights(early, rest))
        pending = [
            _PendingGradients(edges, [next(rest) for _ in edges], weights) for edges, weights in places
        ]
        return _Backward(gradients, first, pending)

    def _captured_weight_gradients(self, pending: Sequence[_PendingGradients]) -> _Gradients:
        of_weights: list[GradientOfWeight] = []
        graph = self._device.CUDAGraph()
        with self._capturing(graph):
            for edges, gradients, weights in pending:
                pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if g is not None]
                if pairs:
                    results = self._gradients([e for e, _ in pairs], weights, [g for _, g in pairs])
                    of_weights += self._of_weights(weights, iter(results))
        return _Gradients(graph, (), of_weights)

    def _gradients(self, roots: Any, wanted: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        # Retained: what the graph saved stays where it is, for further units.
        results: Sequence[Tensor | None] = torch.autograd.grad(
            roots, wanted, gradients, retain_graph=True, allow_unused=True
        )
        if any(tensor is not None and tensor.layout is not torch.strided for tensor in results):
            raise ConfigError(f"{self._stage.place} makes sparse gradients; omit capture")
        return results

    def _of_weights(
        self, aliases: Sequence[Tensor], gradients: Iterator[Tensor | None]
    ) -> list[GradientOfWeight]:
        weights = {id(alias): weight for weight, alias in self._aliases.values()}
        pairs = [(weights[id(alias)], next(gradients)) for alias in aliases]
        return [(weight, gradient) for weight, gradient in pairs if gradient is not None]

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        """Context whose operators a graph records.

        Raises:
            ConfigError: the device cannot record them.
        """
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast is part of the graph: replays cast the new weights
        try:
            with (
                torch.enable_grad(),
                self._device.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                yield
        except RuntimeError as error:
            raise ConfigError(
                f"{self._stage.place} cannot be captured, though nothing in its first steps showed it "
                f"({error}); omit capture"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextmanager
    def _with_aliases(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        masters = self._stage.precision.masters_of_casts()
        places = [
            (parameters_of(module), name, parameter)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.requires_grad
        ]
        for _, _, parameter in places:
            if id(parameter) not in self._aliases:
                weight = masters.get(id(parameter), parameter)
                self._aliases[id(parameter)] = weight, nn.Parameter(parameter.detach())
        for table, name, parameter in places:
            table[name] = self._aliases[id(parameter)][1]
        try:
            yield
        finally:
            for table, name, parameter in places:
                table[name] = parameter


GradientOfWeight = tuple[nn.Parameter, Tensor]
"""Weight, and its gradient for one unit."""


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Graph that makes gradients.

    Attributes:
        graph: the graph; None: it makes none.
        of_inputs: gradients of inputs; None: there is none.
        of_weights: weights and their gradients.
    """

    graph: Any
    of_inputs: Sequence[Tensor | None] = ()
    of_weights: Sequence[GradientOfWeight] = ()

    def run(self, *, direct: bool) -> Sequence[Tensor | None]:
        """Make the gradients, add those of weights, and return those of inputs."""
        if self.graph is not None:
            self.graph.replay()
            add_gradients(self.of_weights, direct=direct)
        return self.of_inputs


class _PendingGradients(NamedTuple):
    """Weight gradients that a first graph leaves: they begin at the gradients of some edges.

    Attributes:
        edges: the edges.
        gradients: static gradients of the edges.
        weights: the weights, as leaves of the graph.
    """

    edges: Sequence[GradientEdge]
    gradients: Sequence[Tensor | None]
    weights: Sequence[Tensor]


@dataclass(slots=True)
class _Backward:
    """Captured backward.

    Attributes:
        outputs: static gradients of the outputs that have one.
        first: gradients that it makes.
        pending: gradients of weights that it leaves.
        second: makes those; None: not captured yet, or nothing is left.
    """

    outputs: Sequence[Tensor]
    first: _Gradients
    pending: Sequence[_PendingGradients]
    second: _Gradients | None = None


def _split(
    roots: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Sequence[Tensor], list[tuple[list[GradientEdge], list[Tensor]]]]:
    """Split a backward by ``graph_split.py``.

    Returns:
        The weights whose gradients are made with those of the inputs; the edges where the others begin, with
        their weights.
    """
    graph = traverse(roots, inputs)
    nodes, leaves, partition = graph.nodes, graph.leaves, partition_graph(graph, inputs, frozenset())
    if not partition.boundaries:  # all is made at once
        return weights, []
    return [leaves[n] for n in partition.early], [
        ([GradientEdge(nodes[b.node], output) for output in b.outputs], [leaves[n] for n in b.weights])
        for b in partition.boundaries
    ]


def add_gradients(gradients: Sequence[GradientOfWeight], *, direct: bool) -> None:
    """Add gradients of weights to those that exist.

    Args:
        gradients: weights and their gradients.
        direct: as of ``weight_gradients.accumulate``.
    """
    totals: list[Tensor] = []
    terms: list[Tensor] = []
    for weight, gradient in gradients:
        total = weight.grad
        if type(total) is Tensor and total.dtype is gradient.dtype is weight.dtype and not has_hooks(weight):
            totals.append(total)
            terms.append(gradient)
        else:  # autograd casts it, makes the first one, and calls hooks
            accumulate([gradient_edge(weight)], [gradient.clone()], into=None, direct=direct)
    if totals:
        with torch.no_grad():
            torch._foreach_add_(totals, terms)
        torch.autograd.graph.increment_version(totals)  # the kernel for many tensors does not
