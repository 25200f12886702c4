"""Shares of tokens that several positions of a mesh have: each sends its share to the experts.

Invariant: the positions have equal tokens and equal gradients of the result, as with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class TokenShare(NamedTuple):
    """Share of tokens of one of the positions that have the same tokens, which send one share each.

    Attributes:
        group: group of these positions.
        tokens: number of tokens.
        first: first token of the share.
        end: token after the last one.
    """

    group: Any
    tokens: int
    first: int
    end: int

    @classmethod
    def of(cls, group: Any, count: int) -> TokenShare:
        """Share of this position of ``count`` tokens; the last ones may be shorter."""
        size = -(-count // dist.get_world_size(group))
        first = min(count, size * dist.get_rank(group))
        return cls(group, count, first, min(count, first + size))

    def part(self, rows: Tensor) -> Tensor:
        """Rows of the share, of those of all tokens; the backward gathers their gradients."""
        return cast("Tensor", _Part.apply(rows, self))  # type: ignore[no-untyped-call]

    def all_tokens(self, rows: Tensor) -> Tensor:
        """Rows of all tokens, gathered of those of the shares; the backward takes the share's gradient."""
        return cast("Tensor", _AllTokens.apply(rows, self))  # type: ignore[no-untyped-call]

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows of all tokens, without a graph."""
        positions = dist.get_world_size(self.group)
        size = -(-self.tokens // positions)
        sent = rows.new_zeros(size, *rows.shape[1:])
        sent[: rows.shape[0]] = rows
        received = [torch.empty_like(sent) for _ in range(positions)]
        dist.all_gather(received, sent, group=self.group)
        return torch.cat(received)[: self.tokens]


SAME_TOKENS = ContextVar[Any]("same_tokens", default=None)
"""Group of the positions that have the same tokens, while a module of experts runs; None: only this one."""


@contextmanager
def same_tokens(group: Any) -> Iterator[None]:
    """Context in which positions with the same tokens dispatch a share of them each.

    Args:
        group: group of the positions that have the same tokens; all of them divide the experts.
    """
    token = SAME_TOKENS.set(group)
    try:
        yield
    finally:
        SAME_TOKENS.reset(token)


class Rehearsal:
    """Run of a module of experts in which no token leaves its position.

    Tokens of another position's expert go to the local one with the same place.

    Args:
        positions: number of positions that divide the experts.

    Attributes:
        dispatches: number of times that tokens were dispatched.
    """

    def __init__(self, positions: int) -> None:
        self.positions, self.dispatches = positions, 0

    def numbers(self, choices: Tensor, experts: int) -> tuple[Tensor, int]:
        """Numbers of the local experts for choices among all, -1 for none; and how many are local."""
        self.dispatches += 1
        local = experts // self.positions
        return (choices % local).where((choices >= 0) & (choices < experts), -1), local


REHEARSAL = ContextVar[Rehearsal | None]("rehearsal", default=None)
"""The rehearsal that runs now; None: tokens are exchanged."""


@contextmanager
def rehearsing(positions: int) -> Iterator[Rehearsal]:
    """Context of a rehearsal; argument as of ``Rehearsal``."""
    rehearsal = Rehearsal(positions)
    token = REHEARSAL.set(rehearsal)
    try:
        yield rehearsal
    finally:
        REHEARSAL.reset(token)


class _Part(torch.autograd.Function):
    """Rows of a share of tokens; the backward gathers the gradients of all shares."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: TokenShare) -> Tensor:
        ctx.share = share
        return rows[share.first : share.end].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.share.gathered(gradient), None


class _AllTokens(torch.autograd.Function):
    """Rows of all tokens. Gradients are the same at all positions: the backward takes the share's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: TokenShare) -> Tensor:
        ctx.share = share
        return share.gathered(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.share.first : ctx.share.end], None
