"""Masks by blocks (flex attention) as trees: tensors travel as all others, the function by its name.

Invariant: a mask is the same on the other side. What a function closes over cannot go to another worker;
that is refused where the tree is described.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

_FIELDS = [name for name in inspect.signature(BlockMask.__init__).parameters if name != "self"]
"""A mask is made of its own attributes; which there are depends on torch's version."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What of a mask is no tensor, its function among it: a leaf."""

    fields: tuple[tuple[str, Any], ...]


class Opened(NamedTuple):
    """A mask's attributes."""

    tensors: dict[str, Tensor]
    rest: Rest


def opened(tree: Any) -> Any:
    """A tree with its masks replaced by trees.

    >>> opened({"x": 1})
    {'x': 1}
    """
    return pytree.tree_map_only(BlockMask, _opened, tree)


def closed(tree: Any) -> Any:
    """The tree that ``opened`` took apart."""
    return pytree.tree_map(
        lambda node: _closed(node) if type(node) is Opened else node,
        tree,
        is_leaf=lambda node: type(node) is Opened,
    )


def _opened(mask: BlockMask) -> Opened:
    fields = [(name, getattr(mask, name)) for name in _FIELDS]
    tensors = {name: value for name, value in fields if isinstance(value, Tensor)}
    return Opened(tensors, Rest(tuple(field for field in fields if field[0] not in tensors)))


def _closed(one: Opened) -> BlockMask:
    fields: dict[str, Any] = {**one.tensors, **dict(one.rest.fields)}
    return BlockMask(**fields)
