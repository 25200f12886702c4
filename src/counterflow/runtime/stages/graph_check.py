"""What is seen once in the graph of a stage's forward: that it trains its own weights, and they alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from counterflow.common.trees import versions
from counterflow.errors import ConfigError

from ..graphs import graph_of
from ..mesh.parallel import gathered_parameters
from .graph_split import variable
from .interface import RunnableStage
from .joints import Joints


def check_graph(
    copy: RunnableStage,
    outputs: Sequence[Tensor],
    given: Sequence[Tensor],
    joints: Joints | None = None,
    *,
    again: Callable[[], Sequence[Tensor]],
) -> None:
    """Refuse a stage that computes with weights that are no module's parameters; called once.

    A tensor that requires a gradient and that the layers create in each run is no weight: it could not be
    trained in one process either. So if an unknown tensor is found, the stage runs a second time, and a
    tensor in both graphs existed before.

    Args:
        copy: the stage.
        outputs: outputs with their graph.
        given: all inputs.
        joints: detach points of the graph; None: there are none.
        again: runs the stage once more, and returns the outputs of that run.

    Raises:
        ConfigError: the stage computes with such a weight.
    """
    copy.note_checked()
    gathered = gathered_parameters(copy.module) if copy.module is not None else ()
    leaves, ends = (joints.leaves, joints.ends) if joints is not None else ([], [])
    masters = copy.precision.masters
    known = {id(tensor) for tensor in (*copy.parameters(), *masters, *gathered, *given, *leaves)}
    nodes = graph_of(outputs, given, ends)
    unknown = {id(leaf): leaf for leaf in _leaves(outputs, nodes) if id(leaf) not in known}
    if unknown:
        _refuse_there_before(copy, unknown, again)
    for node in nodes:
        if (masters or copy.replays is not None) and issubclass(type(node), BackwardCFunction):
            taken = [_weight_at(before, cast=bool(masters)) for before, _ in node.next_functions]
            if any(isinstance(tensor, nn.Parameter) for tensor in taken):
                node.register_hook(partial(_refuse_own_gradients, copy.stage, node.name(), taken))


def _refuse_there_before(
    copy: RunnableStage, unknown: Mapping[int, Tensor], again: Callable[[], Sequence[Tensor]]
) -> None:
    """Refuse tensors of a stage's graph that are in the graph of another run of it as well."""
    weights = copy.parameters()
    before = versions(weights)
    outputs = again()
    found = (unknown.get(id(leaf)) for leaf in _leaves(outputs, graph_of(outputs)))
    tensor = next((leaf for leaf in found if leaf is not None), None)
    if tensor is not None:
        raise ConfigError(
            f"stage {copy.stage} computes with a tensor of shape {tuple(tensor.shape)} that requires "
            "a gradient and is no parameter of its layers or of a loss function that is a module: it "
            "would not be trained; make it one, or let it require no gradient"
        )
    if versions(weights) != before:
        shape = tuple(next(iter(unknown.values())).shape)
        raise ConfigError(
            f"stage {copy.stage} computes with a tensor of shape {shape} that requires a gradient and is "
            "no parameter, and it changes weights as it runs, so that a second run cannot tell whether "
            "that tensor was there before; let the tensor require no gradient, or change no weight"
        )


def _refuse_own_gradients(
    stage: int, function: str, taken: list[Tensor | None], gradients: Sequence[Tensor | None], _: object
) -> None:
    """Refuse a custom function that finds the gradient of a weight and does not give it to autograd.

    It adds it to ``weight.grad`` itself; but where what autograd saves goes through hooks, its backward
    finds a weight that is another object.
    """
    for tensor, gradient in zip(taken, gradients, strict=True):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and gradient is None:
            raise ConfigError(
                f"{function} in stage {stage} gives no gradient for a parameter of shape "
                f"{tuple(tensor.shape)}; if it adds to its grad itself, layers cannot be computed again, "
                "nor in another precision: take recompute='stage', or none, and no compute_dtype"
            )


def _weight_at(node: Node | None, *, cast: bool) -> Tensor | None:
    """The leaf that a node takes a gradient for, also through a cast."""
    if cast and node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    found = getattr(node, "variable", None)
    return found if isinstance(found, Tensor) else None


def _leaves(outputs: Iterable[Tensor], nodes: Iterable[Node]) -> Iterator[Tensor]:
    """The leaves of a graph that get gradients, but for empty ones."""
    found = (
        *(tensor for tensor in outputs if tensor.is_leaf and tensor.requires_grad),
        *map(variable, nodes),
    )
    return (leaf for leaf in found if isinstance(leaf, Tensor) and leaf.numel())
