"""Tensors that autograd's graphs save, and the memory of tensors; no graph is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .dtensors import parts

COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the nodes of functions that torch has compiled."""


def graph_of(
    outputs: Iterable[Tensor], without: Iterable[Tensor] = (), more: Iterable[Node] = ()
) -> list[Node]:
    """The nodes of the graph of some outputs.

    Args:
        outputs: outputs of the graph.
        without: inputs of the graph: the nodes that made them are omitted.
        more: further last nodes of the graph.
    """
    seen = {tensor.grad_fn for tensor in without}
    nodes: list[Node] = []
    waiting = [*(tensor.grad_fn for tensor in outputs), *more]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.append(node)
            waiting += [before for before, _ in node.next_functions]
    return nodes


def is_reentrant_checkpoint(node: Node) -> bool:
    """Tell whether a node is that of a reentrant checkpoint, which computes all gradients or none."""
    return issubclass(type(node), BackwardCFunction) and "Checkpoint" in node.name()


def has_reentrant_checkpoint(outputs: Iterable[Tensor]) -> bool:
    """Tell whether the graph of some outputs contains a reentrant checkpoint."""
    return any(map(is_reentrant_checkpoint, graph_of(outputs)))


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Edge of an output's gradient, which keeps the graph alive: torch's function in a third of its time.

    Leaves have no node yet, and nodes of Python functions do not keep it alive: torch makes their edges.
    """
    node: object = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(cast("Node", node), tensor.output_nr)


def variable(node: Node) -> Any:
    """Return the leaf whose gradient a node accumulates; None for any other node."""
    return getattr(node, "variable", None)


def saved_by(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """Tensors that some nodes save, except those that a user's hook packed."""
    for node in nodes:
        for name in saved_names(type(node)):
            value = getattr(node, name)
            for saved in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(saved.data, Tensor):
                    yield saved.data


def product_rows(node: Any) -> Tensor | None:
    """Return the first factor that a node of a matrix product has saved; None: it scales its terms."""
    if node.name() == "MmBackward0":
        return cast("Tensor", getattr(node, "_saved_self"))  # noqa: B009 - public, in spite of its name
    if getattr(node, "_saved_alpha") != 1 or getattr(node, "_saved_beta") != 1:  # noqa: B009
        return None
    return cast("Tensor", getattr(node, "_saved_mat1"))  # noqa: B009


def counts_indices(node: Node) -> bool:
    """Tell whether a node of an embedding divides gradients by how often the batch has an index."""
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


@cache
def saved_names(kind: type[Node]) -> list[str]:
    """Attributes of a kind of node that contain saved tensors."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def pointers(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory of tensors."""
    return {pointer(part) for tensor in tensors for part in parts(tensor)}


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory of tensors, by its address; memory that several share is there once."""
    storages = ((pointer(part), part.untyped_storage()) for tensor in tensors for part in parts(tensor))
    return {address: storage.nbytes() for address, storage in storages if address}


def pointer(tensor: Tensor) -> int:
    """Address of a tensor's memory; 0 if it has none, as torch.func's."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
