"""A stage's backward in two ops: first the gradient of its input, later those of its weights.

The graph is traversed once for the input gradient. Where weights enter it (``graph_split.py``) the gradient
is saved, and tensors that only the input gradient needed are dropped. Later autograd enters each of these
nodes again with its gradient, for its weights alone, so gradients are accumulated in place and hooks are
called as usual.

The graph of many layers is made in pieces, with detach points at layers' inputs: autograd looks at all nodes
beneath the one it enters, which would be the whole stage each time. Detach points also separate layers that
need no input gradient (a first stage's embedding): their whole backward waits. The first graph of a stage is
made in one piece, and shows possible detach points: where layers share only the value that is passed on.

Invariant: the gradients are those of a whole backward. A graph that cannot be split is computed whole, with
the input gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from typing_extensions import override

from counterflow.common.tensors.graphs import pointers
from counterflow.common.tensors.torch_private import run_backward
from counterflow.errors import ConfigError

from ..messages.values import Value
from .detach_points import DetachPoint, DetachPoints, enters
from .graph_split import (
    GraphPartition,
    Shape,
    TraversedGraph,
    partition_graph,
    saved_in,
    slots,
    traverse,
)
from .hooks_once import Half, HooksOnce
from .named_layer import NamedLayer
from .replays import Packed, Replay
from .sample_rows import SampleRows
from .split_graphs import deferring
from .stage_wrappers import Run, StageWrapper
from .weight_gradients import (
    PendingGradients,
    PendingProduct,
    PendingWeightGradients,
    accumulate,
    add_gradient,
)

_NOTHING = nullcontext()

_MOST_SHAPES = 64
"""Maximum number of shapes of graphs that are known at once."""

Gradients = Sequence[Tensor | None]


class SplitBackwardPlanner(StageWrapper):
    """Plans of the split backwards of one stage, by shape of graph, and the detach points of its forwards.

    Args:
        stage: number of the stage.
        constant: returns the stage's parameters and buffers.
        direct: whether autograd's engine is called without autograd's checks (on the CPU, where a graph runs
            in the thread that calls).
        first: number of its first layer, before which there is no detach point.
    """

    break_reason = "the stage's backward is split"

    def __init__(
        self, stage: int, constant: Callable[[], Sequence[Tensor]], *, direct: bool, first: int = 0
    ) -> None:
        self.stage = stage
        self._first = first
        self._detach_points: DetachPoints | None = None
        """Detach points of the current forward, if its backward is split."""
        self.direct = direct
        self.detached_layers: frozenset[int] | None = None
        """Layers with a detach point before them; None: not known yet."""
        self.hooks = HooksOnce()
        self.is_split: bool | None = None
        """True if a backward left weight gradients; None: there was no backward yet."""
        self._constant = constant
        self._partitions: dict[Shape, GraphPartition] = {}
        self.gathered: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of weight gradients, in which the weights are whole."""
        self.watches_hooks = True
        """True if hooks that forwards register are intercepted, so that ``hooks`` knows of any."""

    @property
    def gathers(self) -> bool:
        """True if hooks of modules gather weights as a backward of autograd passes them."""
        return self.gathered is not nullcontext

    def run_whole(self, gathered: Callable[[], AbstractContextManager[None]]) -> None:
        """Have no detach points, for hooks of modules that gather weights as one backward passes them.

        Args:
            gathered: context in which the weights are whole.
        """
        self.join_layers()
        self.gathered = gathered

    def join_layers(self) -> None:
        """Have no detach points, for layers that are compiled as one function."""
        self.detached_layers = frozenset()

    @contextmanager
    def detaching(self) -> Iterator[DetachPoints]:
        """Context of a forward that records the detach points of its graph."""
        self._detach_points = detach_points = DetachPoints(self)
        try:
            yield detach_points
        finally:
            self._detach_points = None

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        if self._detach_points is not None and layer.index != self._first:
            value = self._detach_points.before(layer.index, value)
        return run(value, step, rows)

    def note(self, replay: Replay) -> None:
        """Record the replay of a layer that is recomputed in the current forward."""
        if self._detach_points is not None:
            self._detach_points.replays.append(replay)

    def partition(
        self, graph: TraversedGraph, inputs: Sequence[Tensor], detach_points: Sequence[DetachPoint]
    ) -> GraphPartition:
        """Partition of a graph, computed once for all graphs of its shape.

        Args:
            graph: a piece of a graph, or all of it.
            inputs: inputs of the graph: where the next piece ends, and the stage's own.
            detach_points: detach points between the pieces, up to this piece's.

        Raises:
            ConfigError: the piece extends past another one's end, which the first graph did not.
        """
        partition = self._partitions.get(graph.shape)
        if partition is None:
            if len(self._partitions) == _MOST_SHAPES:
                self._partitions.clear()
            partition = partition_graph(graph, inputs, pointers(self._constant()))
            if enters(graph, inputs, detach_points):
                raise ConfigError(
                    f"a layer of stage {self.stage} takes a tensor of another layer past the layers between "
                    "them, and did not in the first forward; pass it on through them, or take a schedule "
                    "that splits no backward"
                )
            self._partitions[graph.shape] = partition
        return partition


class _Plan(NamedTuple):
    """Plan of a piece of a graph.

    Attributes:
        edges: edges where it begins.
        nodes: its nodes.
        leaves: leaf tensors by the number of the node that accumulates their gradient.
        partition: its partition.
        weights: weights whose gradients are made with the input gradient.
        places: by boundary, the edges with whose gradients its weight gradients begin.
    """

    edges: Sequence[GradientEdge]
    nodes: Sequence[Node]
    leaves: Mapping[int, Tensor]
    partition: GraphPartition
    weights: Sequence[Tensor]
    places: Sequence[Sequence[GradientEdge]]


class SplitBackward:
    """The backward of one forward of a stage, in two.

    Args:
        split_planner: planner of the stage.
        inputs: input leaves of the stage.
        detach_points: detach points of the forward's graph; None: there are none.
    """

    def __init__(
        self,
        split_planner: SplitBackwardPlanner,
        inputs: Sequence[Tensor],
        detach_points: DetachPoints | None = None,
    ) -> None:
        self.split_planner = split_planner
        self._inputs = [tensor for tensor in inputs if tensor.requires_grad]
        self._detach_points = detach_points.points if detach_points is not None else []
        self._replays = detach_points.replays if detach_points is not None else []
        self._pending: list[PendingGradients] = []
        self._saved: list[Any] = []
        self._ahead: _Plan | None = None

    def look_ahead(self, edges: Sequence[GradientEdge]) -> None:
        """Make the plan of the first piece, before the gradients of ``edges`` are received."""
        inputs = [*self._detach_points[-1].leaves, *self._inputs] if self._detach_points else self._inputs
        if edges and inputs:
            self._ahead = self._plan(edges, inputs, self._detach_points)

    def input_gradient(
        self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], *, look: bool = False
    ) -> None:
        """Make the gradients of the inputs, and those of weights that are not left to ``weight_gradients``.

        Args:
            roots: outputs of the stage that require a gradient.
            gradients: gradients of ``roots``; empty: the only output is a loss.
            look: True if ``saved_tensors`` is called afterwards.
        """
        if self._ahead is not None and roots is self._ahead.edges:
            edges = self._ahead.edges
        else:
            edges = [get_gradient_edge(root) if isinstance(root, Tensor) else root for root in roots]
        with self.split_planner.hooks.making(Half.INPUT_GRADIENT):
            self._pieces(edges, gradients, look=look)
        for replay in self._replays:
            replay.settle()
        self._detach_points, self._inputs, self._replays = [], [], []
        self.split_planner.is_split = bool(self.split_planner.is_split or self._pending)

    def _pieces(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor], *, look: bool) -> None:
        detach_points = list(self._detach_points)
        while detach_points:  # what layers add to the loss goes from the stage's input past all layers
            self._piece(
                edges, gradients, [*detach_points[-1].leaves, *self._inputs], detach_points, look=look
            )
            point = detach_points.pop()
            pairs = [
                (e, x.grad) for e, x in zip(point.edges, point.leaves, strict=True) if x.grad is not None
            ]
            for leaf in point.leaves:
                leaf.grad = None
            edges, gradients = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
        self._piece(edges, gradients, self._inputs, detach_points, look=look)

    def saved_tensors(self) -> list[Tensor]:
        """Return the tensors that are saved between the two ops: gradients, and with ``look`` the graph's."""
        saved = [item.tensor if isinstance(item, Packed) else item for item in self._saved]
        self._saved.clear()
        return [
            *(tensor for tensor in saved if isinstance(tensor, Tensor)),
            *(
                gradient
                for pending in self._pending
                for gradient in pending.gradients
                if isinstance(gradient, Tensor)
            ),
        ]

    def weight_gradients(self) -> None:
        """Accumulate the gradients that ``input_gradient`` left."""
        split_planner, pending = self.split_planner, self._pending
        pending.reverse()
        with split_planner.hooks.making(Half.WEIGHT_GRADIENTS), split_planner.gathered():
            while pending:
                pending.pop().accumulate(direct=split_planner.direct)

    def _piece(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        detach_points: Sequence[DetachPoint],
        *,
        look: bool,
    ) -> None:
        if not edges:
            return
        direct = self.split_planner.direct
        if not inputs:
            self._pending.append(PendingWeightGradients(edges, gradients, None))
            if look:
                numbered = enumerate(traverse(edges, inputs).nodes)
                self._saved += (saved for number, node in numbered for _, saved in slots(number, node))
            return
        plan, self._ahead = self._ahead, None
        if plan is None or plan.edges is not edges:
            plan = self._plan(edges, inputs, detach_points)
        _, nodes, _, partition, weights, places = plan
        compiled = () if self.split_planner.gathers else [nodes[n] for n in partition.compiled]
        deferral = deferring(compiled, self._pending) if compiled else _NOTHING
        if not partition.boundaries:
            with deferral:
                accumulate(edges, gradients, into=None, direct=direct)
            return
        if look or self._replays:
            self._keep(list(saved_in(nodes, partition.saved)), look=look)
        reached = [inputs[number] for number in partition.inputs]
        wanted: list[Any] = [*reached, *weights]
        for edges_of_boundary in places:
            wanted += edges_of_boundary
        with deferral:
            results = _captured(edges, gradients, wanted, direct=direct)
        at = 0
        for tensor in reached:
            gradient = results[at]
            at += 1
            if gradient is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        for weight in weights:
            add_gradient(weight, results[at])
            at += 1
        self._save_boundary_gradients(plan, results, at)
        for slot in partition.dropped:
            saved = getattr(nodes[slot.node], slot.name)
            _drop(saved if slot.place is None else saved[slot.place])

    def _plan(
        self, edges: Sequence[GradientEdge], inputs: Sequence[Tensor], detach_points: Sequence[DetachPoint]
    ) -> _Plan:
        graph = traverse(edges, inputs)
        nodes, leaves = graph.nodes, graph.leaves
        partition = self.split_planner.partition(graph, inputs, detach_points)
        weights = [leaves[n] for n in partition.early] if partition.boundaries else ()
        places = [
            [GradientEdge(nodes[boundary.node], output) for output in boundary.outputs]
            for boundary in partition.boundaries
        ]
        return _Plan(edges, nodes, leaves, partition, weights, places)

    def _keep(self, saved: list[Any], *, look: bool) -> None:
        for packed in saved:
            if isinstance(packed, Packed):
                packed.mark_needed_twice()
        if look:
            self._saved += saved

    def _save_boundary_gradients(self, plan: _Plan, results: Gradients, at: int) -> None:
        split_planner = self.split_planner
        plain = split_planner.watches_hooks and not (split_planner.hooks.has_hooks or split_planner.gathers)
        for boundary, places in zip(plan.partition.boundaries, plan.places, strict=True):
            edges, gradients = [], []
            for place in places:
                gradient = results[at]
                at += 1
                if gradient is not None:
                    edges.append(place)
                    gradients.append(gradient)
            if edges:
                leaves = [plan.leaves[n] for n in boundary.weights]
                kind = PendingProduct if plain and boundary.is_product else PendingWeightGradients
                self._pending.append(kind(edges, gradients, leaves))


def _captured(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], wanted: Sequence[Any], *, direct: bool
) -> Gradients:
    if not direct or not gradients:
        return torch.autograd.grad(edges, wanted, gradients or None, retain_graph=True, allow_unused=True)
    captured: Gradients = run_backward(
        tuple(edges), tuple(gradients), True, False, tuple(wanted), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip
    return captured


def _drop(saved: Any) -> None:
    """Release saved tensors; a later access raises an error."""
    try:
        saved.register_hooks(_nothing, _gone)
    except RuntimeError:  # this graph saved nothing here; others of its shape may
        return


def _nothing(_: Tensor) -> None:
    return None


def _gone(_: None) -> Tensor:
    raise RuntimeError("a tensor that was saved for the input gradient alone is needed after it")
