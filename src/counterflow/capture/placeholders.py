"""Placeholders for tensors, sizes, dtypes and devices in recorded steps.

Invariant: a template is a tree of plain values and of these records, without a tensor or a module, so threads
may share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Ref(NamedTuple):
    """A tensor that a step made.

    Attributes:
        step: number of the step; -1: an input of the model.
        leaf: number of the tensor among its results.
    """

    step: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter, a buffer or a constant of the model; ``name`` is its name in the model, or ``constant
    3``.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A number that depends on free sizes: ``factor`` times the product of some of them, plus ``more``.

    Attributes:
        groups: groups whose sizes are multiplied.
        factor: factor of their product.
        more: added constant.
        kind: type of the number.
    """

    groups: tuple[int, ...]
    factor: Fraction
    more: Fraction = Fraction(0)
    kind: type[int] | type[float] = int

    def of(self, sizes: Mapping[int, int]) -> int | float:
        """The number, for some sizes."""
        return self.kind(self.factor * prod(sizes[group] for group in self.groups) + self.more)


@dataclass(frozen=True, slots=True)
class OfDtype:
    """The dtype of the model's weights, or a number that ``torch.finfo`` provides for it."""

    limit: str = ""


@dataclass(frozen=True, slots=True)
class OfDevice:
    """The device that the model is on."""


@dataclass(frozen=True, slots=True)
class PlaceholderSlice:
    """A slice whose ends are placeholders."""

    start: Any
    stop: Any
    step: Any


class Around(NamedTuple):
    """Values that fill the placeholders of a layer.

    Attributes:
        values: existing tensors.
        members: parameters, buffers and constants, by name.
        sizes: size of each group of free dimensions.
        dtype: dtype of the weights.
        device: device of the layer.
    """

    values: MutableMapping[Ref, Tensor]
    members: Mapping[str, Tensor]
    sizes: Mapping[int, int]
    dtype: torch.dtype
    device: torch.device


def _span(span: PlaceholderSlice, around: Around) -> slice:
    return slice(*(read(part, around) for part in (span.start, span.stop, span.step)))


_READ: dict[type, Callable[[Any, Around], Any]] = {
    Ref: lambda leaf, around: around.values[leaf],
    Member: lambda leaf, around: around.members[leaf.name],
    Size: lambda leaf, around: leaf.of(around.sizes),
    OfDtype: lambda leaf, around: (
        getattr(torch.finfo(around.dtype), leaf.limit) if leaf.limit else around.dtype
    ),
    OfDevice: lambda _, around: around.device,
    PlaceholderSlice: _span,
}


def read(leaf: Any, around: Around) -> Any:
    """Value of one leaf of a template."""
    reads = _READ.get(type(leaf))
    return leaf if reads is None else reads(leaf, around)


class Template:
    """A tree with placeholders for its tensors.

    Args:
        leaves: leaves of the tree.
        spec: structure of the tree.
    """

    __slots__ = ("_stand_ins", "parts", "refs", "spec")

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.parts, self.spec = leaves, spec
        self._stand_ins = [(i, leaf) for i, leaf in enumerate(leaves) if type(leaf) in _READ]
        self.refs = frozenset(leaf for leaf in self.leaves() if type(leaf) is Ref)
        """References to tensors of other steps."""

    def leaves(self) -> list[Any]:
        """All leaves, including those within slices."""
        spans = [leaf for leaf in self.parts if type(leaf) is PlaceholderSlice]
        return [*self.parts, *(part for span in spans for part in (span.start, span.stop, span.step))]

    def filled(self, around: Around) -> Any:
        """The tree with its tensors."""
        leaves = list(self.parts)
        for index, leaf in self._stand_ins:
            leaves[index] = _READ[type(leaf)](leaf, around)
        return pytree.tree_unflatten(leaves, self.spec)
