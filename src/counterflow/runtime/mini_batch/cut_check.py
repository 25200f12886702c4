"""Check that inputs have their samples in the dimension in which they are cut, unless the user said so.

A tensor whose size there equals the number of samples by coincidence (offsets of documents, a table, a bias
by heads, the axes of positions) would be cut too. So in the first mini-batch that has a tensor, the model
runs on two micro-batches apart and on both together. If outputs differ, other ways to cut are tried: some
tensors whole, or cut in another dimension. A way in which outputs do not differ refuses the mini-batch.

If a model mixes samples or draws random numbers in evaluation mode, so that outputs differ whichever way
tensors are cut, the user has to say the dimensions.
The check does not find a tensor that only training mode reads.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from ..messages.mappings import flat_with_paths, know
from ..messages.values import Keyworded
from .samples import Dims, cut_leaves, leaves_of, spread_dims
from .user_batch import UserBatch

_LOG = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Outputs that are apart by less, relative to their size, differ by rounding; of other dtypes by 6 %."""

_KINDS = 4096
"""Maximum number of kinds of mini-batches that are remembered."""

_WAYS = 24
"""Maximum number of other ways to cut."""


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


_REASONS = {
    Verdict.UNKNOWN: "outputs have no samples that could be compared",
    Verdict.NEITHER: "scalars of the output are neither means over samples nor sums",
    Verdict.FAILED: "a layer failed in evaluation mode",
}


class _Leaf(NamedTuple):
    """A tensor of the inputs that is cut.

    Attributes:
        number: of the leaf among all leaves.
        path: in words.
        dim: dimension in which it is cut.
        shape: of the tensor.
        dtype: of the tensor.
        stated: whether the user said that dimension, or nothing else could have the samples.
    """

    number: int
    path: str
    dim: int
    shape: torch.Size
    dtype: torch.dtype
    stated: bool


class CutChecks:
    """Checks of one pipeline's inputs."""

    def __init__(self) -> None:
        self._settled: set[Hashable] = set()
        """Tensors whose cut was compared, and kinds of mini-batches in which nothing is to be compared."""

    def of(self, given: UserBatch, kind: int, sizes: Sequence[int], parts: int) -> CutCheck | None:
        """Check of a mini-batch's inputs; None: no tensor is cut that may be cut by coincidence.

        Args:
            given: inputs and targets of this worker.
            kind: signature of the inputs.
            sizes: samples by micro-batch.
            parts: number of units into which the scheme cuts each micro-batch.
        """
        if given.inputs is None or isinstance(given.inputs[0], Tensor) or kind in self._settled:
            return None
        if compared_rows(sizes, parts, ready=given.ready) is None:
            return None
        first = next(number for number, size in enumerate(sizes) if size)
        tree, samples = (given.inputs[first], sizes[first]) if given.ready else (given.inputs[0], sum(sizes))
        leaves = _cut_leaves(tree, given.input_dims, samples)
        key = frozenset((leaf.path, leaf.dim, len(leaf.shape)) for leaf in leaves)
        ways = () if key in self._settled else tuple(islice(_ways(leaves, samples), _WAYS))
        if not ways:
            if len(self._settled) < _KINDS:
                self._settled.add(kind)
            return None
        return CutCheck(tree, given.input_dims, leaves, ways, self._settled, key)


@dataclass(frozen=True, slots=True)
class CutCheck:
    """Check of one mini-batch's inputs.

    Attributes:
        tree: inputs and keyword arguments.
        dims: dimensions of the samples in them.
        leaves: tensors that are cut.
        ways: other ways to cut, each with the dimensions of some leaves by number; None: whole.
        settled: keys of the checks that were made.
        key: of this check.
    """

    tree: Any
    dims: Dims
    leaves: Sequence[_Leaf]
    ways: tuple[Mapping[int, int | None], ...]
    settled: set[Hashable]
    key: Hashable

    def cut(self, rows: slice, way: int | None) -> Any:
        """Some samples of the inputs, cut as the dimensions say (way None), or in another way."""
        return cut_leaves(self.tree, rows, self.dims, {} if way is None else self.ways[way])

    def end(self, first: Verdict, others: Sequence[Verdict], *, warns: bool) -> None:
        """Read the outcome.

        Args:
            first: of the cut that the dimensions say.
            others: of other ways, unless the first cut is right.
            warns: whether this worker says that the check could not decide.

        Raises:
            ConfigError: another way of cutting is right, and this one is not; or none is.
        """
        self.settled.add(self.key)
        for way, verdict in zip(self.ways, others, strict=False):
            if verdict is Verdict.SAME:
                self.settled.discard(self.key)
                raise ConfigError(self._refusal(way))
        names = ", ".join(leaf.path for leaf in self.leaves if not leaf.stated)
        if first is Verdict.DIFFERENT:
            self.settled.discard(self.key)
            raise ConfigError(
                "outputs depend on which samples are in a micro-batch (or are drawn at random), whichever "
                f"way inputs are cut; so it cannot be seen whether {names} have their samples where they are "
                "cut: say "
                + " and ".join(self._statements({}))
                + " if they have, with None for a tensor that each micro-batch gets whole"
            )
        if warns and first is not Verdict.SAME:
            _LOG.warning(
                "it could not be seen whether %s have their samples where they are cut, as they are taken to "
                "have: %s", names, _REASONS[first],
            )  # fmt: skip

    def _refusal(self, way: Mapping[int, int | None]) -> str:
        by_number = {leaf.number: leaf for leaf in self.leaves}
        facts, first = list[str](), by_number[next(iter(way))]
        for number, dim in way.items():
            leaf = by_number[number]
            where = "has no samples" if dim is None else f"has its samples in dimension {dim}"
            facts.append(f"{leaf.path} of shape {(*leaf.shape,)} {where}")
        return (
            f"{' and '.join(facts)}, though it is as long in dimension {first.dim} as the mini-batch has "
            "samples: cut there, it gives other outputs than the whole does; say "
            + " and ".join(self._statements(way))
        )

    def _statements(self, way: Mapping[int, int | None]) -> Iterator[str]:
        """Dimensions to state, by option."""
        _, spec = pytree.tree_flatten(self.tree, is_leaf=leaves_of(self.tree, self.dims))
        by_leaf = spread_dims(self.dims, spec)
        assert by_leaf is not None, "samples_in has refused other dimensions"
        dims = [way.get(number, dim) for number, dim in enumerate(by_leaf)]
        stated = pytree.tree_unflatten(dims, spec)
        if not isinstance(stated, Keyworded):
            yield f"input_dims={stated!r}"
            return
        count = len(pytree.tree_leaves(self.tree.positional, is_leaf=leaves_of(self.tree, self.dims)))
        numbers = way or [leaf.number for leaf in self.leaves if not leaf.stated]
        if any(number < count for number in numbers):
            yield f"input_dims={stated.positional!r}"
        if any(number >= count for number in numbers):
            yield f"kwarg_dims={stated.kwargs!r}"


def compared_rows(sizes: Sequence[int], parts: int, *, ready: bool) -> tuple[slice, slice, slice] | None:
    """Samples of two units of a mini-batch, and of both together; None: nothing is cut.

    Args:
        sizes: samples by micro-batch.
        parts: number of units into which the scheme cuts each micro-batch.
        ready: whether micro-batches were ready, so that only the scheme cuts them.

    >>> compared_rows((3, 2, 2), 1, ready=False)
    (slice(0, 3, None), slice(3, 5, None), slice(0, 5, None))
    >>> compared_rows((3, 2, 2), 2, ready=True)
    (slice(0, 1, None), slice(1, 3, None), slice(0, 3, None))
    """
    first, *others = [size for size in sizes if size] or [0]
    if others and not ready:
        ends = first, first + others[0]
    elif parts > 1 and first > 1:
        ends = first // 2, first
    else:
        return None
    return slice(0, ends[0]), slice(ends[0], ends[1]), slice(0, ends[1])


def compare(apart: Sequence[Any], together: Any, sizes: Sequence[int]) -> Verdict:
    """Compare outputs of two units with the output of both together.

    Numbers that are the same for both units say nothing.

    Args:
        apart: outputs of the units.
        together: output of both.
        sizes: samples of each unit.
    """
    for output in (*apart, together):
        know(output)
    flat = [pytree.tree_flatten(output) for output in (*apart, together)]
    if any(spec != flat[0][1] for _, spec in flat):
        return Verdict.UNKNOWN
    verdicts = {
        _compare(one, other, whole, sizes) for one, other, whole in zip(*(f for f, _ in flat), strict=True)
    }
    for verdict in (Verdict.DIFFERENT, Verdict.NEITHER):
        if verdict in verdicts:
            return verdict
    return Verdict.SAME if Verdict.SAME in verdicts else Verdict.UNKNOWN


def _compare(one: Any, other: Any, whole: Any, sizes: Sequence[int]) -> Verdict:
    if not all(isinstance(leaf, Tensor) for leaf in (one, other, whole)):
        return Verdict.UNKNOWN
    if not whole.dim():
        return _compare_scalars(one, other, whole, sizes)
    if not one.dim() == other.dim() == whole.dim():
        return Verdict.UNKNOWN
    for dim in range(whole.dim()):
        shapes = [list(leaf.shape) for leaf in (one, other, whole)]
        lengths = [shape.pop(dim) for shape in shapes]
        by_samples = lengths[0] * sizes[1] == lengths[1] * sizes[0] and lengths[0] + lengths[1] == lengths[2]
        if by_samples and lengths[0] >= sizes[0] and shapes[0] == shapes[1] == shapes[2]:
            return Verdict.SAME if _near(torch.cat([one, other], dim), whole) else Verdict.DIFFERENT
    if one.shape == other.shape == whole.shape:
        return Verdict.UNKNOWN if _near(one, whole) and _near(other, whole) else Verdict.DIFFERENT
    return Verdict.UNKNOWN


def _compare_scalars(one: Tensor, other: Tensor, whole: Tensor, sizes: Sequence[int]) -> Verdict:
    """Compare means over samples, or sums."""
    if one.dim() or other.dim() or not whole.is_floating_point():
        return Verdict.UNKNOWN
    if _near(one, other) and _near(one, whole):
        return Verdict.UNKNOWN
    mean = (one * sizes[0] + other * sizes[1]) / sum(sizes)
    return Verdict.SAME if _near(mean, whole) or _near(one + other, whole) else Verdict.NEITHER


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same but for rounding."""
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    if not other.numel():
        return True
    rounding = _ROUNDING.get(other.dtype)
    finite = torch.where(other.isfinite(), other, 0).abs()
    if rounding is not None:
        atol = rounding * float(finite.mean())
        return bool(torch.isclose(one, other, rtol=rounding, atol=atol, equal_nan=True).all())
    apart = torch.where(one.isfinite() & other.isfinite(), one - other, 0).float()
    if other.dim() < 2:
        return bool((apart.abs() <= 6e-2 * finite.abs().max()).all())
    sizes = finite.float().norm(dim=-1)
    return bool((apart.norm(dim=-1) <= 6e-2 * (sizes + sizes.mean())).all())


def _cut_leaves(tree: Any, dims: Dims, samples: int) -> list[_Leaf]:
    """Tensors of inputs that are cut, a lone positional one as stated."""
    if not isinstance(tree, Keyworded):
        return list(_cut_leaves_of(tree, dims, "inputs", 0, samples))
    of_inputs, of_kwargs = dims if isinstance(dims, Keyworded) else (dims, dims)
    first = list(_cut_leaves_of(tree.positional, of_inputs, "inputs", 0, samples))
    count = len(pytree.tree_leaves(tree.positional, is_leaf=leaves_of(tree.positional, of_inputs)))
    return [*first, *_cut_leaves_of(tree.kwargs, of_kwargs, "kwargs", count, samples)]


def _cut_leaves_of(tree: Any, dims: Dims, name: str, first: int, samples: int) -> Iterator[_Leaf]:
    with_paths, spec = flat_with_paths(tree, leaves_of(tree, dims))
    stated = not isinstance(dims, int) or isinstance(tree, Tensor)
    by_leaf = spread_dims(dims, spec) or ()
    for number, ((path, leaf), dim) in enumerate(zip(with_paths, by_leaf, strict=False), first):
        cut = isinstance(leaf, Tensor) and isinstance(dim, int) and leaf.dim() and leaf.shape[dim] == samples
        if cut and isinstance(dim, int):
            yield _Leaf(number, name + path, dim % leaf.dim(), leaf.shape, leaf.dtype, stated)


def _ways(leaves: Sequence[_Leaf], samples: int) -> Iterator[Mapping[int, int | None]]:
    """Other ways to cut: a tensor elsewhere, a tensor whole, some groups of tensors of one kind whole.

    Tensors of one shape and dtype with several dimensions do not agree by coincidence, unless several are as
    long as there are samples. If all tensors are of one group, there is no other way.
    """
    groups: dict[Hashable, list[_Leaf]] = {}
    for leaf in leaves:
        certain = len(leaf.shape) > 1 and leaf.shape.count(samples) == 1
        key: Hashable = (leaf.shape, leaf.dtype, leaf.dim) if certain else leaf.path
        groups.setdefault(key, []).append(leaf)
    if len(groups) < 2:
        return
    free = [group for group in groups.values() if not any(leaf.stated for leaf in group)]
    single = [leaf for group in free for leaf in group]
    elsewhere: list[dict[int, int | None]] = [
        {leaf.number: dim}
        for leaf in single
        for dim, size in enumerate(leaf.shape)
        if size == samples and dim != leaf.dim
    ]
    whole: list[dict[int, int | None]] = [{leaf.number: None} for leaf in single]
    yield from (*elsewhere, *whole)
    for one, other in (*combinations(elsewhere, 2), *product(elsewhere, whole)):
        if one.keys() != other.keys():
            yield one | other
    for count in range(1, len(groups)):
        for some in combinations(free, count):
            together = [leaf for group in some for leaf in group]
            if len(together) > 1:
                yield {leaf.number: None for leaf in together}
