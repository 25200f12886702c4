"""Sequences that several positions of the mesh share: context parallelism.

A sequence of S positions is cut in 2n chunks; position p of n has chunks p and 2n - 1 - p, its head and its
tail, so that all have as much work in causal attention.

::

    n = 2:   chunk 0 | chunk 1 | chunk 2 | chunk 3
             p = 0     p = 1     p = 1     p = 0

A sequence that runs in slices is cut in these first, and each slice is shared so. Then a slice sees nothing
of later ones at any position of the mesh, and all positions have as much work in each slice.

Invariant: each position of a sequence is in one share, and shares are equally long, slice by slice.

Source: head-tail shares as in torch's ``_HeadTailLoadBalancer`` and Megatron-LM's context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """One of several equal parts.

    Attributes:
        number: number of the part, from 0.
        count: number of parts.
        lengths: relative lengths of the slices in which a sequence runs; each slice is shared.
    """

    number: int
    count: int
    lengths: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Context:
    """Positions of the mesh that share sequences.

    Attributes:
        share: this position's share.
        group: process group of the positions, in the order of their shares.
        ring: True if keys and values of attention go around, False if they are gathered.
    """

    share: Share
    group: Any
    ring: bool = False

    def of_slice(self) -> Context:
        """Context of one slice, which is shared like a sequence that is not sliced."""
        return replace(self, share=replace(self.share, lengths=(1,)))


CONTEXT: ContextVar[Context | None] = ContextVar("counterflow_context", default=None)
"""Context of the loss function that runs; None: it is given whole sequences."""

_SEQUENCES = "_counterflow_sequences"
"""Attribute of a share: the whole sequences, which the positions' agreement compares."""

MULTIPLE = 2
"""Number that divides the length of each slice of a share: it has a head and a tail."""


def rows_of_slice(part: int, lengths: Sequence[int], positions: int, multiple: int = 1) -> slice:
    """The positions of a slice.

    Args:
        part: number of the slice.
        lengths: relative lengths of all slices; exact if their sum is ``positions``.
        positions: number of positions of the sequence.
        multiple: number that divides the length of each slice, if it divides ``positions``.

    >>> rows_of_slice(1, (512, 256, 256), 1024), rows_of_slice(1, (1, 1, 1), 10)
    (slice(512, 768, None), slice(3, 6, None))
    >>> rows_of_slice(1, (1, 1, 1), 10, 2)
    slice(2, 6, None)
    """
    units, total, before = positions // multiple, sum(lengths), sum(lengths[:part])
    start, stop = units * before // total, units * (before + lengths[part]) // total
    return slice(start * multiple, stop * multiple)


def slices_of(tensor: Tensor, lengths: Sequence[int], dim: int, multiple: int) -> list[Tensor]:
    """Slices of a sequence, or of a share of it.

    Args:
        tensor: the sequence.
        lengths: relative lengths of the slices.
        dim: dimension of the sequence.
        multiple: number that divides the length of each slice.
    """
    rows = [rows_of_slice(part, lengths, tensor.shape[dim], multiple) for part in range(len(lengths))]
    return [tensor.narrow(dim, part.start, part.stop - part.start) for part in rows]


def share_sequence(tensor: Tensor, share: Share, dim: int = 1) -> Tensor:
    """Return the head and the tail of each slice of sequences that one of ``share.count`` positions has.

    Args:
        tensor: whole sequences; labels are shifted before.
        share: share of the position, ``pipeline.context``.
        dim: dimension of the sequence, a multiple of twice the number of shares.

    Raises:
        ConfigError: the length is no such multiple, or too short for the slices.

    >>> tensor = torch.arange(8)[None]
    >>> share_sequence(tensor, Share(0, 2)).tolist(), share_sequence(tensor, Share(1, 2)).tolist()
    ([[0, 1, 6, 7]], [[2, 3, 4, 5]])
    >>> share_sequence(tensor, Share(0, 2, lengths=(1, 1))).tolist()
    [[0, 3, 4, 7]]
    """
    if share.count == 1:
        return tensor
    length, parts, slices = tensor.shape[dim], 2 * share.count, len(share.lengths)
    if length % parts:
        raise ConfigError(
            f"a sequence of {length} positions cannot be shared by {share.count} positions of the mesh, each "
            f"with a head and a tail: pad it to a multiple of {parts}"
        )
    in_slices = slices_of(tensor, share.lengths, dim, parts)
    if not all(part.shape[dim] for part in in_slices):
        raise ConfigError(
            f"a sequence of {length} positions cannot be cut in {slices} slices, each shared by "
            f"{share.count} positions of the mesh with a head and a tail: take fewer slices, or longer "
            "sequences"
        )
    chunks = [part.chunk(parts, dim) for part in in_slices]
    part = torch.cat([of_slice[number] for of_slice in chunks for number in chunks_of(share)], dim)
    setattr(part, _SEQUENCES, tensor)
    return part


def sequences_of(part: Tensor) -> Tensor | None:
    """Whole sequences of which ``share_sequence`` made a part; None: it did not, or its result was copied.

    >>> tensor = torch.arange(8)[None]
    >>> sequences_of(share_sequence(tensor, Share(0, 2))) is tensor, sequences_of(tensor)
    (True, None)
    """
    return getattr(part, _SEQUENCES, None)


def join_sequence(shares: Sequence[Tensor], dim: int = 1, lengths: Sequence[int] = (1,)) -> Tensor:
    """Return whole sequences of all their shares, the inverse of ``share_sequence``.

    Args:
        shares: shares of all positions, by number.
        dim: dimension of the sequence.
        lengths: relative lengths of its slices, ``pipeline.context.lengths``.

    >>> join_sequence([torch.tensor([[0, 1, 6, 7]]), torch.tensor([[2, 3, 4, 5]])]).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    >>> join_sequence([torch.tensor([[0, 3, 4, 7]]), torch.tensor([[1, 2, 5, 6]])], lengths=(1, 1)).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    if len(shares) == 1:
        return shares[0]
    chunks: list[Tensor] = []
    for of_slice in zip(*(slices_of(share, lengths, dim, MULTIPLE) for share in shares), strict=True):
        halves = [share.chunk(2, dim) for share in of_slice]
        chunks += [head for head, _ in halves] + [tail for _, tail in reversed(halves)]
    return torch.cat(chunks, dim)


def chunks_of(share: Share) -> tuple[int, int]:
    """Numbers of the two chunks of a share.

    >>> chunks_of(Share(0, 2)), chunks_of(Share(1, 2))
    ((0, 3), (1, 2))
    """
    return share.number, 2 * share.count - 1 - share.number


def positions_of_share(length: int, share: Share, device: torch.device | None = None) -> Tensor:
    """Numbers, in the whole sequence, of the positions of a share.

    Args:
        length: positions of the share.
        share: the share.
        device: device of the result.

    >>> positions_of_share(4, Share(1, 2)).tolist(), positions_of_share(4, Share(0, 2)).tolist()
    ([2, 3, 4, 5], [0, 1, 6, 7])
    """
    return share_sequence(torch.arange(length * share.count, device=device), share, 0)


def gathered(tensor: Tensor, context: Context, dim: int) -> Tensor:
    """Whole sequences of the shares at all positions, with gradients; all positions call it.

    Args:
        tensor: this position's share.
        context: the positions.
        dim: dimension of the sequence.
    """
    shares: Sequence[Tensor] = _Gather.apply(tensor, context.group)  # type: ignore[no-untyped-call]
    return join_sequence(shares, dim, context.share.lengths)


def gather_shares(tensor: Tensor, group: Any) -> list[Tensor]:
    """Tensors of all positions of a group, of one shape, in the order of its ranks."""
    shares = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(shares, tensor.contiguous(), group=group)
    return shares


def sum_shares(gradients: Sequence[Tensor], group: Any) -> Tensor:
    """Sum, over the positions of a group, of their gradients of this position's tensor, in rank order.

    Args:
        gradients: this position's gradients of the tensors at all positions.
        group: the group.
    """
    # A list of every position's part, so that no backend needs a reduce-scatter.
    send = [gradient.contiguous() for gradient in gradients]
    receive = [torch.empty_like(gradient) for gradient in send]
    dist.all_to_all(receive, send, group=group)
    total = receive[0].to(torch.promote_types(receive[0].dtype, torch.float32))
    for part in receive[1:]:
        total = total + part
    return total.to(receive[0].dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(gather_shares(tensor, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_shares(gradients, ctx.group), None
