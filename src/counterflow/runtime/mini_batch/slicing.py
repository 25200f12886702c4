"""How micro-batches are cut in slices of their sequence: which dimension of what the positions are.

Invariant: all slices together are the micro-batch, each position once. A target's slice knows the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.errors import ConfigError

from ..messages.values import Unit
from .given import Given
from .samples import Dims, cut, samples_in


class SequenceDims(NamedTuple):
    """Where the positions of a micro-batch's inputs and targets are, and the relative lengths of its
    slices.
    """

    inputs: Dims
    targets: Dims
    lengths: tuple[int, ...]


def rows_of_slice(part: int, lengths: Sequence[int], positions: int) -> slice:
    """The positions of a slice.

    Args:
        part: number of the slice.
        lengths: relative lengths of all slices; exact if their sum is ``positions``.
        positions: number of positions of the whole sequence.

    >>> rows_of_slice(1, (512, 256, 256), 1024), rows_of_slice(1, (1, 1, 1), 10)
    (slice(512, 768, None), slice(3, 6, None))
    """
    whole, before = sum(lengths), sum(lengths[:part])
    return slice(positions * before // whole, positions * (before + lengths[part]) // whole)


def positions_of(given: Given, sizes: Sequence[int], sequence: SequenceDims) -> tuple[int, ...]:
    """Number of positions of each micro-batch's sequence; empty if this worker has no part of the mini-batch.

    Args:
        given: inputs and targets of this worker.
        sizes: samples by micro-batch.
        sequence: dimensions of the positions, and the slices.

    Raises:
        ConfigError: inputs or targets cannot be cut into the slices, or their lengths differ.
    """
    found = [
        [positions_in(tree, its, name, sequence.lengths) for tree in pieces]
        for pieces, its, name in (
            (given.inputs, sequence.inputs, "inputs"),
            (given.targets, sequence.targets, "targets"),
        )
        if pieces is not None
    ]
    for one, other in pairwise(found):
        if one != other:
            raise ConfigError(
                f"micro-batches in {len(sequence.lengths)} slices have {one[0]} positions in their inputs "
                f"and {other[0]} in their targets; say with sequence_dims and target_sequence_dims where "
                "they are"
            )
    return tuple(found[0] if given.ready else found[0] * len(sizes)) if found else ()


def positions_in(tree: Any, dims: Dims, name: str, lengths: Sequence[int]) -> int:
    """The positions of a micro-batch's sequence.

    Args:
        tree: its inputs or targets.
        dims: where the positions are.
        name: what to call it: ``inputs`` or ``targets``.
        lengths: relative lengths of the slices into which it is cut.

    Raises:
        ConfigError: its tensors do not agree, there are none, or a slice would have none.
    """
    slices = len(lengths)
    try:
        found = samples_in(tree, dims, name, whole=True)
    except ConfigError as error:
        option = "sequence_dims" if name == "inputs" else "target_sequence_dims"
        raise ConfigError(
            f"the {name} of a micro-batch are to be cut in {slices} slices of their sequence, along the "
            f"dimensions {option}={dims!r}: {error}; so say with {option}, here, where the positions are"
        ) from error
    if found < slices:
        raise ConfigError(
            f"a micro-batch of {found} positions cannot be cut in {slices} slices; take fewer slices, or "
            "longer sequences"
        )
    short = [part for part in range(slices) if not len(range(found)[rows_of_slice(part, lengths, found)])]
    if short:
        raise ConfigError(
            f"a micro-batch of {found} positions cannot be cut in slices of lengths "
            f"{'+'.join(map(str, lengths))}: slice {short[0]} would have none; take other lengths, or longer "
            "sequences"
        )
    return found


def slice_of(tree: Any, unit: Unit, dims: Dims, lengths: Sequence[int]) -> Any:
    """A slice of a micro-batch's inputs or targets, contiguous as the whole is, which its tensors know."""
    rows = rows_of_slice(unit.part, lengths, samples_in(tree, dims, whole=True))

    def noted(own: Any, whole: Any) -> Any:
        if not isinstance(own, Tensor) or own is whole:
            return own
        own = own.contiguous()
        dim = next((d for d in range(own.dim()) if own.shape[d] != whole.shape[d]), 0)
        setattr(own, SLICE, SliceOf(whole, rows.start, dim))
        return own

    return pytree.tree_map(noted, cut(tree, rows, dims), tree)
