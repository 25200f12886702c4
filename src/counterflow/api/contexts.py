"""Sequences that several positions of the mesh share: context parallelism.

A sequence of S positions is cut in 2n chunks; position p of n has chunks p and 2n - 1 - p, its head and its
tail, so that all have as much work in causal attention.

::

    n = 2:   chunk 0 | chunk 1 | chunk 2 | chunk 3
             p = 0     p = 1     p = 1     p = 0

Invariant: each position of a sequence is in one share, and shares are equally long.

Source: head-tail shares as in torch's ``_HeadTailLoadBalancer`` and Megatron-LM's context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
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
    """

    number: int
    count: int


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


CONTEXT: ContextVar[Context | None] = ContextVar("counterflow_context", default=None)
"""Context of the loss function that runs; None: it is given whole sequences."""


def share_sequence(tensor: Tensor, share: Share, dim: int = 1) -> Tensor:
    """Return the head and the tail of each sequence that one of ``share.count`` positions has.

    Args:
        tensor: whole sequences; labels are shifted before.
        share: share of the position, ``pipeline.context``.
        dim: dimension of the sequence, a multiple of twice the number of shares.

    Raises:
        ConfigError: the length is no such multiple.

    >>> tensor = torch.arange(8)[None]
    >>> share_sequence(tensor, Share(0, 2)).tolist(), share_sequence(tensor, Share(1, 2)).tolist()
    ([[0, 1, 6, 7]], [[2, 3, 4, 5]])
    """
    if share.count == 1:
        return tensor
    length, parts = tensor.shape[dim], 2 * share.count
    if length % parts:
        raise ConfigError(
            f"a sequence of {length} positions cannot be shared by {share.count} positions of the mesh, each "
            f"with a head and a tail: pad it to a multiple of {parts}"
        )
    chunks = tensor.chunk(parts, dim)
    return torch.cat([chunks[share.number], chunks[parts - 1 - share.number]], dim)


def join_sequence(shares: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Return whole sequences of all their shares, the inverse of ``share_sequence``.

    Args:
        shares: shares of all positions, by number.
        dim: dimension of the sequence.

    >>> join_sequence([torch.tensor([[0, 1, 6, 7]]), torch.tensor([[2, 3, 4, 5]])]).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    if len(shares) == 1:
        return shares[0]
    halves = [share.chunk(2, dim) for share in shares]
    return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)


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
    return join_sequence(shares, dim)


class _Gather(torch.autograd.Function):
    """Tensors of all positions; the backward adds up the gradients of this position's one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group, ctx.shape, ctx.dtype = group, tensor.shape, tensor.dtype
        size = dist.get_world_size(group)
        shares = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(shares, tensor.contiguous(), group=group)
        return tuple(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A list of every position's part, so that no backend needs a reduce-scatter; sums are in rank order.
        send = [gradient.contiguous() for gradient in gradients]
        receive = [torch.empty_like(gradient) for gradient in send]
        dist.all_to_all(receive, send, group=ctx.group)
        total = receive[0].to(torch.promote_types(ctx.dtype, torch.float32))
        for part in receive[1:]:
            total = total + part
        return total.to(ctx.dtype), None
