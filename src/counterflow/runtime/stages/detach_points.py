"""Detach points of a stage's graph whose backward is split, and the pieces between them.

Invariant: all that two pieces share goes through their detach point, but for weights and for inputs of the
stage that go past all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from counterflow.common.graph_pieces import PieceRule
from counterflow.common.tensors.graphs import variable
from counterflow.common.tensors.torch_private import without_functions
from counterflow.common.trees import mapped, versions

from .graph_split import TraversedGraph, below, is_cut
from .input_guard import same_tensors
from .replays import Replay


class DetachPoint(NamedTuple):
    """Detach point between two pieces of a graph: the gradients of ``leaves`` continue at ``edges``."""

    edges: tuple[GradientEdge, ...]
    leaves: tuple[Tensor, ...]


class DetachedLayers(Protocol):
    """Facts about a stage's graphs that detach points read and learn."""

    detached_layers: frozenset[int] | None
    """Layers with a detach point before them; None: not known yet."""


class DetachPoints:
    """Detach points of one forward's graph, from the input on; recorded while the stage's layers run."""

    def __init__(self, split_planner: DetachedLayers) -> None:
        self.split_planner = split_planner
        self.points: list[DetachPoint] = []
        self.replays: list[Replay] = []
        """Replays of recomputed layers."""
        self._seen: dict[int, tuple[Any, list[int], tuple[GradientEdge, ...]]] = {}

    def before(self, layer: int, value: Any) -> Any:
        """Input of a layer in place of ``value``, the previous layer's output."""
        detached_layers = self.split_planner.detached_layers
        if detached_layers is not None and layer not in detached_layers:
            return value
        with without_functions():  # a node that is read here is none that the user's code reads
            return self._note(layer, value) if detached_layers is None else self._detached(value)

    def _note(self, layer: int, value: Any) -> Any:
        edges: list[GradientEdge] = []
        mapped(lambda tensor: _with_edge(tensor, edges), value)
        same = same_tensors(value)
        self._seen[layer] = same, versions(same), tuple(edges)
        return value

    def _detached(self, value: Any) -> Any:
        ends: list[GradientEdge] = []
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            ends.append(get_gradient_edge(tensor))
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1]

        value = mapped(leaf, value)
        if leaves:
            self.points.append(DetachPoint(tuple(ends), tuple(leaves)))
        return value

    def learn(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Find from the first graph the layers before which later graphs may have detach points."""
        if self.split_planner.detached_layers is not None:
            return
        roots = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        layers: set[int] = set()
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        rule = PieceRule(separates=bool(inputs))
        for layer, (value, before, edges) in self._seen.items():
            beneath = len(below(edges))
            if not edges or not rule.may_begin(beneath):
                continue
            if versions(value) == before and is_cut(roots, edges, inputs):
                layers.add(layer)
                rule.begin(beneath)
        self._seen.clear()
        self.split_planner.detached_layers = frozenset(layers)

    @property
    def ends(self) -> list[Node]:
        """Nodes where the pieces begin, except the last piece."""
        return [edge.node for point in self.points for edge in point.edges]

    @property
    def leaves(self) -> list[Tensor]:
        """Leaves where the pieces end, except the first piece."""
        return [leaf for point in self.points for leaf in point.leaves]


def enters(graph: TraversedGraph, inputs: Sequence[Tensor], detach_points: Sequence[DetachPoint]) -> bool:
    """True if a path from a piece to an input leads through another piece; arguments as of `partition`."""
    leaves = [leaf for point in detach_points for leaf in point.leaves]
    further = {id(leaf) for leaf in leaves} - {id(leaf) for leaf in inputs}
    if any(id(variable(node)) in further for node in graph.nodes):
        return True
    beneath = below(edge for point in detach_points for edge in point.edges)
    entered = [GradientEdge(n, 0) for n in graph.nodes if n in beneath and variable(n) is None]
    ends = {id(leaf) for leaf in (*leaves, *inputs)}
    return any(id(variable(node)) in ends for node in below(entered))


def _with_edge(tensor: Tensor, edges: list[GradientEdge]) -> Tensor:
    if tensor.requires_grad:
        edges.append(get_gradient_edge(tensor))
    return tensor
