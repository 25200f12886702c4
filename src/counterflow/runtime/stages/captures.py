"""Passes that replay CUDA graphs (``execution.capture``): which units do, which run plainly, and a report.

A stage is captured for each shape of its input, after plain steps in which its layers kept all rules
(``capture_rules.py``). Each unit in flight has graphs of its own (``stage_graphs.py``).

Invariant: a stage that cannot be captured runs plainly, and its report says why. Graphs are forgotten if
weights have other addresses than in the capture, or if Python values that the layers can read have changed;
they are made again after further plain steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.capture.python_state import PythonState
from counterflow.common.tensors.torch_private import without_modes
from counterflow.common.trees import versions
from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute

from ..messages.values import Structure, Value, flatten_value, unflatten_value
from .aux_loss import AuxLossCollector, WithAuxLosses
from .capture_rules import (
    ModuleAttributes,
    OperatorRules,
    python_state,
    refuse_graph,
    refuse_modules,
    refuse_state,
    settings,
)
from .captured_passes import CapturedPass, CapturedRun, CapturedSplitPass, UnitRun, WatchedRun
from .deferred import Deferred
from .interface import RunnableStage
from .named_layer import NamedLayer
from .passes import PlainPass
from .recomputed_graphs import RecomputedStageGraphs
from .sample_rows import SampleRows
from .stage_graphs import CapturedLayers, StageGraphs
from .stage_wrappers import Run, StageWrapper
from .versions import Versions

_PLAIN_STEPS = 2
"""Plain steps before a shape is captured; the first of them may have begun before it was watched."""

_MOST_SHAPES = 8
"""Maximum number of shapes that are captured."""

_MOST_CHANGES = 4
"""Changes of what graphs depend on, with fewer than ``_WORTH`` steps of replays between them, after which the
stage runs plainly."""

_WORTH = 10


@dataclass(frozen=True, slots=True)
class CapturedStage:
    """Report on the graphs of one stage.

    Attributes:
        shapes: number of shapes of its input that are captured.
        units: number of units in flight that have graphs.
        replays: number of forwards that replayed graphs so far.
        reason: reason why the stage runs plainly; None: it is captured, or will be.
    """

    shapes: int = 0
    units: int = 0
    replays: int = 0
    reason: str | None = None

    def __str__(self) -> str:
        """In words, as a log has it."""
        if self.reason is not None:
            return f"runs plainly: {self.reason}"
        if not self.units:
            return "is not captured yet"
        return f"is captured: {self.shapes} shape{'s' * (self.shapes != 1)}, {self.units} in flight"


class CapturableStage(RunnableStage, Protocol):
    """A stage as its captures use it; ``LocalStage`` documents the members."""

    versions: Versions | None
    aux_losses: AuxLossCollector

    @property
    def means(self) -> StageWrapper:
        """Wrapper of the layer that gives the loss."""

    @property
    def has_skips(self) -> bool:
        """True if values go around the layers."""

    @property
    def deferred(self) -> list[Deferred]:
        """Batch norms whose running statistics are updated when a mini-batch ends."""


_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
_Shape = tuple[Structure | None, tuple[_Spec, ...]]
"""Structure of an input, and of each tensor its shape, strides, dtype and whether it requires a gradient."""


@dataclass(slots=True)
class _ShapeGraphs:
    """Graphs for one shape: those in use, by the pass that uses them, and free ones."""

    plain_steps: int = 0
    last_step: int = -1
    used: dict[StageGraphs, weakref.ref[object]] = field(default_factory=dict)
    free: list[StageGraphs] = field(default_factory=list)

    def is_plain(self, step: int) -> bool:
        """True if units of a step run plainly: too few steps were watched."""
        return self.plain_steps < _PLAIN_STEPS or step == self.last_step

    def take(self, user: object) -> StageGraphs | None:
        """Free graphs, for a pass; None: a further unit is in flight."""
        if not self.free:  # passes that were dropped without a backward
            self.free = [graphs for graphs, user in self.used.items() if user() is None]
        if not self.free:
            return None
        graphs = self.free.pop()
        self.used[graphs] = weakref.ref(user)
        return graphs

    def give_back(self, graphs: StageGraphs) -> None:
        """Free graphs, after their unit's last op."""
        if self.used.pop(graphs, None) is not None:
            self.free.append(graphs)


class Captures(StageWrapper):
    """Captures of one stage.

    Args:
        stage: the stage.

    Attributes:
        reason: reason why the stage runs plainly; None: it is captured, or will be.
        replays: number of forwards that replayed graphs.
    """

    def __init__(self, stage: CapturableStage) -> None:
        self._stage = stage
        self._device = stage.streams.device
        self.reason = _refuse_device(stage)
        self.replays = 0
        self._shapes: dict[_Shape, _ShapeGraphs] = {}
        self._draws: set[int] = set()
        self._step = -1
        self._state: PythonState | None = None
        self._attributes: ModuleAttributes | None = None
        self._settings: object = None
        self._addresses: list[object] = []
        self._changes = self._replayed_steps = 0
        self._rules: OperatorRules | None = None

    def report(self) -> CapturedStage:
        """Report on the graphs."""
        units = [len(shape.used) + len(shape.free) for shape in self._shapes.values()]
        shapes = sum(count > 0 for count in units)
        if self.reason is not None:
            return CapturedStage(0, 0, self.replays, self.reason)
        return CapturedStage(shapes, sum(units), self.replays)

    def graph_pass(self, *, splits: bool, sliced: bool) -> Callable[..., PlainPass] | None:
        """Return the maker of captured passes; None: units of this kind run plainly.

        Args:
            splits: True if the backward of a unit may be two ops.
            sliced: True if a unit is a slice of a sequence.
        """
        if sliced:
            self.run_plainly("its units are slices")
            return None
        if splits and self._stage.recompute is Recompute.LAYER:
            self.run_plainly(
                "its layers are computed again one by one (recompute) in two halves of a backward"
            )
            return None
        return partial(CapturedSplitPass if splits else CapturedPass, captures=self)

    def run_plainly(self, reason: str) -> None:
        """Run the stage plainly from now on."""
        if self.reason is None:
            self.reason = reason
            self._shapes.clear()
            self._state = None

    def forward(
        self, unit: PlainPass, value: Value, plain: Callable[[Value], Any]
    ) -> tuple[Value, UnitRun | None]:
        """Run a unit's layers; see ``captured_passes.UnitRunner``."""
        step, rows = unit.step, unit.rows
        known = self._shape_of(value, step)
        if known is None:
            return plain(value), None
        structure, tensors, of_shape = known
        if of_shape.is_plain(step):
            if step != of_shape.last_step:
                of_shape.plain_steps, of_shape.last_step = of_shape.plain_steps + 1, step
            return self._run_watched(value, tensors, step, rows)
        graphs = self._take(of_shape, unit, structure, tensors)
        output, leaves = graphs.forward(tensors, step, rows)
        self._refuse_changes()
        return output, CapturedRun(graphs, tensors, leaves, of_shape.give_back)

    def first_forward(self, unit: PlainPass, value: Value, plain: Callable[[Value], Any]) -> Value:
        """Run layers that run again for the backward; see ``captured_passes.UnitRunner``."""
        step, rows = unit.step, unit.rows
        with torch.enable_grad():  # the setting in which layers were watched, and are captured
            known = self._shape_of(value, step)
        if known is None:
            return plain(value)
        structure, tensors, of_shape = known
        if of_shape.is_plain(step):
            return plain(value)
        graphs = self._take(of_shape, unit, structure, tensors)
        output, _ = graphs.forward(tensors, step, rows)
        of_shape.give_back(graphs)
        self._refuse_changes()
        return output

    def _shape_of(
        self, value: Value, step: int
    ) -> tuple[Structure | None, list[Tensor], _ShapeGraphs] | None:
        # Structure and tensors of an input, and the graphs of their shapes; None: it has none.
        if step != self._step:
            self._begin_step(step)
        if type(value) is WithAuxLosses:
            self.run_plainly("losses of layers before it pass through")
        if self.reason is not None:
            return None
        structure, tensors = flatten_value(value, f"stage {self._stage.stage}")
        shape = structure, tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        of_shape = self._shapes.get(shape)
        if of_shape is None:
            if len(self._shapes) == _MOST_SHAPES:
                return None
            of_shape = self._shapes[shape] = _ShapeGraphs()
        return structure, tensors, of_shape

    def _take(
        self, of_shape: _ShapeGraphs, unit: PlainPass, structure: Structure | None, tensors: Sequence[Tensor]
    ) -> StageGraphs:
        graphs = of_shape.take(unit)
        if graphs is not None:
            self.replays += 1
            return graphs
        stage, draws = self._stage, frozenset(self._draws)
        changing = frozenset() if stage.replays is None else stage.replays.changing()
        layers = CapturedLayers(
            f"stage {stage.stage}", stage.layers, draws, stage.streams, stage.precision, changing
        )
        make = StageGraphs if stage.replays is None else RecomputedStageGraphs
        graphs = make(layers, structure, tensors)
        of_shape.used[graphs] = weakref.ref(unit)
        return graphs

    def _refuse_changes(self) -> None:
        if self._state is not None and not self._state.unchanged():  # in the capture: no replay would do it
            self.run_plainly(f"its layers change {self._state.changed()[0].label}")
        elif self._attributes is not None and (change := self._attributes.change()) is not None:
            self.run_plainly(f"its layers change {change}")

    @contextmanager
    def watched_backward(self) -> Iterator[None]:
        """Context of a plain backward that is compared with the rules."""
        streams, recomputes = self._stage.streams, self._stage.recompute is Recompute.LAYER
        before = streams.states()
        self._rules = rules = OperatorRules(self._device)
        try:
            with rules:
                yield
        finally:
            self._rules = None
        if rules.reason is not None:
            self.run_plainly(f"{rules.reason} in the backward")
        elif rules.draws or not (recomputes or streams.drew_nothing(before)):
            self.run_plainly("its backward draws random numbers")

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        rules = self._rules
        if rules is None:
            return run(value, step, rows)
        streams = self._stage.streams
        seeds = [generator.initial_seed() for generator in streams.generators]
        before, drew = streams.states(), rules.draws
        output = run(value, step, rows)
        rules.draws = drew  # a layer draws from its own stream, in a further run too
        with without_modes():
            if not streams.drew_nothing(before):
                self._draws.add(layer.index)
        if [generator.initial_seed() for generator in streams.generators] != seeds:
            rules.reason = rules.reason or "a layer seeds torch's random numbers"
        return output

    @override
    def breaks_block(self, layer: NamedLayer) -> None:
        """Return None: compiled stages are not captured."""

    def _run_watched(
        self, value: Value, inputs: Sequence[Tensor], step: int, rows: SampleRows
    ) -> tuple[Value, UnitRun | None]:
        stage = self._stage
        if self._state is None or not self._state.unchanged():
            self._state = python_state(stage.layers)
        self._attributes, self._settings = ModuleAttributes(stage.layers), settings()
        weights = stage.parameters()
        before = versions(weights)
        self._rules = rules = OperatorRules(self._device)
        try:
            with rules:
                output = stage.run_layers(value, step, rows)
        finally:
            self._rules = None
        addresses, self._addresses = self._addresses, self._current_addresses()
        reason = (
            rules.reason
            or refuse_modules(stage.layers)
            or refuse_state(self._state)
            or next((f"its layers change {w.label}" for w in self._state.changed()), None)
            or (f"its layers change {change}" if (change := self._attributes.change()) else None)
            or ("its layers change their weights" if versions(weights) != before else None)
            or ("its layers replace buffers" if addresses and addresses != self._addresses else None)
            or self._refuse_stage()
        )
        structure, outputs = None, list[Tensor]()
        try:
            structure, outputs = flatten_value(output, f"stage {stage.stage}")
        except ConfigError:
            reason = reason or "its output is no tree of tensors"
        if any(tensor.device.type != self._device.type for tensor in (*inputs, *outputs)):
            reason = reason or "its inputs or outputs contain numbers, or tensors on the host"
        reason = reason or refuse_graph(outputs, [*inputs, *weights, *stage.precision.masters])
        if reason is not None:
            self.run_plainly(reason)
            return output, None
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
        run = WatchedRun(inputs, outputs, leaves, stage.split_planner, self.watched_backward)
        return unflatten_value(structure, leaves), run

    def _begin_step(self, step: int) -> None:
        self._step = step
        if self.reason is not None or self._state is None:
            return
        self._replayed_steps += any(shape.free for shape in self._shapes.values())
        changed: list[str] = []
        if not self._state.unchanged():  # other objects, which may have the same values
            state = python_state(self._stage.layers)
            changed, self._state = self._state.differences(state), state
        if self._attributes is not None and (change := self._attributes.change()) is not None:
            changed.append(change)
        if settings() != self._settings:
            changed.append("a setting of torch, such as autocast")
        if self._current_addresses() != self._addresses:
            changed.append("the memory of its weights or buffers")
        reason = self._refuse_stage()
        if reason is not None:
            self.run_plainly(reason)
        elif changed:
            self._changes = 1 if self._replayed_steps >= _WORTH else self._changes + 1
            self._replayed_steps = 0
            self._shapes.clear()
            self._state, self._attributes, self._addresses = None, None, []
            if self._changes == _MOST_CHANGES:
                self.run_plainly(f"{changed[0]} changes between steps")

    def _current_addresses(self) -> list[object]:
        modules = (module for layer in self._stage.layers for module in layer.module.modules())
        return [
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.requires_grad, tensor.dtype)
            for module in modules
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ]

    def _refuse_stage(self) -> str | None:
        stage = self._stage
        conditions = (
            (stage.module is not None, "parallelize runs it within a module of its own"),
            (stage.has_skips, "values go around its layers (skips, or states of slices)"),
            (stage.versions is not None, "the schedule has several versions of its weights"),
            (bool(stage.deferred), "deferred_batch_norm sums statistics"),
            (bool(stage.aux_losses.collects), "its layers add losses"),
            (any(map(stage.means.applies_to, stage.layers)), "its last layer gives the loss"),
            (stage.entry.changes is not False, "it changes its input in place"),
            (
                stage.recompute is not Recompute.NONE and stage.buffers.change,
                "it changes buffers, and is computed again (recompute) with copies of these",
            ),
        )
        return next((reason for holds, reason in conditions if holds), None)


def _refuse_device(stage: CapturableStage) -> str | None:
    device: Any = stage.streams.device
    if not hasattr(torch.get_device_module(device), "CUDAGraph"):
        return f"a {device.type} device has no graphs"
    if device.type == "cuda" and stage.streams.shared:
        return "its worker is a thread, and a process captures one graph at a time"
    return None
