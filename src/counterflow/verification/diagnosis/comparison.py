"""Comparison of a whole with its parts, and the distances that it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.tensors.unknown_values import values_unknown

T = TypeVar("T")
P = TypeVar("P")
J = TypeVar("J")
R = TypeVar("R")


def compare_with_parts(
    run_whole: Callable[[], T],
    parts: Sequence[Callable[[], P]],
    join: Callable[[Sequence[P]], J],
    compare: Callable[[T, J], R],
) -> R:
    """Run the whole, run the parts, join these, and compare.

    Args:
        run_whole: computes what is expected.
        parts: compute the parts, in their order.
        join: joins the parts.
        compare: compares the expected result with the joined one, within a tolerance of ``tolerances``.
    """
    expected = run_whole()
    return compare(expected, join([part() for part in parts]))


def distance(expected: Tensor, got: Tensor, *, skip_non_finite: bool = True) -> float:
    """Largest difference relative to the largest finite expected value; infinite if shape or dtype differ.

    Args:
        expected: tensor of any shape.
        got: tensor to compare.
        skip_non_finite: whether elements that are not finite in either are ignored, because a step reports
            them itself; otherwise they must be equal.

    >>> distance(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return math.inf
    if values_unknown():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, got) else math.inf
    if not expected.numel():
        return 0.0
    expected, got = expected.detach(), got.detach()
    finite = expected.isfinite() & got.isfinite()
    ignored = ~finite
    if not skip_non_finite:
        ignored = (expected == got) | (expected.isnan() & got.isnan())
        if not bool((finite | ignored).all()):
            return math.inf
    largest = float((got - expected).abs().masked_fill_(ignored, 0.0).max())
    sizes = expected.abs()
    size = float(sizes.masked_fill(~(finite if skip_non_finite else expected.isfinite()), 0.0).max())
    return largest / size if size else (math.inf if largest else 0.0)


def norm_distance(expected: Tensor, got: Tensor) -> float:
    """Norm of the difference relative to the norm of the expected tensor; nan if a value is not finite.

    The host waits once for a device.

    >>> norm_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.375]))
    0.125
    """
    if values_unknown():
        return 0.0
    expected, got = expected.detach(), got.detach()
    return float((got - expected).norm() / expected.norm())


def equal_within_units(expected: Tensor, got: Tensor, units: float) -> bool:
    """True if no element differs by more than some units in the last place of the largest value.

    Args:
        expected: tensor of any shape.
        got: tensor to compare; of another shape or dtype it differs.
        units: maximum difference, in units in the last place.

    >>> equal_within_units(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 4.000002]), 8.0)
    True
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if values_unknown():
        return True
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, got)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    size = float(expected.detach().to(wide).abs().max()) if expected.numel() else 0.0
    limit = units * torch.finfo(expected.dtype).eps * (size if math.isfinite(size) else 0.0)
    first, second = (tensor.detach().to(wide) for tensor in (expected, got))
    return torch.allclose(first, second, rtol=0.0, atol=limit, equal_nan=True)


def difference(first: Any, second: Any, floor: float = 0.0) -> float:
    """The largest difference relative to the largest value; infinite if structure, shape or dtype differ.

    Args:
        first: a tree of tensors and other values.
        second: another tree.
        floor: minimum of the value that differences are relative to.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    leaves, spec = pytree.tree_flatten(first)
    other_leaves, other_spec = pytree.tree_flatten(second)
    if spec != other_spec:
        return math.inf
    return max((_of_leaf(a, b, floor) for a, b in zip(leaves, other_leaves, strict=True)), default=0.0)


def _of_leaf(first: Any, second: Any, floor: float) -> float:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return 0.0 if _are_equal(first, second) else math.inf
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return math.inf
    if values_unknown():
        return 0.0
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


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor) or type(first) is not type(second):
        return False
    plain = (type(None), bool, int, float, complex, str, bytes)
    return not isinstance(first, plain) or bool(first == second)  # objects of a class count as equal
