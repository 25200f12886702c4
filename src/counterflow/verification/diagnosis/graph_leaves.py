"""Diagnosis of a stage's first graph: whether it trains the stage's weights, and nothing more.

It traverses the graph from the outputs to its leaves. A tensor that requires a gradient and that the layers
create in each run is no weight: it could not be trained in one process either. So if a leaf is unknown, the
stage runs a second time, and a leaf in both graphs existed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from counterflow.common.tensors.graphs import COMPILED_NODE, counts_indices, graph_of, variable
from counterflow.common.trees import versions
from counterflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The first graph of a stage.

    Attributes:
        stage: number of the stage.
        outputs: outputs with their graph.
        inputs: inputs of the stage, and targets of the loss.
        weights: parameters of the stage.
        leaves: further tensors where the graph may end, such as parameters that are gathered for an op.
        ends: nodes where the graph is continued behind detach points.
        casts: True if weights are cast to another precision.
        recomputes: True if saved tensors of layers go through hooks.
    """

    stage: int
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    weights: Sequence[Tensor]
    leaves: Sequence[Tensor]
    ends: Sequence[Node]
    casts: bool
    recomputes: bool


def diagnose_graph(graph: StageGraph, rerun: Callable[[], Sequence[Tensor]]) -> None:
    """Refuse a stage that computes with weights that are no module's parameters, or counts indices.

    Args:
        graph: the stage's first graph.
        rerun: runs the stage once more, and returns the outputs of that run.

    Raises:
        ConfigError: the stage computes with such a weight, or an embedding counts how often it has an index.
    """
    known = {id(tensor) for tensor in (*graph.weights, *graph.inputs, *graph.leaves)}
    nodes = graph_of(graph.outputs, graph.inputs, graph.ends)
    unknown = {id(leaf): leaf for leaf in _leaves(graph.outputs, nodes) if id(leaf) not in known}
    if unknown:
        _refuse_existing(graph, unknown, rerun)
    for node in nodes:
        if counts_indices(node):
            raise ConfigError(
                f"stage {graph.stage} calls an embedding with scale_grad_by_freq=True, which counts how "
                "often an index is in the whole mini-batch, and a stage sees one micro-batch; leave it out"
            )
        custom = issubclass(type(node), BackwardCFunction) and node.name() != COMPILED_NODE
        if custom and (graph.casts or graph.recomputes):
            weights = [_weight_at(before, cast=graph.casts) for before, _ in node.next_functions]
            if any(isinstance(tensor, nn.Parameter) for tensor in weights):
                node.register_hook(partial(_refuse_own_gradients, graph.stage, node.name(), weights))


def _refuse_existing(
    graph: StageGraph, unknown: Mapping[int, Tensor], rerun: Callable[[], Sequence[Tensor]]
) -> None:
    before = versions(graph.weights)
    outputs = rerun()
    known = (unknown.get(id(leaf)) for leaf in _leaves(outputs, graph_of(outputs)))
    tensor = next((leaf for leaf in known if leaf is not None), None)
    if tensor is not None:
        raise ConfigError(
            f"stage {graph.stage} computes with a tensor of shape {tuple(tensor.shape)} that requires "
            "a gradient and is no parameter of its layers or of a loss function that is a module: it "
            "would not be trained; make it one, or let it require no gradient"
        )
    if versions(graph.weights) != before:
        shape = tuple(next(iter(unknown.values())).shape)
        raise ConfigError(
            f"stage {graph.stage} computes with a tensor of shape {shape} that requires a gradient and is "
            "no parameter, and it changes weights as it runs, so that a second run cannot tell whether "
            "that tensor was there before; let the tensor require no gradient, or change no weight"
        )


def _refuse_own_gradients(
    stage: int, function: str, weights: list[Tensor | None], gradients: Sequence[Tensor | None], _: object
) -> None:
    """Refuse a custom function that computes the gradient of a weight and does not return it to autograd.

    It adds the gradient to ``weight.grad`` itself; but if saved tensors go through hooks, its backward
    receives a weight that is a different object.
    """
    for tensor, gradient in zip(weights, gradients, strict=True):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and gradient is None:
            raise ConfigError(
                f"{function} in stage {stage} gives no gradient for a parameter of shape "
                f"{tuple(tensor.shape)}; if it adds to its grad itself, layers cannot be computed again, "
                "nor in another precision: take recompute='stage', or none, and no compute_dtype"
            )


def _weight_at(node: Node | None, *, cast: bool) -> Tensor | None:
    if cast and node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    leaf = variable(node) if node is not None else None
    return leaf if isinstance(leaf, Tensor) else None


def _leaves(outputs: Iterable[Tensor], nodes: Iterable[Node]) -> Iterator[Tensor]:
    leaves = (
        *(tensor for tensor in outputs if tensor.is_leaf and tensor.requires_grad),
        *map(variable, nodes),
    )
    return (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel())
