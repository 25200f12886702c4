"""Placeholders for tensors, sizes, dtypes and devices in recorded steps.

Invariant: a template is a tree of plain values and of these records, without a tensor or a module, so threads
may share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.tensors.torch_private import subspecs


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


_Read = Callable[[Around], Any]


def _read_size(size: Size) -> _Read:
    factor, more, groups = size.factor, size.more, size.groups
    if size.kind is not int or factor.denominator > 1 or more.denominator > 1:
        return lambda around: size.of(around.sizes)
    times, plus = factor.numerator, more.numerator
    if len(groups) == 1:
        group = groups[0]
        return lambda around: times * around.sizes[group] + plus
    return lambda around: times * prod(around.sizes[group] for group in groups) + plus


def _read_span(span: PlaceholderSlice) -> _Read:
    start, stop, step = map(_reader, (span.start, span.stop, span.step))
    return lambda around: slice(start(around), stop(around), step(around))


def _read_member(leaf: Member) -> _Read:
    name = leaf.name
    return lambda around: around.members[name]


def _read_dtype(leaf: OfDtype) -> _Read:
    limit = leaf.limit
    if limit:
        return lambda around: getattr(torch.finfo(around.dtype), limit)
    return lambda around: around.dtype


_READERS: dict[type, Callable[[Any], _Read]] = {
    Ref: lambda leaf: lambda around: around.values[leaf],
    Member: _read_member,
    Size: _read_size,
    OfDtype: _read_dtype,
    OfDevice: lambda _: lambda around: around.device,
    PlaceholderSlice: _read_span,
}


def _reader(leaf: Any) -> _Read:
    make = _READERS.get(type(leaf))
    return (lambda _: leaf) if make is None else make(leaf)


def _build(spec: pytree.TreeSpec, leaves: Iterator[_Read]) -> _Read:
    # Torch's own looks up the kind of each node in each call. Other kinds than these are the user's, who may
    # look at what they contain: they are built of values only.
    kind = spec.type
    if spec.is_leaf():
        return next(leaves)
    if kind is tuple or kind is list:
        return _build_row(kind, [_build(child, leaves) for child in subspecs(spec)])
    if kind is dict:
        items = [
            (key, _build(child, leaves)) for key, child in zip(spec.context, subspecs(spec), strict=True)
        ]
        return lambda around: {key: read(around) for key, read in items}
    reads = list(islice(leaves, spec.num_leaves))
    return lambda around: pytree.tree_unflatten([read(around) for read in reads], spec)


def _build_row(kind: type[list[Any]] | type[tuple[Any, ...]], reads: Sequence[_Read]) -> _Read:
    if kind is list:
        return lambda around: [read(around) for read in reads]
    return lambda around: tuple([read(around) for read in reads])  # a list is quicker than a generator


class Template:
    """A tree with placeholders for its tensors.

    Args:
        leaves: leaves of the tree.
        spec: structure of the tree.
    """

    __slots__ = ("_read", "parts", "refs", "spec")

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.parts, self.spec = leaves, spec
        self._read: _Read | None = None
        self.refs = frozenset(leaf for leaf in self.leaves() if type(leaf) is Ref)
        """References to tensors of other steps."""

    def __reduce__(self) -> tuple[type[Template], tuple[list[Any], pytree.TreeSpec]]:
        """Its arguments: functions of a builder cannot be pickled."""
        return Template, (self.parts, self.spec)

    def leaves(self) -> list[Any]:
        """All leaves, including those within slices."""
        spans = [leaf for leaf in self.parts if type(leaf) is PlaceholderSlice]
        return [*self.parts, *(part for span in spans for part in (span.start, span.stop, span.step))]

    def filled(self, around: Around) -> Any:
        """The tree with its tensors."""
        if self._read is None:
            self._read = _build(self.spec, map(_reader, self.parts))
        return self._read(around)
