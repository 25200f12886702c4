"""The distance of two trees of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tolerance(dtype: torch.dtype) -> float:
    """Maximum difference that counts as rounding, relative to the largest value, if everything is computed in
    a dtype.

    >>> tolerance(torch.float64)
    1e-06
    """
    if dtype == torch.float64:
        return 1e-6  # modules may compute parts in float32
    return 1e-4 if dtype == torch.float32 else 0.05


def difference(one: Any, other: Any, floor: float = 0.0) -> float:
    """The largest difference relative to the largest value; infinite if structure, shape or dtype differ.

    Args:
        one: a tree of tensors and other values.
        other: another tree.
        floor: minimum of the value that differences are relative to.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    leaves, spec = pytree.tree_flatten(one)
    others, its = pytree.tree_flatten(other)
    if spec != its:
        return math.inf
    return max((_of_leaf(a, b, floor) for a, b in zip(leaves, others, strict=True)), default=0.0)


def _of_leaf(one: Any, other: Any, floor: float) -> float:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if _alike(one, other) else math.inf
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return math.inf
    if one.layout != torch.strided or other.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else math.inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = (t.detach().to("cpu").to(wide) for t in (one, other))
    size = max(_size(one), _size(other), floor)
    unequal = ~torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    one, other = one[unequal], other[unequal]
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        return math.inf
    return float((one - other).abs().max()) / size if one.numel() else 0.0


def _size(tensor: Tensor) -> float:
    """The largest of its finite values."""
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _alike(one: Any, other: Any) -> bool:
    """Whether values that are not tensors are equal; objects of one class count as equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    plain = (type(None), bool, int, float, complex, str, bytes)
    return not isinstance(one, plain) or bool(one == other)
