"""Inputs that are cut in other ways, to diagnose the dimensions of their samples unless the user stated them.

A tensor whose size there equals the number of samples by coincidence (offsets of documents, a table, a bias
by heads, the axes of positions) would be cut too. So in the first mini-batch that has a tensor, the model
runs on two micro-batches apart and on both together. If outputs differ, other ways to cut are tried: some
tensors whole, or cut in another dimension. A way in which outputs do not differ refuses the mini-batch.

A parameter that begins at zero (a gate, a last projection) may hide a tensor from the outputs. So if outputs
do not differ, and do not differ either with one tensor cut in another way, steps 1, 2, 4, 8 and so on compare
again, until outputs show how it is cut.

If a model mixes samples or draws random numbers in evaluation mode, so that outputs differ whichever way
tensors are cut, the user has to say the dimensions.
The check does not find a tensor that only training mode reads.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.mappings import flat_with_paths
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.input_cuts import REASONS, CutLeaf, Verdict, other_ways

from ..messages.values import Keyworded
from .samples import Dims, cut_leaves, leaves_of, spread_dims
from .user_batch import UserBatch

_LOG = logging.getLogger(__name__)

_WAYS = 24
"""Maximum number of other ways to cut."""


@dataclass(slots=True)
class InputChecks:
    """Checks that were made.

    Attributes:
        settled: tensors whose cut was compared, and kinds of mini-batches in which nothing is to be compared.
        undecided: tensors whose cut made no difference so far.
    """

    settled: set[Hashable] = field(default_factory=set)
    undecided: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class InputCutDiagnosis:
    """Diagnosis of how one mini-batch's inputs are cut.

    Attributes:
        tree: inputs and keyword arguments.
        dims: dimensions of the samples in them.
        leaves: tensors that are cut.
        ways: other ways to cut, each with the dimensions of some leaves by number; None: whole.
        checks: checks that were made.
        key: of this check.
    """

    tree: Any
    dims: Dims
    leaves: Sequence[CutLeaf]
    ways: tuple[Mapping[int, int | None], ...]
    checks: InputChecks
    key: Hashable

    @classmethod
    def of(
        cls, user_batch: UserBatch, sizes: Sequence[int], parts: int, checks: InputChecks, *, due: bool
    ) -> InputCutDiagnosis | None:
        """Diagnosis of a mini-batch's inputs, without ways if none may be cut by coincidence.

        None: nothing is cut, or no diagnosis is due.

        Args:
            user_batch: inputs and targets of this worker.
            sizes: samples by micro-batch.
            parts: number of units into which the scheme cuts each micro-batch.
            checks: earlier diagnoses.
            due: True if earlier ones that decided nothing are due again.
        """
        inputs, ready = user_batch.inputs, user_batch.ready
        if inputs is None or isinstance(inputs[0], Tensor):
            return None
        if compared_rows(sizes, parts, ready=ready) is None:
            return None
        first = next(number for number, size in enumerate(sizes) if size)
        tree, samples = (inputs[first], sizes[first]) if ready else (inputs[0], sum(sizes))
        leaves = _cut_leaves(tree, user_batch.input_dims, samples)
        key = frozenset((leaf.path, leaf.dim, len(leaf.shape)) for leaf in leaves)
        if key in checks.undecided and not due:
            return None
        ways = () if key in checks.settled else tuple(islice(other_ways(leaves, samples), _WAYS))
        return cls(tree, user_batch.input_dims, leaves, ways, checks, key)

    def cut(self, rows: slice, way: int | None) -> Any:
        """Some samples of the inputs, cut as the dimensions say (way None), or in another way."""
        return cut_leaves(self.tree, rows, self.dims, {} if way is None else self.ways[way])

    def end(self, first: Verdict, other_verdicts: Sequence[Verdict], *, decided: bool, warns: bool) -> None:
        """Read the outcome.

        Args:
            first: of the cut that the dimensions say.
            other_verdicts: of other ways, unless the first cut may be right.
            decided: whether a later mini-batch would show nothing else.
            warns: whether this worker says that the check could not decide.

        Raises:
            ConfigError: another way of cutting is right, and this one is not; or none is.
        """
        if not decided:
            self.checks.undecided.add(self.key)
            return
        self.checks.undecided.discard(self.key)
        self.checks.settled.add(self.key)
        for way, verdict in zip(self.ways, other_verdicts, strict=False):
            if verdict is Verdict.SAME:
                self.checks.settled.discard(self.key)
                raise ConfigError(self._refusal(way))
        names = ", ".join(leaf.path for leaf in self.leaves if not leaf.stated)
        if first is Verdict.DIFFERENT:
            self.checks.settled.discard(self.key)
            raise ConfigError(
                "outputs depend on which samples are in a micro-batch (or are drawn at random), whichever "
                f"way inputs are cut; so it cannot be seen whether {names} have their samples where they are "
                "cut: say "
                + " and ".join(self._statements({}))
                + " if they have, with None for a tensor that each micro-batch gets whole"
            )
        if warns and first is not Verdict.SAME:
            _LOG.warning(
                "could not verify that %s have their samples in the dimensions where they are cut (assumed): "
                "%s", names, REASONS[first],
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
    first, *rest = [size for size in sizes if size] or [0]
    if rest and not ready:
        ends = first, first + rest[0]
    elif parts > 1 and first > 1:
        ends = first // 2, first
    else:
        return None
    return slice(0, ends[0]), slice(ends[0], ends[1]), slice(0, ends[1])


def _cut_leaves(tree: Any, dims: Dims, samples: int) -> list[CutLeaf]:
    if not isinstance(tree, Keyworded):
        return list(_cut_leaves_of(tree, dims, "inputs", 0, samples))
    of_inputs, of_kwargs = dims if isinstance(dims, Keyworded) else (dims, dims)
    first = list(_cut_leaves_of(tree.positional, of_inputs, "inputs", 0, samples))
    count = len(pytree.tree_leaves(tree.positional, is_leaf=leaves_of(tree.positional, of_inputs)))
    return [*first, *_cut_leaves_of(tree.kwargs, of_kwargs, "kwargs", count, samples)]


def _cut_leaves_of(tree: Any, dims: Dims, name: str, first: int, samples: int) -> Iterator[CutLeaf]:
    with_paths, spec = flat_with_paths(tree, leaves_of(tree, dims))
    stated = not isinstance(dims, int) or isinstance(tree, Tensor)
    by_leaf = spread_dims(dims, spec) or ()
    for number, ((path, leaf), dim) in enumerate(zip(with_paths, by_leaf, strict=False), first):
        cut = isinstance(leaf, Tensor) and isinstance(dim, int) and leaf.dim() and leaf.shape[dim] == samples
        if cut and isinstance(dim, int):
            yield CutLeaf(number, name + path, dim % leaf.dim(), leaf.shape, leaf.dtype, stated)
