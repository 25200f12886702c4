"""Diagnosis of how inputs are cut: whether tensors have their samples in the dimension in which they are cut.

Outputs of two units that run alone are compared with the output of both together. If they differ, other ways
to cut are tried: a way in which they do not differ shows that this one is wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .tolerances import ACTIVATIONS, COARSE


class Verdict(IntEnum):
    """Outcome of a comparison of outputs of two micro-batches with those of both together."""

    UNKNOWN = 0
    """Nothing could be compared."""
    SAME = 1
    DIFFERENT = 2
    FAILED = 3
    """A layer failed."""
    NEITHER = 4
    """Scalars are neither means over samples nor sums, such as a mean over tokens that count."""


REASONS = {
    Verdict.UNKNOWN: "outputs have no samples that could be compared",
    Verdict.NEITHER: "scalars of the output are neither means over samples nor sums",
    Verdict.FAILED: "a layer failed in evaluation mode",
}


class CutLeaf(NamedTuple):
    """A tensor of the inputs that is cut.

    Attributes:
        number: of the leaf among all leaves.
        path: in words.
        dim: dimension in which it is cut.
        shape: of the tensor.
        dtype: of the tensor.
        stated: whether the user stated that dimension, or no other tensor could have the samples.
    """

    number: int
    path: str
    dim: int
    shape: torch.Size
    dtype: torch.dtype
    stated: bool


def compare_units(separate: Sequence[Any], together: Any, sizes: Sequence[int]) -> Verdict:
    """Compare outputs of two units with the output of both together.

    Numbers that are the same for both units say nothing.

    Args:
        separate: outputs of the units.
        together: output of both.
        sizes: samples of each unit.
    """
    flat = [pytree.tree_flatten(output) for output in (*separate, together)]
    if any(spec != flat[0][1] for _, spec in flat):
        return Verdict.UNKNOWN
    verdicts = {
        _compare(first, second, both, sizes)
        for first, second, both in zip(*(f for f, _ in flat), strict=True)
    }
    for verdict in (Verdict.DIFFERENT, Verdict.NEITHER):
        if verdict in verdicts:
            return verdict
    return Verdict.SAME if Verdict.SAME in verdicts else Verdict.UNKNOWN


def _compare(first: Any, second: Any, both: Any, sizes: Sequence[int]) -> Verdict:
    if not all(isinstance(leaf, Tensor) for leaf in (first, second, both)):
        return Verdict.UNKNOWN
    if not both.dim():
        return _compare_scalars(first, second, both, sizes)
    if not first.dim() == second.dim() == both.dim():
        return Verdict.UNKNOWN
    for dim in range(both.dim()):
        shapes = [list(leaf.shape) for leaf in (first, second, both)]
        lengths = [shape.pop(dim) for shape in shapes]
        by_samples = lengths[0] * sizes[1] == lengths[1] * sizes[0] and lengths[0] + lengths[1] == lengths[2]
        if by_samples and lengths[0] >= sizes[0] and shapes[0] == shapes[1] == shapes[2]:
            return Verdict.SAME if _near(torch.cat([first, second], dim), both) else Verdict.DIFFERENT
    if first.shape == second.shape == both.shape:
        return Verdict.UNKNOWN if _near(first, both) and _near(second, both) else Verdict.DIFFERENT
    return Verdict.UNKNOWN


def _compare_scalars(first: Tensor, second: Tensor, both: Tensor, sizes: Sequence[int]) -> Verdict:
    if first.dim() or second.dim() or not both.is_floating_point():
        return Verdict.UNKNOWN
    if _near(first, second) and _near(first, both):
        return Verdict.UNKNOWN
    mean = (first * sizes[0] + second * sizes[1]) / sum(sizes)
    return Verdict.SAME if _near(mean, both) or _near(first + second, both) else Verdict.NEITHER


def _near(got: Tensor, expected: Tensor) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(got, expected)
    if not expected.numel():
        return True
    precise = expected.dtype in (torch.float32, torch.float64)
    finite = torch.where(expected.isfinite(), expected, 0).abs()
    if precise:
        limit = ACTIVATIONS.of(expected.dtype)
        atol = limit * float(finite.mean())
        return bool(torch.isclose(got, expected, rtol=limit, atol=atol, equal_nan=True).all())
    difference = torch.where(got.isfinite() & expected.isfinite(), got - expected, 0).float()
    if expected.dim() < 2:
        return bool((difference.abs() <= COARSE * finite.abs().max()).all())
    sizes = finite.float().norm(dim=-1)
    return bool((difference.norm(dim=-1) <= COARSE * (sizes + sizes.mean())).all())


def other_ways(leaves: Sequence[CutLeaf], samples: int) -> Iterator[Mapping[int, int | None]]:
    """Other ways to cut: a tensor in another dimension, a tensor whole, groups of tensors of one kind whole.

    Tensors of one shape and dtype with several dimensions do not agree by coincidence, unless several are as
    long as there are samples. If all tensors are of one group, there is no other way.
    """
    groups: dict[Hashable, list[CutLeaf]] = {}
    for leaf in leaves:
        certain = len(leaf.shape) > 1 and leaf.shape.count(samples) == 1
        key: Hashable = (leaf.shape, leaf.dtype, leaf.dim) if certain else leaf.path
        groups.setdefault(key, []).append(leaf)
    if len(groups) < 2:
        return
    free = [group for group in groups.values() if not any(leaf.stated for leaf in group)]
    single = [leaf for group in free for leaf in group]
    in_other_dims: list[dict[int, int | None]] = [
        {leaf.number: dim}
        for leaf in single
        for dim, size in enumerate(leaf.shape)
        if size == samples and dim != leaf.dim
    ]
    uncut: list[dict[int, int | None]] = [{leaf.number: None} for leaf in single]
    yield from (*in_other_dims, *uncut)
    for first, second in (*combinations(in_other_dims, 2), *product(in_other_dims, uncut)):
        if first.keys() != second.keys():
            yield first | second
    for count in range(1, len(groups)):
        for some in combinations(free, count):
            together = [leaf for group in some for leaf in group]
            if len(together) > 1:
                yield {leaf.number: None for leaf in together}
