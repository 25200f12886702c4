"""Cutting of micro-batches into slices of their sequence, along the dimensions of the positions.

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
from .samples import Dims, cut, samples_in
from .user_batch import UserBatch


class SequenceDims(NamedTuple):
    """Dimensions of the positions in inputs and targets, and the relative lengths of slices."""

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
    total, before = sum(lengths), sum(lengths[:part])
    return slice(positions * before // total, positions * (before + lengths[part]) // total)


def positions_of(user_batch: UserBatch, sizes: Sequence[int], sequence: SequenceDims) -> tuple[int, ...]:
    """Number of positions of each micro-batch's sequence; empty if this worker has no part of the mini-batch.

    Args:
        user_batch: inputs and targets of this worker.
        sizes: samples by micro-batch.
        sequence: dimensions of the positions, and the slices.

    Raises:
        ConfigError: inputs or targets cannot be cut into the slices, or their lengths differ.
    """
    counts = [
        [positions_in(tree, dims, name, sequence.lengths) for tree in pieces]
        for pieces, dims, name in (
            (user_batch.inputs, sequence.inputs, "inputs"),
            (user_batch.targets, sequence.targets, "targets"),
        )
        if pieces is not None
    ]
    for in_inputs, in_targets in pairwise(counts):
        if in_inputs != in_targets:
            raise ConfigError(
                f"micro-batches in {len(sequence.lengths)} slices have {in_inputs[0]} positions in their "
                f"inputs and {in_targets[0]} in their targets; say with sequence_dims and "
                "target_sequence_dims where they are"
            )
    return tuple(counts[0] if user_batch.ready else counts[0] * len(sizes)) if counts else ()


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
        positions = samples_in(tree, dims, name, uncut=True)
    except ConfigError as error:
        option = "sequence_dims" if name == "inputs" else "target_sequence_dims"
        raise ConfigError(
            f"the {name} of a micro-batch are to be cut in {slices} slices of their sequence, along the "
            f"dimensions {option}={dims!r}: {error}; so say with {option}, here, where the positions are"
        ) from error
    if positions < slices:
        raise ConfigError(
            f"a micro-batch of {positions} positions cannot be cut in {slices} slices; take fewer slices, or "
            "longer sequences"
        )
    short = [
        part for part in range(slices) if not len(range(positions)[rows_of_slice(part, lengths, positions)])
    ]
    if short:
        raise ConfigError(
            f"a micro-batch of {positions} positions cannot be cut in slices of lengths "
            f"{'+'.join(map(str, lengths))}: slice {short[0]} would have none; take other lengths, or longer "
            "sequences"
        )
    return positions


def slice_of(tree: Any, unit: Unit, dims: Dims, lengths: Sequence[int]) -> Any:
    """Slice of a micro-batch's inputs or targets; its tensors are contiguous and refer to the whole ones."""
    rows = rows_of_slice(unit.part, lengths, samples_in(tree, dims, uncut=True))

    def with_note(part: Any, sequence: Any) -> Any:
        if not isinstance(part, Tensor) or part is sequence:
            return part
        part = part.contiguous()
        dim = next((d for d in range(part.dim()) if part.shape[d] != sequence.shape[d]), 0)
        setattr(part, SLICE, SliceOf(sequence, rows.start, dim))
        return part

    return pytree.tree_map(with_note, cut(tree, rows, dims), tree)
