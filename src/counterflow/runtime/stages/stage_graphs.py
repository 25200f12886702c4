"""CUDA graphs of a stage's forward and backward for one unit in flight, with the tensors at their addresses.

::

    inputs ──copy──▸ static inputs ─[forward graphs]─▸ static outputs ──copy──▸ outputs
    gradients ──copy──▸ static gradients ─[backward graph]─▸ gradients of inputs (copied) and weights (added)

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
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.tensors.graphs import gradient_edge
from counterflow.common.tensors.torch_private import has_hooks, parameters_of
from counterflow.errors import ConfigError

from ..messages.values import Structure, Value, flatten_value, unflatten_value
from .input_guard import copied
from .named_layer import NamedLayer
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
    """

    place: str
    layers: Sequence[NamedLayer]
    drawing: frozenset[int]
    streams: RandomStreams

    @property
    def device(self) -> Any:
        """Module of torch with the graphs of the layers' device; its names are those of ``torch.cuda``."""
        return torch.get_device_module(self.streams.device)

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
        """Weights, and leaves with their memory: no hook of a weight runs within a graph."""
        self._forwards: list[tuple[Any, NamedLayer]] = []
        self._layout: Structure | None = None
        self._outputs: list[Tensor] = []
        self._backwards: dict[tuple[bool, ...], _Backward] = {}
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

    def backward(self, gradients: Sequence[Tensor | None], *, direct: bool) -> list[Tensor | None]:
        """Run the backward by its graph, and add the gradients of weights to those that exist.

        Args:
            gradients: gradients of the leaves of ``forward``.
            direct: as of ``weight_gradients.accumulate``.

        Returns:
            The gradients of the input's tensors that require one, in their order.
        """
        graded = tuple(gradient is not None for gradient in gradients)
        inputs = sum(tensor.requires_grad for tensor in self._inputs)
        if not any(graded):
            return [None] * inputs
        backward = self._backwards.get(graded)
        if backward is None:  # which outputs have a gradient may depend on the unit
            backward = self._backwards[graded] = self._captured_backward(graded)
        known = (gradient for gradient in gradients if gradient is not None)
        for static, gradient in zip(backward.outputs, known, strict=True):
            static.copy_(gradient)
        backward.graph.replay()
        weights = [weight for weight, _ in self._aliases.values()]
        _add(weights, backward.gradients[inputs:], direct=direct)
        return [None if gradient is None else gradient.clone() for gradient in backward.gradients[:inputs]]

    def _replay(self, graph: Any, layer: NamedLayer, step: int, rows: SampleRows) -> None:
        with self._seeded(layer, step, rows):
            graph.replay()

    def _seeded(self, layer: NamedLayer, step: int, rows: SampleRows) -> Any:
        draws = layer.index in self._stage.drawing
        return self._stage.streams.layer(layer.index, step, rows) if draws else _NOTHING

    def _capture(self, step: int, rows: SampleRows) -> None:
        stage = self._stage
        modules = list({id(m): m for layer in stage.layers for m in layer.module.modules()}.values())
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        before = [buffer._version for buffer in buffers]  # noqa: SLF001 - documented as it
        value = unflatten_value(self._structure, self._inputs)
        with self._with_aliases(modules):
            for group in stage.groups():
                graph = self._device.CUDAGraph()
                with self._seeded(group[0], step, rows), self._capturing(graph):
                    for layer in group:
                        value = called(layer.module, value, step, rows)
                self._forwards.append((graph, group[0]))
                self._replay(graph, group[0], step, rows)  # a capture computes nothing
        pairs = zip(buffers, before, strict=True)
        self._changed = [b for b, version in pairs if b._version != version]  # noqa: SLF001
        self._layout, self._outputs = flatten_value(value, stage.place)

    def _captured_backward(self, graded: Sequence[bool]) -> _Backward:
        outputs = [tensor for tensor, has in zip(self._outputs, graded, strict=True) if has]
        gradients = [torch.empty_like(tensor, requires_grad=False) for tensor in outputs]
        aliases = [alias for _, alias in self._aliases.values()]
        inputs = [tensor for tensor in self._inputs if tensor.requires_grad]
        graph = self._device.CUDAGraph()
        with self._capturing(graph):
            # Retained: what it saved stays where it is, for further units.
            results = torch.autograd.grad(
                outputs, [*inputs, *aliases], gradients, retain_graph=True, allow_unused=True
            )
        if any(tensor is not None and tensor.layout is not torch.strided for tensor in results):
            raise ConfigError(f"{self._stage.place} makes sparse gradients; omit capture")
        return _Backward(graph, gradients, results)

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
        places = [
            (parameters_of(module), name, parameter)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.requires_grad
        ]
        for _, _, parameter in places:
            if id(parameter) not in self._aliases:
                self._aliases[id(parameter)] = parameter, nn.Parameter(parameter.detach())
        for table, name, parameter in places:
            table[name] = self._aliases[id(parameter)][1]
        try:
            yield
        finally:
            for table, name, parameter in places:
                table[name] = parameter


@dataclass(frozen=True, slots=True)
class _Backward:
    """Captured backward.

    Attributes:
        graph: its graph.
        outputs: static gradients of the outputs that have one.
        gradients: gradients of inputs and weights; None: there is none.
    """

    graph: Any
    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


def _add(weights: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], *, direct: bool) -> None:
    totals: list[Tensor] = []
    terms: list[Tensor] = []
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
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
