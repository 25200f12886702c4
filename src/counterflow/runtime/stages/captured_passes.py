"""Passes of a captured stage: the layers run by graphs or watched, and what follows them by autograd.

::

    inputs ─[layers: a UnitRun]─▸ outputs ──copy──▸ leaves ─[head: autograd]─▸ loss

Invariant: autograd's graph of the pass has what follows the layers alone. The layers' backward begins at the
gradients of the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from counterflow.common.tensors.graphs import gradient_edge

from ..messages.values import Value
from .interface import RunnableStage
from .passes import Head, PlainPass, SplitPass
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes
from .split_backward import SplitBackward, SplitBackwardPlanner
from .stage_graphs import StageGraphs
from .weight_gradients import accumulate


class UnitRun:
    """Run of the layers for one unit, whose backward begins at the gradients of the output's leaves.

    Args:
        leaves: tensors of the output, as leaves of what follows.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves

    def backward(self, *, direct: bool, defers: bool = False) -> None:
        """Make the gradients of the inputs and weights from those of the leaves.

        Args:
            direct: as of ``weight_gradients.accumulate``.
            defers: True to leave gradients of weights to ``weight_gradients``.
        """
        raise NotImplementedError

    def weight_gradients(self, *, direct: bool) -> None:
        """Make the gradients that ``backward`` has left."""
        raise NotImplementedError


class CapturedRun(UnitRun):
    """Run by graphs.

    Args:
        graphs: graphs of the unit.
        inputs: tensors of the input.
        leaves: tensors of the output, as leaves.
        end: called when the graphs are free for another unit.
    """

    def __init__(
        self,
        graphs: StageGraphs,
        inputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        end: Callable[[StageGraphs], None],
    ) -> None:
        super().__init__(leaves)
        self._graphs, self._end = graphs, end
        self._inputs = [tensor for tensor in inputs if tensor.requires_grad]

    @override
    def backward(self, *, direct: bool, defers: bool = False) -> None:
        results = self._graphs.backward([leaf.grad for leaf in self.leaves], direct=direct, defers=defers)
        for leaf, gradient in zip(self._inputs, results, strict=True):
            leaf.grad = gradient
        self.leaves = ()
        if not defers:
            self._end(self._graphs)

    @override
    def weight_gradients(self, *, direct: bool) -> None:
        self._graphs.weight_gradients(direct=direct)
        self._end(self._graphs)


class WatchedRun(UnitRun):
    """Run by autograd whose operators are compared with the rules of captures.

    Args:
        inputs: tensors of the input, as leaves.
        outputs: tensors of the output, with the layers' graph.
        leaves: the same as leaves.
        split_planner: planner of the stage's split backwards.
        watched: returns the context of a backward.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        split_planner: SplitBackwardPlanner,
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(leaves)
        self._inputs, self._outputs = inputs, outputs
        self._split_planner, self._watched = split_planner, watched
        self._split: SplitBackward | None = None

    @override
    def backward(self, *, direct: bool, defers: bool = False) -> None:
        pairs = zip(self._outputs, self.leaves, strict=True)
        known = [(gradient_edge(output), leaf.grad) for output, leaf in pairs if leaf.grad is not None]
        if not known:
            return
        edges, gradients = [edge for edge, _ in known], [gradient for _, gradient in known]
        self.leaves = self._outputs = ()
        with self._watched():
            if defers:
                self._split = SplitBackward(self._split_planner, self._inputs)
                self._split.input_gradient(edges, gradients)
            else:
                accumulate(edges, gradients, into=None, direct=direct)

    @override
    def weight_gradients(self, *, direct: bool) -> None:
        split, self._split = self._split, None
        if split is not None:
            with self._watched():
                split.weight_gradients()


class UnitRunner(Protocol):
    """Captures of a stage, as passes use them."""

    def forward(
        self, unit: PlainPass, value: Value, plain: Callable[[Value], Any]
    ) -> tuple[Value, UnitRun | None]:
        """Run a unit's layers, by graphs if there are some or can be.

        Args:
            unit: the unit's pass.
            value: the input.
            plain: runs the layers plainly.

        Returns:
            The output, and the run that makes its gradients; None: the output has autograd's graph.
        """

    def first_forward(self, unit: PlainPass, value: Value, plain: Callable[[Value], Any]) -> Value:
        """Return the output of layers that run again for the backward; arguments as of ``forward``."""


class _CapturedUnit(PlainPass):
    """Part of a pass whose layers run by graphs, if its stage is captured; otherwise the pass runs plainly.

    Attributes:
        captures: captures of the stage.
        unit: run of the layers, captured or watched, until its last op; None: they run plainly.
    """

    # Without __slots__, as the bases of a class cannot both have some.

    def __init__(
        self,
        stage: RunnableStage,
        rows: SampleRows,
        step: int,
        head: Head,
        meter: SavedBytes,
        *,
        captures: UnitRunner,
    ) -> None:
        super().__init__(stage, rows, step, head, meter)
        self.captures = captures
        self.unit: UnitRun | None = None

    @override
    def run(self, value: Value) -> Any:
        if not self.stage.checked or self.meter.counting:
            return super().run(value)
        output, self.unit = self.captures.forward(self, value, super().run)
        return output

    @override
    def run_first(self, value: Value) -> Any:
        if not self.stage.checked or self.meter.counting:
            return super().run_first(value)
        return self.captures.first_forward(self, value, super().run_first)


class CapturedPass(_CapturedUnit):
    """A captured unit whose backward is one op."""

    @override
    def _differentiate(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        super()._differentiate(edges, gradients)
        unit, self.unit = self.unit, None
        if unit is not None:
            unit.backward(direct=self.stage.split_planner.direct)


class CapturedSplitPass(_CapturedUnit, SplitPass):
    """A captured unit whose backward is two ops."""

    @override
    def prepare(self, *, defers: bool) -> None:
        if self.unit is None:
            super().prepare(defers=defers)
        self.defers = defers

    @override
    def _differentiate(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        if self.unit is None:
            super()._differentiate(edges, gradients)
            return
        PlainPass._differentiate(self, edges, gradients)  # noqa: SLF001 - of the head, which is not split
        self.unit.backward(direct=self.stage.split_planner.direct, defers=self.defers)
        if not self.defers:
            self.unit = None

    @override
    def weight_gradients(self) -> None:
        unit, self.unit = self.unit, None
        if unit is None:
            super().weight_gradients()
            return
        with self.stage.backward_context(self.meter) or nullcontext():
            unit.weight_gradients(direct=self.stage.split_planner.direct)
