"""Sketches of tensors: a few numbers that differ where tensors do, to compare calls on several workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Sketch(NamedTuple):
    """Numbers of one tensor.

    Attributes:
        shape: its shape.
        size: sum of the absolute values of its elements.
        sums: the sum of its elements, and a sum in which each element has a weight of its own.
    """

    shape: tuple[int, ...]
    size: float
    sums: tuple[float, float]

    def near(self, expected: Sketch, tolerance: float) -> bool:
        """Return whether another sketch differs by rounding only."""
        if self.shape != expected.shape:
            return False
        largest = max(self.size, expected.size)
        return all(
            abs(value - expected_value) <= tolerance * largest
            or (math.isnan(value) and math.isnan(expected_value))
            for value, expected_value in zip(
                (self.size, *self.sums), (expected.size, *expected.sums), strict=True
            )
        )


class CallKey(NamedTuple):
    """A call of a module by a layer.

    Attributes:
        path: path of the module in the model.
        layer: number of the layer that contains the call.
        number: number of the call among those of the module in the layer.
    """

    path: str
    layer: int
    number: int


class CallSketch(NamedTuple):
    """Sketches of a call of a module.

    Attributes:
        inputs: sketches of the tensors among its arguments.
        outputs: sketches of the tensors that it returns.
    """

    inputs: tuple[Sketch, ...]
    outputs: tuple[Sketch, ...]


def sketches_of(tree: Any) -> tuple[Sketch, ...]:
    """Sketches of the tensors of a tree."""
    return tuple(_sketch(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _sketch(tensor: Tensor) -> Sketch:
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).double().flatten()
    weights = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).add_(1).cos_()
    numbers = torch.stack([flat.abs().sum(), flat.sum(), (flat * weights).sum()]).tolist()
    return Sketch(tuple(tensor.shape), numbers[0], (numbers[1], numbers[2]))


def first_difference(
    order: Sequence[CallKey],
    forward_calls: Mapping[CallKey, CallSketch],
    layer_calls: Mapping[CallKey, CallSketch],
    tolerance: float,
) -> str:
    """Return a clause that names the first call that differs; empty if none does.

    Args:
        order: calls in their order.
        forward_calls: calls of the model's own forward.
        layer_calls: calls of the layers.
        tolerance: relative difference that counts as rounding.
    """
    for key in order:
        forward_call, call = forward_calls.get(key), layer_calls.get(key)
        if forward_call is None and call is None:
            continue
        place = f"layer {key.layer} at its call of {key.path!r}"
        if forward_call is None:
            return f"they differ first in {place}, which the model's forward does not make"
        if call is None:
            return f"they differ first in {place}, which only the model's forward makes"
        if not _near(forward_call.inputs, call.inputs, tolerance):
            return f"they differ first in the input of {place}"
        if not _near(forward_call.outputs, call.outputs, tolerance):
            return f"they differ first in the output of {place}"
    return ""


def _near(got: Sequence[Sketch], expected: Sequence[Sketch], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        sketch.near(expected_sketch, tolerance) for sketch, expected_sketch in zip(got, expected, strict=True)
    )
