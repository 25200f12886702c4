"""Passes of units through a stage, from the forward to the last op that makes gradients.

A pass owns what a unit (a micro-batch, a share or a slice of one) leaves in a stage between its ops. The ways
to run a stage are classes with the same verbs: ``forward``, ``recompute``, ``backward``,
``weight_gradients``, ``release``. ``LocalStage.begin`` makes a pass, and everybody who runs a stage uses one:
ops, evaluation, checks, measurement. Wrappers around layers (random streams, precision, compiled blocks)
belong to the stage; no pass names them.

::

    PlainPass       input ── layers ── head ── outputs     the graph is saved from the input to the outputs
    SplitPass       input ── layers ┊ layers ── head       detach points (┊) end the input gradient's pieces
    RecomputedPass  input (saved)   no graph until recompute(), which makes one of the passes above
    SlicedPass      any of these, with a state from the slice before and to the slice after

Invariant: a pass sends and receives nothing. The engine calls ``settle`` and ``release`` when it has time, in
a fixed order, so memory is freed in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from counterflow.api.skip import Carried
from counterflow.common.tensors.dtensors import settled
from counterflow.common.tensors.graphs import gradient_edge, graph_of
from counterflow.common.trees import mapped
from counterflow.verification.diagnosis.graph_leaves import StageGraph, diagnose_graph

from ..messages.values import Value, flatten_value
from ..transport.base import PeerLost, TimedOut
from .detach_points import DetachPoints
from .input_guard import copied
from .interface import RunnableStage
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes, SavedStorage
from .split_backward import SplitBackward
from .weight_gradients import accumulate

Output = tuple[Any, list[Tensor]]
"""Structure of a stage's output, and its tensors."""

_NOTHING = nullcontext()


class Head(Protocol):
    """Function after a stage's layers: it takes their output apart, or makes the loss of it."""

    def __call__(self, output: Any, *, rerun: bool = False) -> Output:
        """Return the output's structure and tensors.

        Args:
            output: output of the layers.
            rerun: True if the unit's output was read before, so that nothing is recorded a second time.
        """

    def empty(self) -> Output:
        """Return the output of a unit without samples."""

    def targets(self) -> Sequence[Tensor]:
        """Return tensors that the loss reads beside the output."""


class RawHead:
    """Head that returns a stage's output as it is, in the place of its structure."""

    def __call__(self, output: Any, *, rerun: bool = False) -> Output:
        """Return the output, without its tensors."""
        del rerun
        return output, []

    @staticmethod
    def empty() -> Output:
        """Return None."""
        return None, []

    @staticmethod
    def targets() -> list[Tensor]:
        """Return no targets."""
        return []


class BoundaryHead:
    """Head of a stage whose output goes to the next stage, for all units.

    Args:
        place: the stage, for messages.
    """

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, output: Any, *, rerun: bool = False) -> Output:
        """Return the output's structure and tensors."""
        del rerun
        return flatten_value(output, self._place)

    def empty(self) -> Output:
        """Return the output of a unit without samples."""
        return flatten_value(None, self._place)

    @staticmethod
    def targets() -> list[Tensor]:
        """Return no targets."""
        return []


class StagePass:
    """One unit in one stage without gradients: an evaluation, of which nothing is saved.

    Args:
        stage: the stage.
        rows: samples of the unit.
        step: number of the step.
        head: function after the layers.
        meter: count of the bytes that are saved for backwards.

    Attributes:
        buffers: receive buffers of the input, which are reused after the pass.
        skip_gradients: number of input tensors with a gradient by skip connection.
        outputs: outputs with a graph, until ``settle``.
    """

    __slots__ = ("buffers", "head", "meter", "outputs", "rows", "skip_gradients", "stage", "step")

    def __init__(
        self, stage: RunnableStage, rows: SampleRows, step: int, head: Head, meter: SavedBytes
    ) -> None:
        self.stage, self.rows, self.step, self.head, self.meter = stage, rows, step, head, meter
        self.buffers: Sequence[Tensor] = ()
        self.skip_gradients: Sequence[int] = ()
        self.outputs: list[Tensor] = []

    def forward(self, inputs: list[Tensor], value: Value) -> Output:
        """Run the layers and the head.

        Args:
            inputs: tensors of the input, as leaves.
            value: the input, of these tensors.
        """
        stage = self.stage
        if stage.precision.plain:
            return self._forward(inputs, value)
        with stage.precision.computing():
            return self._forward(inputs, value)

    def recompute(self) -> None:
        """Make the graph for the backward, if the forward made none."""

    def prepare(self, *, defers: bool) -> None:
        """Traverse the graph of a split backward, before the gradients are received.

        Args:
            defers: True if ``backward`` leaves weight gradients to ``weight_gradients``.
        """

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Make the gradients of the inputs, and those of weights that are not left to ``weight_gradients``.

        Args:
            gradients: gradients of the outputs; empty: the only output is a loss.
        """
        raise NotImplementedError

    def weight_gradients(self) -> None:
        """Make the gradients that a split backward has left; without a split there are none."""

    def input_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the inputs that require one, and drop them here."""
        return []

    def settle(self) -> None:
        """Drop what the last op needed and no later one does, after its results were sent."""

    def release(self) -> None:
        """End the count of what was saved for the op that has ended."""

    def count_state(self, tensors: Sequence[Tensor]) -> None:
        """Count the state that a slice leaves, until the next slice has it among its inputs."""

    def release_state(self) -> None:
        """End the count of the state that a slice has left."""

    def _forward(self, inputs: list[Tensor], value: Value) -> Output:
        del inputs
        return self.head(self.stage.run_layers(value, self.step, self.rows))


class EmptyPass(StagePass):
    """A unit without samples: no layer runs, and no gradient is received."""

    __slots__ = ()

    @override
    def forward(self, inputs: list[Tensor], value: Value) -> Output:
        del inputs, value
        return self.head.empty()

    @override
    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        del gradients


class GuardedPass(StagePass):
    """An evaluation in a check: a unit counts as empty if a layer fails on it, here or earlier."""

    __slots__ = ()

    @override
    def _forward(self, inputs: list[Tensor], value: Value) -> Output:
        del inputs
        if (value.value if type(value) is Carried else value) is None:
            return self.head.empty()
        try:
            # A layer may change its input in place, and the samples of the mini-batch run several times.
            output = self.stage.run_layers(mapped(torch.clone, value), self.step, self.rows)
        except (PeerLost, TimedOut):
            raise
        except Exception:  # it is the outcome of the check
            return self.head.empty()
        return self.head(output)


class PlainPass(StagePass):
    """A unit whose forward saves its graph, and whose backward is one op.

    Attributes:
        inputs: leaves of the graph.
        edges: places in the graph where the backward begins.
        seed: gradient of the loss, a last stage's first output, on its device: autograd would make it where
            it keeps the loss. None: another stage.
        graded: for each output that was published as requiring a gradient, True if it has one after a
            recomputation; None: all have.
        saved: storages that are counted as saved.
        detach_points: detach points of the graph; None: it has none.
    """

    __slots__ = ("_ended", "detach_points", "edges", "graded", "inputs", "saved", "seed")

    def __init__(
        self, stage: RunnableStage, rows: SampleRows, step: int, head: Head, meter: SavedBytes
    ) -> None:
        super().__init__(stage, rows, step, head, meter)
        self.inputs: list[Tensor] = []
        self.edges: Sequence[GradientEdge] = ()
        self.seed: Tensor | None = None
        self.graded: Sequence[bool] | None = None
        self.saved: list[SavedStorage] = []
        self.detach_points: DetachPoints | None = None
        self._ended = False

    @override
    def _forward(self, inputs: list[Tensor], value: Value) -> Output:
        stage, self.inputs = self.stage, inputs
        if stage.replays is not None:
            stage.replays.count_saved = self.meter.counter(self.saved)
        spare = None if stage.checked else mapped(copied, value)
        structure, tensors = self.head(self.run(value))
        if self.meter.counting or self.detach_points is not None or not stage.checked:
            self.end_graph(tensors, spare)
        self.outputs = tensors
        return structure, tensors

    def run(self, value: Value) -> Any:
        """Run the layers; the graph of their output is the one that the backward traverses."""
        return self.stage.run_layers(value, self.step, self.rows)

    def run_first(self, value: Value) -> Any:
        """Run the layers without a graph; ``run`` makes it later, of the same value."""
        return self.stage.run_layers(value, self.step, self.rows)

    def end_graph(self, outputs: list[Tensor], spare: Value) -> None:
        """Count what the graph saves, and diagnose the stage's first graph.

        Args:
            outputs: outputs with the graph.
            spare: a copy of the input, on which the stage may run again; None if it was checked before.
        """
        if self.meter.counting:
            ends = () if self.detach_points is None else self.detach_points.ends
            self.meter.count_graph(graph_of(outputs, more=ends), self.saved)
        if self.detach_points is not None:
            self.detach_points.learn(outputs, self.inputs)
        if not self.stage.checked:
            self.stage.note_checked()
            diagnose_graph(self._first_graph(outputs), partial(self._rerun, spare))

    def _first_graph(self, outputs: list[Tensor]) -> StageGraph:
        stage, points = self.stage, self.detach_points
        leaves, ends = ([], []) if points is None else (points.leaves, points.ends)
        return StageGraph(
            stage.stage,
            outputs,
            inputs=[*self.inputs, *self.head.targets()],
            weights=stage.parameters(),
            leaves=[*stage.graph_leaves(), *leaves],
            ends=ends,
            casts=bool(stage.precision.masters),
            recomputes=stage.replays is not None,
        )

    def _rerun(self, value: Value) -> Sequence[Tensor]:
        stage = self.stage
        if stage.replays is not None:
            stage.replays.count_saved = None
        with stage.buffers.swapped_in(stage.buffers.snapshot()):
            output = stage.run_layers(value, self.step, self.rows)
            return self.head(output, rerun=True)[1]

    @override
    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._ended = True
        edges = self.edges
        if self.graded is not None and gradients:
            gradients = [g for g, graded in zip(gradients, self.graded, strict=True) if graded]
        if not gradients and self.seed is not None:
            gradients = [self.seed]
        known = [gradient for gradient in gradients if gradient is not None]
        if len(known) < len(gradients):
            edges = [e for e, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        if (around := self.stage.backward_context(self.meter)) is None:
            self._differentiate(edges, known)
        else:
            with around:
                self._differentiate(edges, known)

    def _differentiate(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        if edges:
            accumulate(edges, gradients, into=None, direct=self.stage.split_planner.direct)

    @override
    def input_gradients(self) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for tensor in self.inputs:
            if tensor.requires_grad:
                gradient = tensor.grad
                gradients.append(
                    gradient if gradient is None or type(gradient) is Tensor else settled(gradient)
                )
                tensor.grad = None
        return gradients

    @override
    def settle(self) -> None:
        if self.outputs:
            self.edges = [gradient_edge(t) for t in self.outputs if t.requires_grad]
            self.seed = torch.ones_like(self.outputs[0]) if self.stage.last else None
            self.outputs = []
        elif self._ended:
            self.inputs, self.edges, self.detach_points = [], (), None

    @override
    def release(self) -> None:
        self.meter.release(self.saved)

    def deferred(self) -> list[Tensor]:
        """Return the tensors that are saved between ``backward`` and ``weight_gradients``."""
        return []


class SplitPass(PlainPass):
    """A unit whose backward is two ops: the input gradient first, the weight gradients later.

    Attributes:
        split: the backward, from ``prepare`` on.
        defers: True if ``backward`` leaves weight gradients to ``weight_gradients``; False: the backward of
            another unit of the forward is split.
    """

    __slots__ = ("defers", "split")

    def __init__(
        self, stage: RunnableStage, rows: SampleRows, step: int, head: Head, meter: SavedBytes
    ) -> None:
        super().__init__(stage, rows, step, head, meter)
        self.split: SplitBackward | None = None
        self.defers = True

    @override
    def run(self, value: Value) -> Any:
        with self.stage.detaching() as self.detach_points:
            return self.stage.run_layers(value, self.step, self.rows)

    @override
    def prepare(self, *, defers: bool) -> None:
        self.defers = defers
        self.split = SplitBackward(self.stage.split_planner, self.inputs, self.detach_points)
        self.split.look_ahead(self.edges)

    @override
    def _differentiate(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        assert self.split is not None
        if edges:
            self.split.input_gradient(edges, gradients, look=self.meter.counting)
            if not self.defers:
                self.split.weight_gradients()

    @override
    def weight_gradients(self) -> None:
        assert self.split is not None
        with self.stage.backward_context(self.meter) or _NOTHING:
            self.split.weight_gradients()
        self.split = None

    @override
    def release(self) -> None:
        super().release()
        if self.split is not None and self.defers and self.meter.counting:
            for tensor in self.deferred():
                self.meter.count(tensor, self.saved)

    @override
    def deferred(self) -> list[Tensor]:
        return [] if self.split is None else self.split.saved_tensors()
