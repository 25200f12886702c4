"""Trees of values, as layers take and give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in a tree, in pytree's order, which takes ten times as long for what most layers give."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        yield tree
    elif kind is tuple or kind is list:
        for part in tree:
            yield from tensors_in(part)
    elif kind is dict:
        for part in tree.values():
            yield from tensors_in(part)
    elif not isinstance(tree, _PLAIN):
        yield from (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def root_opener(tree: object) -> Callable[[object], bool]:
    """The ``is_leaf`` with which pytree opens a tree's root alone.

    It does not refer to the tree. With a reference, the outputs of a model, for instance, would stay in
    memory until Python collects circles, which pytree's functions form with their ``is_leaf``.
    """
    root = id(tree)
    return lambda node: id(node) != root


def dimensional(tree: Any) -> list[Tensor]:
    """Tensors in a tree that have a dimension."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]


def each_tensor(tree: Any) -> list[Tensor]:
    """Each tensor in a tree once."""
    return list({id(tensor): tensor for tensor in tensors_in(tree)}.values())


def bytes_in(tree: Any) -> int:
    """Bytes of the tensors in a tree, of which each counts once."""
    return sum(tensor.nbytes for tensor in each_tensor(tree))


def version_of(tensor: Tensor) -> int:
    """Number of changes of a tensor in place (torch: ``_version``); inference mode does not count them."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def versions(tree: Any) -> list[int]:
    """Number of changes in place of each tensor in a tree."""
    if isinstance(tree, Tensor):
        return [version_of(tree)]
    return [version_of(tensor) for tensor in tensors_in(tree)]


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with its tensors replaced; a tensor that occurs twice is replaced by one tensor."""
    if isinstance(value, Tensor):
        return function(value)
    replaced: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            replaced[id(tensor)] = function(tensor)
        return replaced[id(tensor)]

    return pytree.tree_map_only(Tensor, once, value)
