"""Partition of an autograd graph into the nodes of the input gradient and those of the weight gradients.

The backbone is every node on a path from the outputs to the inputs. Its branches end at weights. A boundary
is a backbone node with such branches; from the gradient that reaches it, those of its weights need no further
backbone node. So it is run twice: for the input gradient, and later for its weights.

Some weight gradients are computed with the input gradient:

* of weights on branches of several boundaries (used twice), or of an output itself;
* of a boundary that computes all its gradients at once: a custom function (a compiled layer is one), a fused
  recurrent layer, or a checkpoint of the user's, which is recomputed;
* of a boundary that has vectors only (norms, biases): they are cheap, and deferring them would keep the
  tensors that the boundary saved;
* all, if a reentrant checkpoint is in the graph: it cannot compute some gradients only.

Invariant: nothing here runs a backward or changes a graph. Graphs of one shape have the same partition, which
is cached by shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from counterflow.common.tensors.graphs import (
    COMPILED_NODE,
    is_reentrant_checkpoint,
    pointers,
    saved_names,
    variable,
)

from .replays import Packed

Shape = tuple[Any, ...]
"""Shape of a graph: the kinds of its nodes and their edges."""

_AT_ONCE = frozenset(("MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0"))
"""Nodes that compute all their gradients at once, whichever are requested."""


_PRODUCTS = frozenset(("AddmmBackward0", "MmBackward0"))
"""Nodes of matrix products; their last input is the second factor, the first of several a bias."""


class TraversedGraph(NamedTuple):
    """A graph in the order of its traversal.

    Attributes:
        nodes: all nodes, each once, the outputs' first.
        roots: edges where it begins: numbers of nodes and of their outputs.
        shape: shape; graphs of one shape have the same partition.
        leaves: leaf tensors by the number of the node that accumulates their gradient.
    """

    nodes: list[Node]
    roots: tuple[tuple[int, int], ...]
    shape: Shape
    leaves: dict[int, Tensor]


class Slot(NamedTuple):
    """Address of a saved tensor of a node: ``place`` is its index if several have the name."""

    node: int
    name: str
    place: int | None


class Boundary(NamedTuple):
    """A backbone node with weights on its branches; all are numbers of nodes.

    Attributes:
        node: number of the node.
        outputs: numbers of its outputs that are used.
        weights: nodes that accumulate the gradients of its weights.
        is_product: True if the node multiplies rows with a transposed weight, which is the first of
            ``weights``; a bias is the second.
    """

    node: int
    outputs: tuple[int, ...]
    weights: tuple[int, ...]
    is_product: bool = False


class GraphPartition(NamedTuple):
    """Partition of all graphs of one shape.

    Attributes:
        boundaries: boundaries whose weight gradients are deferred.
        early: nodes that accumulate the weight gradients computed with the input gradient.
        saved: saved tensors that the deferred weight gradients need.
        dropped: saved tensors that are not needed after the input gradient.
        inputs: numbers of the inputs that the graph reaches.
        compiled: nodes of compiled functions, which may defer gradients of their weights themselves.
    """

    boundaries: tuple[Boundary, ...]
    early: tuple[int, ...]
    saved: tuple[Slot, ...]
    dropped: tuple[Slot, ...]
    inputs: tuple[int, ...]
    compiled: tuple[int, ...] = ()


def traverse(roots: Iterable[GradientEdge], inputs: Sequence[Tensor]) -> TraversedGraph:
    """Traverse a graph.

    Args:
        roots: edges where it begins.
        inputs: leaves that are the graph's inputs.
    """
    input_numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
    nodes: list[Node] = []
    numbers: dict[Node, int] = {}
    begins: list[tuple[int, int]] = []
    for root in roots:
        number = numbers.setdefault(root.node, len(nodes))
        if number == len(nodes):
            nodes.append(root.node)
        begins.append((number, root.output_nr))
    shape: list[Any] = [*begins]
    leaves: dict[int, Tensor] = {}
    add = shape.append
    for place, node in enumerate(nodes):  # which grows
        add(type(node))
        children = node.next_functions
        if not children:
            leaf = variable(node)
            add(input_numbers.get(id(leaf), -1))
            if leaf is not None:
                leaves[place] = leaf
        for child, output in children:
            if child is None:
                add(None)
                continue
            number = numbers.setdefault(child, len(nodes))
            if number == len(nodes):
                nodes.append(child)
            add(number)
            add(output)
    return TraversedGraph(nodes, tuple(begins), tuple(shape), leaves)


def partition_graph(
    graph: TraversedGraph, inputs: Sequence[Tensor], constant: AbstractSet[int]
) -> GraphPartition:
    """Partition a graph.

    Args:
        graph: the traversed graph.
        inputs: leaves of the input gradient.
        constant: memory (``pointers``) that stays allocated, so that dropping it frees nothing.
    """
    nodes = graph.nodes
    if any(map(is_reentrant_checkpoint, nodes)):
        return GraphPartition((), (), (), (), ())
    parts = _Parts(graph, inputs)
    boundaries: list[Boundary] = []
    early: list[int] = list(parts.shared)
    for n in sorted(parts.weights):
        weights = parts.weights[n]
        if _at_once(nodes[n]) or all(parts.leaves[leaf].dim() < 2 for leaf in weights):
            early += weights
        else:
            outputs = tuple(sorted(parts.outputs[n]))
            product = _weights_of_product(nodes[n], parts)
            if product is not None and set(product) == set(weights):
                boundaries.append(Boundary(n, outputs, product, is_product=True))
            else:
                boundaries.append(Boundary(n, outputs, tuple(weights)))
    later = parts.with_branches({boundary.node for boundary in boundaries})
    saved = [pair for n in sorted(later) for pair in slots(n, nodes[n])]
    used = pointers(tensor for _, tensor in saved if isinstance(tensor, Tensor))
    unused = (pair for n, node in enumerate(nodes) if n not in later for pair in slots(n, node))
    dropped = tuple(
        slot
        for slot, tensor in unused
        if isinstance(tensor, Tensor) and not pointers([tensor]) & (constant | used | {0})
    )
    ends = {id(leaf) for leaf in parts.leaves.values()}
    reached = tuple(number for number, tensor in enumerate(inputs) if id(tensor) in ends)
    compiled = tuple(n for n, node in enumerate(nodes) if _is_custom(node) and node.name() == COMPILED_NODE)
    slots_saved = tuple(slot for slot, _ in saved)
    return GraphPartition(tuple(boundaries), tuple(early), slots_saved, dropped, reached, compiled)


class _Parts:
    """Backbone of a graph, and its branches; by numbers of nodes.

    Attributes:
        numbers: numbers of the nodes.
        leaves: leaf tensors by the node that accumulates their gradient.
        weights: by backbone node, the weights on its branches alone.
        shared: weights on branches of several backbone nodes, or of an output.
        outputs: by node, the numbers of its outputs that are used.
    """

    def __init__(self, graph: TraversedGraph, inputs: Sequence[Tensor]) -> None:
        self.numbers = numbers = {node: number for number, node in enumerate(graph.nodes)}
        edges = [
            [(numbers[child], output) for child, output in node.next_functions if child is not None]
            for node in graph.nodes
        ]
        input_ids = {id(tensor) for tensor in inputs}
        self.leaves = graph.leaves
        backbone = _above(edges, [n for n, leaf in self.leaves.items() if id(leaf) in input_ids])
        self._branches = [n for n in range(len(graph.nodes)) if n not in backbone]
        self._groups = groups = _UnionFind(self._branches)
        for n in self._branches:
            for child, _ in edges[n]:
                groups.union(n, child)
        begins = [(None, n) for n, _ in graph.roots]
        holds = [*begins, *((n, child) for n in backbone for child, _ in edges[n])]
        self._holders: dict[int, set[int | None]] = defaultdict(set)  # by branch
        for holder, n in holds:
            if n not in backbone:
                self._holders[groups.find(n)].add(holder)
        self.weights: dict[int, list[int]] = defaultdict(list)
        self.shared: list[int] = []
        for n in self._branches:
            if n in self.leaves:
                holder = self._only_holder(n)
                (self.shared if holder is None else self.weights[holder]).append(n)
        self.outputs: dict[int, set[int]] = defaultdict(set)
        for child, output in (*graph.roots, *(edge for children in edges for edge in children)):
            self.outputs[child].add(output)

    def with_branches(self, holders: set[int]) -> set[int]:
        """Return backbone nodes and the nodes on branches of one of them alone."""
        return holders | {n for n in self._branches if self._only_holder(n) in holders}

    def _only_holder(self, n: int) -> int | None:
        holder, *further = self._holders[self._groups.find(n)]
        return None if further else holder


def below(roots: Iterable[GradientEdge]) -> set[Node]:
    """Return all nodes that can be reached from some edges."""
    return set(traverse(roots, ()).nodes)


def is_cut(roots: Sequence[GradientEdge], cut: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> bool:
    """Return True if two parts of a graph share nothing but the nodes beyond some edges, and weights.

    Args:
        roots: edges where the graph begins.
        cut: edges between the two parts.
        inputs: leaves that are the graph's inputs, not weights.
    """
    through = {(edge.node, edge.output_nr) for edge in cut}
    shared = below(cut)
    input_ids = {id(tensor) for tensor in inputs}
    waiting = [root.node for root in roots if (root.node, root.output_nr) not in through]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = variable(node)
        if node in shared and (leaf is None or id(leaf) in input_ids):
            return False
        for child, output in node.next_functions:
            if child is not None and (child, output) not in through and child not in seen:
                seen.add(child)
                waiting.append(child)
    return True


def saved_in(nodes: Sequence[Node], slots: Iterable[Slot]) -> Iterator[Any]:
    """Yield the contents of some slots: tensors, or the objects to which these were packed."""
    for slot in slots:
        saved = getattr(nodes[slot.node], slot.name)
        yield (saved if slot.place is None else saved[slot.place]).data


def slots(number: int, node: Node) -> Iterator[tuple[Slot, Any]]:
    """Yield the slots of a node in which it saved something, with their contents."""
    for name in saved_names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, (tuple, list)):
            pairs = [(Slot(number, name, index), part.data) for index, part in enumerate(saved)]
        else:
            pairs = [(Slot(number, name, None), saved.data)]
        yield from ((slot, data) for slot, data in pairs if data is not None)


def _above(edges: Sequence[Sequence[tuple[int, int]]], ends: Iterable[int]) -> set[int]:
    parents: dict[int, list[int]] = defaultdict(list)
    for n, children in enumerate(edges):
        for child, _ in children:
            parents[child].append(n)
    waiting = list(ends)
    seen = set(waiting)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return seen


def _at_once(node: Node) -> bool:
    """True if a node is best run once: it computes all its gradients, or its saved tensors are recomputed."""
    if _is_custom(node) or node.name() in _AT_ONCE:
        return True
    return any(not isinstance(saved, (Tensor, Packed)) for _, saved in slots(0, node))


def _weights_of_product(node: Node, parts: _Parts) -> tuple[int, ...] | None:
    """Return the nodes of the weight and the bias, if a node multiplies rows with a transposed weight."""
    if node.name() not in _PRODUCTS:
        return None
    *terms, factor = (child for child, _ in node.next_functions)
    if factor is None or factor.name() != "TBackward0":
        return None
    below = [child for child, _ in factor.next_functions] + terms[: len(terms) - 1]
    numbers = tuple(parts.numbers[child] for child in below if child is not None)
    if any(n not in parts.leaves or parts.leaves[n].is_complex() for n in numbers):
        return None
    return numbers


def _is_custom(node: Node) -> bool:
    return issubclass(type(node), BackwardCFunction)


class _UnionFind:
    def __init__(self, nodes: Iterable[int]) -> None:
        self._next = {n: n for n in nodes}

    def find(self, n: int) -> int:
        while self._next[n] != n:
            self._next[n] = n = self._next[self._next[n]]
        return n

    def union(self, n: int, m: int) -> None:
        self._next[self.find(n)] = self.find(m)
