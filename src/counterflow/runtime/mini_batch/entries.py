"""Lists and tuples with an entry for each sample: detection targets, sequences of any lengths, texts.

``ENTRIES``, among the dimensions of a mini-batch, says that the samples are a list's entries. What could be
either, a list with as many entries as there are samples whose tensors have as many rows, is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from counterflow.common.mappings import PLAIN, flat_with_paths, names_of
from counterflow.common.trees import root_opener
from counterflow.errors import ConfigError


class Entries(enum.Enum):
    """The one value that stands for a list's entries among dimensions."""

    ENTRIES = enum.auto()

    def __repr__(self) -> str:
        return "cf.ENTRIES"


ENTRIES = Entries.ENTRIES
"""In place of a dimension: the samples are the entries of the list or tuple that stands there."""

KnownLayouts = list[tuple[str, pytree.TreeSpec]]
"""Paths and structures of lists whose tensors contain the samples, as earlier mini-batches showed."""


def is_leaf(node: object) -> bool:
    """True if a node is cut as a unit: a list of numbers or texts, a mask by blocks."""
    if type(node) in (list, tuple):
        return bool(node) and all(isinstance(entry, PLAIN) for entry in node)  # type: ignore[attr-defined]
    return isinstance(node, BlockMask)


def of_children(dims: Any, spec: pytree.TreeSpec) -> list[Any] | None:
    """Dimensions of a node's children from a tree of dimensions; None if their types differ."""
    names = names_of(spec)
    if names is not None and isinstance(dims, Mapping) and dims.keys() == {*names}:
        of = [dims[name] for name in names]  # torch takes them in the order that dims has
    elif isinstance(dims, (list, tuple)) and type(dims) in (spec.type, spec.context):
        of = list(dims)
    else:
        return None
    return of if len(of) == len(spec.children()) else None


def cut_by_entries(tree: object, dims: Any) -> set[int]:
    """The ids of the lists and tuples of a tree that are cut by their entries."""
    if dims is ENTRIES:
        return {id(tree)}
    if dims is None or isinstance(dims, int):
        return set()
    parts, spec = pytree.tree_flatten(tree, is_leaf=root_opener(tree))
    of = of_children(dims, spec)
    if of is None:
        return set()
    return set().union(*(cut_by_entries(part, dim) for part, dim in zip(parts, of, strict=True)))


class Lists(NamedTuple):
    """Looks for lists whose samples may be their entries or rows of their tensors.

    Attributes:
        samples: how many the tensors have.
        option: how their dimensions are said.
        known_layouts: lists of earlier mini-batches; this mini-batch's lists are added.
        kinds: list, tuple, or both.
    """

    samples: int
    option: str
    known_layouts: KnownLayouts
    kinds: tuple[type, ...] = (list, tuple)

    def refuse_either(self, tree: object, dims: Any, name: str) -> None:
        """Refuse those of a mini-batch of which ``dims`` do not say which it is.

        Raises:
            ConfigError: there is one.
        """
        if dims is None or dims is ENTRIES or is_leaf(tree) or isinstance(tree, Tensor):
            return
        with_paths, spec = flat_with_paths(tree, is_leaf=root_opener(tree))
        if spec.is_leaf():
            return
        if isinstance(dims, int):
            self._refuse(tree, name)
            of: list[Any] | None = [dims] * len(with_paths)
        else:
            of = of_children(dims, spec)
        for (path, part), dim in zip(with_paths, of or (), strict=False):
            self.refuse_either(part, dim, name + path)

    def _refuse(self, tree: Any, name: str) -> None:
        if type(tree) not in self.kinds or not _are_uniform(tree):
            return
        shown = name, pytree.tree_structure(tree)
        if len(tree) != self.samples:
            if shown not in self.known_layouts:
                self.known_layouts.append(shown)
        elif shown not in self.known_layouts:
            kind = type(tree)
            raise ConfigError(
                f"{name} is a {kind.__name__} of {self.samples} entries of one kind, as many as there are "
                f"samples, and its tensors may have the samples as well; say with {self.option} which it is: "
                f"cf.ENTRIES for an entry a sample, or {kind([0] * self.samples)} for rows of each tensor"
            )


def _are_uniform(tree: Any) -> bool:
    kinds = []
    for entry in tree:
        leaves, spec = pytree.tree_flatten(entry)
        kinds.append((spec, [(leaf.dtype, leaf.dim()) for leaf in leaves if isinstance(leaf, Tensor)]))
    return len(kinds) > 1 and bool(kinds[0][1]) and all(kind == kinds[0] for kind in kinds)
