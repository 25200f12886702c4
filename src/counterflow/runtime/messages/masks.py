"""Block masks (flex attention) as trees: their tensors are sent as any tensors, the function by its name.

Invariant: a mask is the same on the other side. The closure of a function cannot be sent to another worker;
it is refused where the tree is described.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

_FIELDS = [name for name in inspect.signature(BlockMask.__init__).parameters if name != "self"]
"""Arguments of a mask, which are its attributes; they depend on torch's version."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Attributes of a mask that are no tensors, such as its function: a leaf."""

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


def _closed(mask: Opened) -> BlockMask:
    fields: dict[str, Any] = {**mask.tensors, **dict(mask.rest.fields)}
    return BlockMask(**fields)
