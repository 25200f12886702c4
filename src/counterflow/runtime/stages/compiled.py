"""Layers of a stage as torch compiles them: consecutive ones as one function if no wrapper breaks the block.

Invariant: numbers equal those of the same layers run one by one. A layer draws random numbers from a separate
stream, so it is compiled alone if it draws any. A discarded run determines which layers draw; a block that
draws nevertheless is detected when it does, and its layers are run again one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from counterflow.api.aux_loss import added_losses, forgets_added
from counterflow.common.tensors.torch_compiler import SPLITTING, backend_of
from counterflow.common.tensors.torch_private import buffers_of, call_of
from counterflow.common.trees import mapped, versions
from counterflow.errors import ConfigError

from ..messages.values import Value
from .buffers import Buffers
from .input_guard import copied, non_leaf
from .named_layer import NamedLayer, place_of
from .randomness import RandomStreams
from .sample_rows import SampleRows
from .split_graphs import SplitBackend
from .stage_wrappers import Block, BlockRuns, Run, StageWrapper, called

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@dataclass(frozen=True, slots=True)
class CompiledLayers:
    """Layers of a stage that are one compiled function.

    Attributes:
        layers: numbers of the layers in the model, in order.
        graphs: number of graphs in one run: 1 without a graph break, 0 before the first run. A single layer
            shares the graphs of layers of its kind.
        compiled: number of graphs compiled so far, for all modes and shapes of the runs.
        alone: reason why it is a single layer; None: no wrapper breaks a block at it.
    """

    layers: tuple[int, ...]
    graphs: int
    compiled: int
    alone: str | None

    def __str__(self) -> str:
        """In words, as a log has it."""
        first, last = self.layers[0], self.layers[-1]
        if self.alone is not None:
            return f"layer {first} alone, as {self.alone}"
        which = f"layer {first}" if first == last else f"layers {first} to {last}"
        hint = "; TORCH_LOGS=graph_breaks says where it breaks" if self.graphs > 1 else ""
        return f"{which} in {self.graphs} graph{'s' * (self.graphs != 1)}{hint}"


class Backend:
    """A backend of torch's compiler that counts the graphs it compiles.

    Backends of one name are equal, so that workers that are threads use each other's graphs of a layer.

    Args:
        name: of the backend, as ``torch.compile`` takes it.
        splits: True if backwards are split; then they are compiled in two graphs if the backend can
            (``SPLITTING``).
    """

    def __init__(self, name: str, *, splits: bool = False) -> None:
        self.__name__ = name  # torch's messages have it
        self.splits = splits and name in SPLITTING
        self._compile = SplitBackend(name) if self.splits else backend_of(name)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile a graph."""
        graphs: _Graphs | None = getattr(_running, "graphs", None)
        if graphs is not None:
            graphs.all += 1
        return self._compile(graph, inputs, **options)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Backend) and self._compile == value._compile

    def __hash__(self) -> int:
        return hash(self._compile)


_running = threading.local()
"""``graphs``: count of the graphs that this thread compiles."""


class Compiled:
    """The compiled functions of one stage.

    Args:
        stage: its number.
        backend: compiles graphs.
    """

    def __init__(self, stage: int, backend: Backend) -> None:
        self._stage, self._backend = stage, backend
        self.splits = backend.splits
        """True if a compiled backward is two graphs."""
        self._runs: dict[tuple[int, ...], Run] = {}
        self._graphs: dict[tuple[int, ...], _Graphs] = {}

    def __call__(self, layers: Sequence[NamedLayer]) -> Run:
        """The compiled run of some layers, made once."""
        numbers = tuple(layer.index for layer in layers)
        if numbers not in self._runs:
            modules = [layer.module for layer in layers]
            name = f"stage_{self._stage}_layers_{numbers[0]}_to_{numbers[-1]}"
            function = call_of(modules[0]) if len(modules) == 1 else _chained(modules, name)
            compiled = torch.compile(function, backend=self._backend)
            self._graphs[numbers] = graphs = _Graphs()
            self._runs[numbers] = partial(graphs.counting, partial(called, compiled))
        return self._runs[numbers]

    def report(self, blocks: Sequence[Block]) -> tuple[CompiledLayers, ...]:
        """Report the graphs of some blocks."""
        report = []
        for block in blocks:
            numbers = tuple(layer.index for layer in block.layers)
            graphs = self._graphs.get(numbers, _Graphs())
            report.append(CompiledLayers(numbers, graphs.most, graphs.all, block.alone))
        return tuple(report)


class _Graphs:
    def __init__(self) -> None:
        self.most = self.all = 0
        """Maximum in one run, and the sum of all runs."""

    def counting(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Run the layers, and count the graphs compiled."""
        before, _running.graphs = self.all, self
        try:
            return run(value, step, rows)
        finally:
            _running.graphs = None
            self.most = max(self.most, self.all - before)


def _chained(modules: Sequence[nn.Module], name: str) -> Callable[..., Value]:
    first, *further = modules

    def block(*args: Any, **kwargs: Any) -> Value:
        value = first(*args, **kwargs)
        for module in further:
            value = module(value)
        return value

    # Torch limits compilations per code object, and stores by name which sizes vary.
    block.__code__ = block.__code__.replace(co_name=name, co_qualname=name)
    return block


class Drawing(StageWrapper):
    """Wraps the layers of a compiled stage in random streams, except those that draw nothing.

    Args:
        streams: random streams of the run.
        changed: called when layers are known to draw.
    """

    def __init__(self, streams: RandomStreams, changed: Callable[[], None]) -> None:
        self._streams, self._changed = streams, changed
        self._draws: dict[int, bool] = {}
        """True if a layer draws, by its number, once that is known."""

    @override
    def breaks_block(self, layer: NamedLayer) -> str | None:
        return "it draws random numbers" if self._draws.get(layer.index) else None

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        return self._streams.wrap_layer(layer, run, value, step, rows)

    @override
    def wrap_block(
        self, layers: Sequence[NamedLayer], runs: BlockRuns, value: Value, step: int, rows: SampleRows
    ) -> Value:
        """Run the block without a stream if no layer draws.

        Raises:
            ConfigError: layers draw that drew nothing before, and cannot run again.
        """
        if not all(layer.index in self._draws for layer in layers):
            self._learn(layers, value, step, rows)
        if not any(self._draws[layer.index] for layer in layers):
            before, forget = (_state(layers), versions(value)), forgets_added()
            output = self._streams.unless_drawn(lambda: (runs.fused(value, step, rows),))
            if output is not None:
                return output[0]
            if (_state(layers), versions(value)) != before:
                raise ConfigError(
                    f"{place_of(layers[0])} to {place_of(layers[-1])} are compiled as one function, as they "
                    "drew no random numbers when they first ran; now they draw some, and have changed their "
                    "input or buffers. Let them draw from the first step on, or omit compile"
                )
            forget()
            self._draws |= dict.fromkeys((layer.index for layer in layers), True)
        self._changed()
        return runs.recompose(value, step, rows)

    def _learn(self, layers: Sequence[NamedLayer], value: Value, step: int, rows: SampleRows) -> None:
        """Determine which layers draw, by a run of each that restores buffers and random state.

        A layer with a dropout above 0 counts as drawing, as it draws in training mode.

        Raises:
            ConfigError: a layer changes its weights as it runs.
        """
        weights = [parameter for layer in layers for parameter in layer.module.parameters()]
        buffers = Buffers(layer.module for layer in layers)
        contents, before = buffers.snapshot(), versions(weights)
        value = mapped(copied, value)
        with added_losses(), self._streams.preserved(), buffers.swapped_in(contents):
            for layer in layers:
                with self._streams.layer(layer.index, step, rows):
                    states = self._streams.states()
                    value = mapped(_cut, called(layer.module, mapped(non_leaf, value), step, rows))
                    drew = not self._streams.drew_nothing(states)
                self._draws[layer.index] = drew or _drops(layer.module)
        buffers.restore(contents)
        if versions(weights) != before:
            raise ConfigError(
                f"{place_of(layers[0])}, or one of those to {place_of(layers[-1])}, changes its weights as "
                "it runs, so that no further run can find whether it draws random numbers; omit compile"
            )


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _drops(module: nn.Module) -> bool:
    return any(isinstance(child, _DROPOUTS) and child.p > 0 for child in module.modules())


def _state(layers: Sequence[NamedLayer]) -> list[tuple[int, int]]:
    tables = (buffers_of(child) for layer in layers for child in layer.module.modules())
    return [
        (id(buffer), buffer._version)  # noqa: SLF001 - documented as it
        for table in tables
        for buffer in table.values()
        if buffer is not None and not buffer.is_inference()
    ]
