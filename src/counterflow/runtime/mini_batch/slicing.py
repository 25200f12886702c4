"""How micro-batches are cut in slices of their sequence: which dimension of what the positions are.

Invariant: all slices together are the micro-batch, each position once. A target's slice knows the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError
from counterflow.loss_sum import SLICE, SliceOf

from ..messages.values import Unit
from .given import Given
from .samples import Dims, cut, samples_in


class SequenceDims(NamedTuple):
    """Where the positions of a micro-batch's inputs and targets are; of one that is not sliced None."""

    inputs: Dims
    targets: Dims


def lengths_of(given: Given, sizes: Sequence[int], dims: SequenceDims, slices: int) -> tuple[int, ...]:
    """Number of positions of each micro-batch's sequence; empty if this worker has no part of the mini-batch.

    Args:
        given: inputs and targets of this worker.
        sizes: samples by micro-batch.
        dims: dimensions of the positions.
        slices: number of slices of each micro-batch.

    Raises:
        ConfigError: inputs or targets cannot be cut into the slices, or their lengths differ.
    """
    found = [
        [positions_in(tree, its, name, slices) for tree in pieces]
        for pieces, its, name in (
            (given.inputs, dims.inputs, "inputs"),
            (given.targets, dims.targets, "targets"),
        )
        if pieces is not None
    ]
    for one, other in pairwise(found):
        if one != other:
            raise ConfigError(
                f"micro-batches in {slices} slices have {one[0]} positions in their inputs and {other[0]} in "
                "their targets; say with sequence_dims and target_sequence_dims where they are"
            )
    return tuple(found[0] if given.ready else found[0] * len(sizes)) if found else ()


def positions_in(tree: Any, dims: Dims, name: str, slices: int) -> int:
    """The positions of a micro-batch's sequence.

    Args:
        tree: its inputs or targets.
        dims: where the positions are.
        name: what to call it: ``inputs`` or ``targets``.
        slices: into how many slices it is cut.

    Raises:
        ConfigError: its tensors do not agree, there are none, or fewer than slices.
    """
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
    return found


def slice_of(tree: Any, unit: Unit, dims: Dims) -> Any:
    """A slice of a micro-batch's inputs or targets, contiguous as the whole is, which its tensors know."""
    rows = unit.rows(samples_in(tree, dims, whole=True))

    def noted(own: Any, whole: Any) -> Any:
        if not isinstance(own, Tensor) or own is whole:
            return own
        own = own.contiguous()
        dim = next((d for d in range(own.dim()) if own.shape[d] != whole.shape[d]), 0)
        setattr(own, SLICE, SliceOf(whole, rows.start, dim))
        return own

    return pytree.tree_map(noted, cut(tree, rows, dims), tree)
