"""Cutting of micro-batches into slices of their sequence, along the dimensions of the positions.

Invariant: all slices together are the micro-batch, each position once. A target's slice knows the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.contexts import rows_of_slice
from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.errors import ConfigError

from ..messages.values import Keyworded, Unit
from .samples import KWARG_OPTIONS, Dims, cut, options_of, samples_in
from .user_batch import UserBatch


class Slices(NamedTuple):
    """Slices of a sequence.

    Attributes:
        lengths: relative lengths of the slices.
        multiple: number that divides the length of each slice.
    """

    lengths: tuple[int, ...]
    multiple: int = 1

    def rows(self, part: int, positions: int) -> slice:
        """Positions of a slice of a sequence with some number of positions."""
        return rows_of_slice(part, self.lengths, positions, self.multiple)


class SequenceDims(NamedTuple):
    """Dimensions of the positions in inputs and targets, and the slices."""

    inputs: Dims
    targets: Dims
    slices: Slices


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
        [positions_in(tree, dims, name, sequence.slices) for tree in pieces]
        for pieces, dims, name in (
            (user_batch.inputs, sequence.inputs, "inputs"),
            (user_batch.targets, sequence.targets, "targets"),
        )
        if pieces is not None
    ]
    for in_inputs, in_targets in pairwise(counts):
        if in_inputs != in_targets:
            raise ConfigError(
                f"micro-batches in {len(sequence.slices.lengths)} slices have {in_inputs[0]} positions in "
                f"their inputs and {in_targets[0]} in their targets; say with sequence_dims and "
                "target_sequence_dims where they are"
            )
    return tuple(counts[0] if user_batch.ready else counts[0] * len(sizes)) if counts else ()


def positions_in(tree: Any, dims: Dims, name: str, slices: Slices) -> int:
    """The positions of a micro-batch's sequence.

    Args:
        tree: its inputs or targets.
        dims: where the positions are.
        name: what to call it: ``inputs`` or ``targets``.
        slices: the slices into which it is cut.

    Raises:
        ConfigError: its tensors do not agree, there are none, or a slice would have none.
    """
    lengths, multiple = slices
    count = len(lengths)
    option = "sequence_dims" if name == "inputs" else "target_sequence_dims"
    try:
        positions = samples_in(tree, dims, name, option=option, uncut=True)
    except ConfigError as error:
        stated = f"{option}={dims!r}"
        if isinstance(dims, Keyworded):
            stated = f"{option}={dims.positional!r} and {KWARG_OPTIONS[option]}={dims.kwargs!r}"
        raise ConfigError(
            f"the {name} of a micro-batch are to be cut in {count} slices of their sequence, along the "
            f"dimensions {stated}: {error}; so say with {options_of(tree, option)}, here, where the "
            "positions are"
        ) from error
    if positions % multiple:
        raise ConfigError(
            f"a micro-batch of {positions} positions of a share has no head and tail in each of {count} "
            "slices; give cf.share_sequence(tensor, pipeline.context) of inputs and targets"
        )
    if positions < count * multiple:
        raise ConfigError(
            f"a micro-batch of {positions} positions cannot be cut in {count} slices; take fewer slices, or "
            "longer sequences"
        )
    short = [part for part in range(count) if not len(range(positions)[slices.rows(part, positions)])]
    if short:
        raise ConfigError(
            f"a micro-batch of {positions} positions cannot be cut in slices of lengths "
            f"{'+'.join(map(str, lengths))}: slice {short[0]} would have none; take other lengths, or longer "
            "sequences"
        )
    return positions


def slice_of(tree: Any, unit: Unit, dims: Dims, slices: Slices) -> Any:
    """Slice of a micro-batch's inputs or targets; its tensors are contiguous and refer to the whole ones."""
    rows = slices.rows(unit.part, samples_in(tree, dims, uncut=True))

    def with_note(part: Any, sequence: Any) -> Any:
        if not isinstance(part, Tensor) or part is sequence:
            return part
        part = part.contiguous()
        dim = next((d for d in range(part.dim()) if part.shape[d] != sequence.shape[d]), 0)
        setattr(part, SLICE, SliceOf(sequence, rows.start, dim))
        return part

    return pytree.tree_map(with_note, cut(tree, rows, dims), tree)
