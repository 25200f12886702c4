"""Compiled backwards in two graphs: one for the gradients of inputs, a later one for those of weights.

::

    saved, dy ── input graph ── dx, and what the weight graph needs of it
    saved, these ── weight graph ── dw      (in the op of weight gradients)

An op of the backward that makes gradients of both, such as a norm's, is in the input graph; a convolution's
is made two. A backward with ops that no result needs, which change something, stays whole.

Invariant: a gradient is deferred if the op of the input gradient asks for it (``deferring``), and the weight
is a leaf without hooks. Otherwise both graphs run, and autograd receives all gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, cast

from torch import Tensor, fx, nn, ops
from torch.autograd.graph import Node
from typing_extensions import override

from counterflow.common.tensors.graphs import variable
from counterflow.common.tensors.torch_compiler import Compile, compile_parts
from counterflow.common.tensors.torch_private import has_hooks

from .weight_gradients import PendingGradients, add_gradient


@dataclass(frozen=True, slots=True)
class SplitBackend:
    """Backend of torch's compiler whose backwards are two graphs.

    Attributes:
        name: name of the backend.
    """

    name: str

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Compile a graph."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        places = {place for place, value in enumerate(tensors) if isinstance(value, nn.Parameter)}
        kinds = [isinstance(value, Tensor) for value in inputs]

        def backward(part: fx.GraphModule, compiled: Compile) -> Callable[..., Any]:
            return split_backward_graph(part, kinds, places, compiled)

        return compile_parts(self.name, graph, inputs, backward)


def split_backward_graph(
    graph: fx.GraphModule, kinds: Sequence[bool], weights: set[int], compiled: Compile
) -> Callable[..., Any]:
    """Return a function that runs a backward's graph, in two if it has gradients of weights to defer.

    Args:
        graph: graph of the backward; its outputs are gradients of the forward's inputs.
        kinds: for each input of the forward, True if it is a tensor.
        weights: numbers of the inputs that are parameters, counted among the tensors.
        compiled: compiles a graph.
    """
    (output,) = graph.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    if len(outputs) != len(kinds):
        return compiled(graph)
    _separate_convolutions(graph)
    numbers = [place for place, is_tensor in enumerate(kinds) if is_tensor]
    deferrable = {numbers[n]: n for n in weights if isinstance(outputs[numbers[n]], fx.Node)}
    input_nodes = _above(value for place, value in enumerate(outputs) if place not in deferrable)
    for node in graph.graph.find_nodes(op="call_function", target=getitem):
        if node.args[0] in input_nodes:  # results of one op are taken apart beside it
            input_nodes.add(node)
    deferred = {place: n for place, n in deferrable.items() if outputs[place] not in input_nodes}
    if not deferred:
        return compiled(graph)
    early = [value for place, value in enumerate(outputs) if place not in deferred]
    later = [outputs[place] for place in deferred]
    placeholders = graph.graph.find_nodes(op="placeholder")
    weight_nodes = _above(later) - input_nodes - {*placeholders}
    received = {
        before for node in weight_nodes for before in node.all_input_nodes if before not in weight_nodes
    }
    received |= {node for node in later if node not in weight_nodes}
    computed = input_nodes | weight_nodes
    if any(node.op == "call_function" and node not in computed for node in graph.graph.nodes):
        return compiled(graph)
    of_inputs = [node for node in placeholders if node in input_nodes]
    of_weights = [node for node in placeholders if node in received]
    between = [node for node in graph.graph.nodes if node in received and node not in of_weights]
    first = _piece(graph, of_inputs, [*early, *between])
    second = _piece(graph, [*of_weights, *between], later)
    index = {node: place for place, node in enumerate(placeholders)}
    return SplitGraph(
        (compiled(first), [index[node] for node in of_inputs]),
        (compiled(second), [index[node] for node in of_weights]),
        [place not in deferred for place in range(len(outputs))],
        tuple(deferred.values()),
    )


def _separate_convolutions(graph: fx.GraphModule) -> None:
    """Let each op that makes gradients of a convolution's input and weight be two ops, of one each."""
    for node in graph.graph.find_nodes(op="call_function", target=ops.aten.convolution_backward.default):
        *values, (of_input, *of_weights) = node.args
        if not (of_input and any(of_weights)):
            continue
        with graph.graph.inserting_after(node):
            second = graph.graph.node_copy(node)
        items = node.meta["val"]
        node.args, node.meta["val"] = (*values, [True, False, False]), (items[0], None, None)
        second.args, second.meta["val"] = (*values, [False, *of_weights]), (None, *items[1:])
        for user in list(node.users):
            if user.args[1] != 0:
                user.replace_input_with(node, second)
    graph.recompile()


def _above(values: Iterable[Any], inputs: Collection[fx.Node] = ()) -> set[fx.Node]:
    waiting = [value for value in values if isinstance(value, fx.Node)]
    needed = {*waiting}
    while waiting:
        node = waiting.pop()
        for before in () if node in inputs else node.all_input_nodes:
            if before not in needed:
                needed.add(before)
                waiting.append(before)
    return needed


def _piece(graph: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> fx.GraphModule:
    piece = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = piece.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = _above(outputs, set(inputs))
    for node in graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = piece.node_copy(node, copies.__getitem__)
    piece.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in outputs))
    return fx.GraphModule(graph, piece)


class SplitGraph:
    """Function of a backward's inputs to the gradients of the forward's inputs.

    Args:
        input_graph: compiled input graph, and numbers of the backward's inputs that it takes.
        weight_graph: the same of the weight graph, which takes results of the input graph after them.
        early: for each gradient, True if the input graph makes it.
        weights: the others in the order of the weight graph: numbers of the forward's tensors.
    """

    def __init__(
        self,
        input_graph: tuple[Callable[[list[Any]], Sequence[Any]], Sequence[int]],
        weight_graph: tuple[Callable[[list[Any]], Sequence[Any]], Sequence[int]],
        early: Sequence[bool],
        weights: Sequence[int],
    ) -> None:
        self._input_graph, self._input_places = input_graph
        self._weight_graph, self._weight_places = weight_graph
        self._early, self._weights = early, weights
        self._boxed_call = True  # torch's compiler passes one list, which may be cleared

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        """Return the gradients; None for those that are deferred."""
        deferral = _take()
        of_weights = [values[place] for place in self._weight_places]
        of_inputs = [values[place] for place in self._input_places]
        values.clear()
        results = iter(self._input_graph(of_inputs))
        gradients = [next(results) if early else None for early in self._early]
        of_weights += results
        if deferral is not None:
            node, pending = deferral
            leaves = [variable(cast("Node", node.next_functions[number][0])) for number in self._weights]
            pending.append(PendingWeightGraph(self._weight_graph, of_weights, leaves))
            return tuple(gradients)
        later = iter(self._weight_graph(of_weights))
        return tuple(g if early else next(later) for g, early in zip(gradients, self._early, strict=True))


class PendingWeightGraph(PendingGradients):
    """Weight graph of a compiled backward that has run its input graph.

    Args:
        graph: compiled weight graph.
        gradients: its inputs.
        weights: leaves of the gradients that it returns.
    """

    __slots__ = ("gradients", "graph", "weights")

    def __init__(
        self, graph: Callable[[list[Any]], Sequence[Any]], gradients: list[Any], weights: Sequence[Tensor]
    ) -> None:
        self.graph, self.gradients, self.weights = graph, gradients, weights

    @override
    def accumulate(self, *, direct: bool) -> None:
        del direct
        values, self.gradients = [*self.gradients], []
        for weight, gradient in zip(self.weights, self.graph(values), strict=True):
            add_gradient(weight, gradient)


_running = threading.local()
"""``deferral``: node of the compiled function whose backward this thread runs next, and the list of what it
defers.
"""


def _take() -> tuple[Node, list[PendingGradients]] | None:
    deferral = getattr(_running, "deferral", None)
    _running.deferral = None
    return cast("tuple[Node, list[PendingGradients]] | None", deferral)


@contextmanager
def deferring(nodes: Sequence[Node], pending: list[PendingGradients]) -> Iterator[None]:
    """Context of a backward in which compiled functions defer the gradients of their weights.

    Args:
        nodes: nodes of the compiled functions; those whose weights have hooks, or are no leaves, defer none.
        pending: list that receives what is deferred.
    """

    def begin(node: Node, _: Any) -> None:
        _running.deferral = node, pending

    def end(*_: Any) -> None:  # a function of another backend has taken nothing
        _take()

    handles = []
    for node in nodes:
        leaves = [variable(child) for child, _ in node.next_functions if child is not None]
        if not any(leaf is not None and has_hooks(leaf) for leaf in leaves):
            handles += [node.register_prehook(partial(begin, node)), node.register_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
