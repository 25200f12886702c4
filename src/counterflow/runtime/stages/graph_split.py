"""How an autograd graph is divided into what its input gradient needs and what its weights' gradients need.

The backbone is every node on a way from the outputs to the inputs. What hangs off it ends at weights. A
boundary is a backbone node from which such weights hang; given the gradient that reaches it, those of its
weights need no other backbone node. So it is run twice: for the input gradient, and later for its weights.

Some weights have their gradients made with the input gradient:

* those that hang from several boundaries (used twice), or from an output itself;
* those of a boundary that makes all its gradients at once: a custom function (a compiled layer is one), a
  fused recurrent layer, or what the user's own checkpoint computes again;
* those of a boundary that has vectors only (norms, biases): they are cheap, and to wait for them would keep
  what the boundary saved;
* all, where a checkpoint of the reentrant kind is in the graph: it lets nobody ask for some gradients only.

Invariant: nothing here runs a backward or changes a graph. Graphs of one shape are divided alike, so what is
found is kept by shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from ..graphs import pointers, saved_names
from .recomputation import Packed

Shape = tuple[Any, ...]
"""Shape of a graph: the kinds of its nodes and their edges."""

_AT_ONCE = frozenset(("MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0"))
"""Nodes that make all their gradients in one go, whichever are asked for."""


class Walked(NamedTuple):
    """A graph as it was gone through.

    Attributes:
        nodes: each once, the outputs' first.
        roots: where it begins: numbers of nodes and of their outputs.
        shape: the same for all graphs that are divided alike.
    """

    nodes: list[Node]
    roots: tuple[tuple[int, int], ...]
    shape: Shape


class Slot(NamedTuple):
    """Where a node saves a tensor: ``place`` among those of one name, if these are several."""

    node: int
    name: str
    place: int | None


class Boundary(NamedTuple):
    """A node from which weights hang; all are numbers of nodes.

    Attributes:
        node: itself.
        outputs: the numbers of its outputs that are used.
        weights: where the gradients of its weights are accumulated.
    """

    node: int
    outputs: tuple[int, ...]
    weights: tuple[int, ...]


class Division(NamedTuple):
    """How graphs of a shape are divided.

    Attributes:
        boundaries: whose weights wait.
        early: where gradients are accumulated that are made with the input gradient.
        kept: what the weights that wait need.
        dropped: what nobody needs once the input gradient is made.
        inputs: the inputs that it reaches, by their numbers.
    """

    boundaries: tuple[Boundary, ...]
    early: tuple[int, ...]
    kept: tuple[Slot, ...]
    dropped: tuple[Slot, ...]
    inputs: tuple[int, ...]


def walked(roots: Iterable[GradientEdge], inputs: Sequence[Tensor]) -> Walked:
    """Go through a graph.

    Args:
        roots: where it begins.
        inputs: leaves that stand for what goes in.
    """
    given = {id(tensor): number for number, tensor in enumerate(inputs)}
    nodes: list[Node] = []
    numbers: dict[Node, int] = {}
    begins: list[tuple[int, int]] = []
    for root in roots:
        number = numbers.setdefault(root.node, len(nodes))
        if number == len(nodes):
            nodes.append(root.node)
        begins.append((number, root.output_nr))
    shape: list[Any] = [*begins]
    for node in nodes:  # which grows
        shape.append(type(node))
        children = node.next_functions
        if not children:
            shape.append(given.get(id(variable(node)), -1))
        for child, output in children:
            if child is None:
                shape.append(None)
                continue
            number = numbers.setdefault(child, len(nodes))
            if number == len(nodes):
                nodes.append(child)
            shape += (number, output)
    return Walked(nodes, tuple(begins), tuple(shape))


def divided(graph: Walked, inputs: Sequence[Tensor], constant: AbstractSet[int]) -> Division:
    """How a graph is divided.

    Args:
        graph: what was gone through.
        inputs: the leaves whose gradients are wanted first.
        constant: the memory (``pointers``) that is there anyway, so that nothing is gained by dropping it.
    """
    nodes = graph.nodes
    if any(_is_custom(node) and "Checkpoint" in node.name() for node in nodes):
        return Division((), (), (), (), ())
    parts = _Parts(graph, inputs)
    boundaries: list[Boundary] = []
    early: list[int] = list(parts.shared)
    for n in sorted(parts.weights):
        weights = parts.weights[n]
        if _at_once(nodes[n]) or all(parts.leaves[leaf].dim() < 2 for leaf in weights):
            early += weights
        else:
            boundaries.append(Boundary(n, tuple(sorted(parts.outputs[n])), tuple(weights)))
    later = parts.hanging_from({boundary.node for boundary in boundaries})
    kept = [each for n in sorted(later) for each in slots(n, nodes[n])]
    used = pointers(found for _, found in kept if isinstance(found, Tensor))
    others = (each for n, node in enumerate(nodes) if n not in later for each in slots(n, node))
    dropped = tuple(
        slot
        for slot, found in others
        if isinstance(found, Tensor) and not pointers([found]) & (constant | used | {0})
    )
    ends = {id(leaf) for leaf in parts.leaves.values()}
    reached = tuple(number for number, tensor in enumerate(inputs) if id(tensor) in ends)
    return Division(tuple(boundaries), tuple(early), tuple(slot for slot, _ in kept), dropped, reached)


class _Parts:
    """What of a graph is backbone, and what hangs from it; by numbers of nodes.

    Attributes:
        leaves: the weights, where their gradients are accumulated.
        weights: by backbone node, those that hang from it alone.
        shared: those that hang from several, or from an output.
        outputs: by node, the numbers of its outputs that are used.
    """

    def __init__(self, graph: Walked, inputs: Sequence[Tensor]) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        edges = [
            [(numbers[child], output) for child, output in node.next_functions if child is not None]
            for node in graph.nodes
        ]
        given = {id(tensor) for tensor in inputs}
        ends = ((n, variable(node)) for n, node in enumerate(graph.nodes) if not edges[n])
        self.leaves = {n: leaf for n, leaf in ends if leaf is not None}
        backbone = _above(edges, [n for n, leaf in self.leaves.items() if id(leaf) in given])
        self._hanging = [n for n in range(len(graph.nodes)) if n not in backbone]
        self._together = together = _Together(self._hanging)
        for n in self._hanging:
            for child, _ in edges[n]:
                together.join(n, child)
        begins = [(None, n) for n, _ in graph.roots]
        holds = [*begins, *((n, child) for n in backbone for child, _ in edges[n])]
        self._held_by: dict[int, set[int | None]] = defaultdict(set)  # what hangs together
        for holder, n in holds:
            if n not in backbone:
                self._held_by[together.of(n)].add(holder)
        self.weights: dict[int, list[int]] = defaultdict(list)
        self.shared: list[int] = []
        for n in self._hanging:
            if n in self.leaves:
                holder = self._only_holder(n)
                (self.shared if holder is None else self.weights[holder]).append(n)
        self.outputs: dict[int, set[int]] = defaultdict(set)
        for child, output in (*graph.roots, *(edge for children in edges for edge in children)):
            self.outputs[child].add(output)

    def hanging_from(self, holders: set[int]) -> set[int]:
        """Some backbone nodes, and what hangs from one of them alone."""
        return holders | {n for n in self._hanging if self._only_holder(n) in holders}

    def _only_holder(self, n: int) -> int | None:
        holder, *others = self._held_by[self._together.of(n)]
        return None if others else holder


def below(roots: Iterable[GradientEdge]) -> set[Node]:
    """All nodes from which a graph is made."""
    return set(walked(roots, ()).nodes)


def is_seam(roots: Sequence[GradientEdge], seam: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> bool:
    """Whether all that two parts of a graph share goes through some edges, but for weights.

    Args:
        roots: where the graph begins.
        seam: the edges.
        inputs: leaves that stand for what goes in: no weights.
    """
    through = {(edge.node, edge.output_nr) for edge in seam}
    shared = below(seam)
    given = {id(tensor) for tensor in inputs}
    waiting = [root.node for root in roots if (root.node, root.output_nr) not in through]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = variable(node)
        if node in shared and (leaf is None or id(leaf) in given):
            return False
        for child, output in node.next_functions:
            if child is not None and (child, output) not in through and child not in seen:
                seen.add(child)
                waiting.append(child)
    return True


def variable(node: Node) -> Any:
    """The leaf whose gradient a node accumulates; None for any other node."""
    return getattr(node, "variable", None)


def saved_in(nodes: Sequence[Node], slots: Iterable[Slot]) -> Iterator[Any]:
    """What nodes hold in some slots: tensors, or what these were packed to."""
    for slot in slots:
        found = getattr(nodes[slot.node], slot.name)
        yield (found if slot.place is None else found[slot.place]).data


def slots(number: int, node: Node) -> Iterator[tuple[Slot, Any]]:
    """Where a node saved anything, and what is there."""
    for name in saved_names(type(node)):
        found = getattr(node, name)
        if isinstance(found, (tuple, list)):
            each = [(Slot(number, name, index), one.data) for index, one in enumerate(found)]
        else:
            each = [(Slot(number, name, None), found.data)]
        yield from ((slot, data) for slot, data in each if data is not None)


def _above(edges: Sequence[Sequence[tuple[int, int]]], ends: Iterable[int]) -> set[int]:
    """The nodes from which one of ``ends`` is reached, and these."""
    parents: dict[int, list[int]] = defaultdict(list)
    for n, children in enumerate(edges):
        for child, _ in children:
            parents[child].append(n)
    waiting = list(ends)
    found = set(waiting)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _at_once(node: Node) -> bool:
    """Whether a node is best run once: it makes all its gradients, or what it saved is computed again."""
    if _is_custom(node) or node.name() in _AT_ONCE:
        return True
    return any(not isinstance(found, (Tensor, Packed)) for _, found in slots(0, node))


def _is_custom(node: Node) -> bool:
    """Whether a node is of a function written in Python."""
    return issubclass(type(node), BackwardCFunction)


class _Together:
    """Which nodes hang together, by a number that is the same for these."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._next = {n: n for n in nodes}

    def of(self, n: int) -> int:
        while self._next[n] != n:
            self._next[n] = n = self._next[self._next[n]]
        return n

    def join(self, n: int, other: int) -> None:
        self._next[self.of(n)] = self.of(other)
