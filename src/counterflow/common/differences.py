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


def difference(first: Any, second: Any, floor: float = 0.0) -> float:
    """The largest difference relative to the largest value; infinite if structure, shape or dtype differ.

    Args:
        first: a tree of tensors and other values.
        second: another tree.
        floor: minimum of the value that differences are relative to.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    first_leaves, spec = pytree.tree_flatten(first)
    second_leaves, second_spec = pytree.tree_flatten(second)
    if spec != second_spec:
        return math.inf
    return max((_of_leaf(a, b, floor) for a, b in zip(first_leaves, second_leaves, strict=True)), default=0.0)


def _of_leaf(first: Any, second: Any, floor: float) -> float:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return 0.0 if _equal_plain(first, second) else math.inf
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return math.inf
    if first.layout != torch.strided or second.layout != torch.strided:
        first, second = first.to_dense(), second.to_dense()
    if not (first.is_floating_point() or first.is_complex()):
        return 0.0 if torch.equal(first, second) else math.inf
    wide = torch.complex128 if first.is_complex() else torch.float64
    first, second = (t.detach().to("cpu").to(wide) for t in (first, second))
    size = max(_size(first), _size(second), floor)
    unequal = ~torch.isclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    first, second = first[unequal], second[unequal]
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        return math.inf
    return float((first - second).abs().max()) / size if first.numel() else 0.0


def _size(tensor: Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _equal_plain(first: Any, second: Any) -> bool:
    """True if values that are not tensors are equal; objects of one class count as equal."""
    if isinstance(first, Tensor) or isinstance(second, Tensor) or type(first) is not type(second):
        return False
    plain = (type(None), bool, int, float, complex, str, bytes)
    return not isinstance(first, plain) or bool(first == second)
