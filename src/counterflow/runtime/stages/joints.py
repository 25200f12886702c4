"""Detach points of a stage's graph whose backward is split, and the pieces between them.

Invariant: all that two pieces share goes through their detach point, but for weights and for inputs of the
stage that go past all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from counterflow.common.trees import versions

from .graph_split import Walked, below, is_seam, variable
from .recomputation import Replay, mapped, same_tensors

NODES_A_PIECE = 24
"""Minimum number of nodes in a piece of a graph: entering autograd costs as much as visiting this many."""


class Joint(NamedTuple):
    """Where two pieces of a graph meet: the gradients of ``leaves`` go on at ``edges``."""

    edges: tuple[GradientEdge, ...]
    leaves: tuple[Tensor, ...]


class DetachedLayers(Protocol):
    """Facts about a stage's graphs that detach points read and learn."""

    joined: frozenset[int] | None
    """Layers with a detach point before them; None: not known yet."""


class Joints:
    """Detach points of one forward's graph, from the input on; recorded while the stage's layers run."""

    def __init__(self, splitting: DetachedLayers) -> None:
        self.splitting = splitting
        self.found: list[Joint] = []
        self.replays: list[Replay] = []
        """Replays of recomputed layers."""
        self._seen: dict[int, tuple[Any, list[int], tuple[GradientEdge, ...]]] = {}

    def before(self, layer: int, value: Any) -> Any:
        """Input of a layer in place of ``value``, the previous layer's output."""
        if self.splitting.joined is None:
            edges: list[GradientEdge] = []
            mapped(lambda tensor: _noted(tensor, edges), value)
            same = same_tensors(value)
            self._seen[layer] = same, versions(same), tuple(edges)
            return value
        if layer not in self.splitting.joined:
            return value
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
            self.found.append(Joint(tuple(ends), tuple(leaves)))
        return value

    def learn(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Find from the first graph the layers before which later graphs may have detach points."""
        if self.splitting.joined is not None:
            return
        roots = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        joined: set[int] = set()
        size = 0
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        apart = bool(inputs)  # else what comes first needs no input gradient
        for layer, (value, before, edges) in self._seen.items():
            beneath = len(below(edges))
            if not edges or (apart and beneath < size + NODES_A_PIECE):
                continue
            if versions(value) == before and is_seam(roots, edges, inputs):
                joined.add(layer)
                apart, size = True, beneath
        self._seen.clear()
        self.splitting.joined = frozenset(joined)

    @property
    def ends(self) -> list[Node]:
        """Where the pieces begin, but for the last."""
        return [edge.node for joint in self.found for edge in joint.edges]

    @property
    def leaves(self) -> list[Tensor]:
        """What the pieces take, but for the first."""
        return [leaf for joint in self.found for leaf in joint.leaves]


def enters(graph: Walked, inputs: Sequence[Tensor], joints: Sequence[Joint]) -> bool:
    """Whether a piece has a way to an input that leads through another piece; arguments as of `division`."""
    leaves = [leaf for joint in joints for leaf in joint.leaves]
    others = {id(leaf) for leaf in leaves} - {id(leaf) for leaf in inputs}
    if any(id(variable(node)) in others for node in graph.nodes):
        return True
    beneath = below(edge for joint in joints for edge in joint.edges)
    entered = [GradientEdge(n, 0) for n in graph.nodes if n in beneath and variable(n) is None]
    ends = {id(leaf) for leaf in (*leaves, *inputs)}
    return any(id(variable(node)) in ends for node in below(entered))


def _noted(tensor: Tensor, edges: list[GradientEdge]) -> Tensor:
    if tensor.requires_grad:
        edges.append(get_gradient_edge(tensor))
    return tensor
