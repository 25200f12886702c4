"""Tensors that autograd's graphs hold, and which memory tensors are in; no graph is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from torch import Tensor
from torch.autograd.graph import Node

from .dtensors import parts


def graph_of(
    outputs: Iterable[Tensor], without: Iterable[Tensor] = (), more: Iterable[Node] = ()
) -> list[Node]:
    """The nodes of the graph of some outputs.

    Args:
        outputs: where it ends.
        without: what was given to it: nodes from which these come are left out.
        more: nodes where it ends, too.
    """
    seen = {tensor.grad_fn for tensor in without}
    found: list[Node] = []
    waiting = [*(tensor.grad_fn for tensor in outputs), *more]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(node)
            waiting += [before for before, _ in node.next_functions]
    return found


def saved_by(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """What some nodes save, but for what a user's hook packed."""
    for node in nodes:
        for name in saved_names(type(node)):
            found = getattr(node, name)
            for saved in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(saved.data, Tensor):
                    yield saved.data


@cache
def saved_names(kind: type[Node]) -> list[str]:
    """The attributes under which a kind of node has what it saved."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def pointers(tensors: Iterable[Tensor]) -> set[int]:
    """Where the memory of tensors begins."""
    return {pointer(part) for tensor in tensors for part in parts(tensor)}


def pointer(tensor: Tensor) -> int:
    """Where its memory begins; 0: it has none, as torch.func's."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
