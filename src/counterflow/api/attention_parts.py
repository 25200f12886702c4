"""Attention to parts of a sequence's keys, whose outputs are merged by their log-sum-exps.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .torch_internals import FLASH, FLASH_BACKWARD


class SavedKeys(NamedTuple):
    """Keys of consecutive positions, as attention saves them for later slices.

    Attributes:
        key: [samples, key heads, positions, width].
        value: [samples, key heads, positions, width].
        documents: [samples, positions], numbers of documents.
        seen: [samples, positions], True if queries may attend to a position.
    """

    key: Tensor
    value: Tensor
    documents: Tensor | None = None
    seen: Tensor | None = None


class AttentionOptions(NamedTuple):
    """Options of ``cf.attend``, which documents them; masks are of the positions of the queries.

    Attributes:
        dropout: share of the attention weights that is dropped.
        scale: factor of the products; None: one over the square root of the width.
        window: number of positions that a position sees.
        documents: [samples, positions], numbers of documents.
        seen: [samples, positions], True if queries may attend to a position.
    """

    dropout: float = 0.0
    scale: float | None = None
    window: int | None = None
    documents: Tensor | None = None
    seen: Tensor | None = None

    def scale_of(self, queries: Tensor) -> float:
        """Factor of the products of queries and keys."""
        return 1 / math.sqrt(queries.shape[3]) if self.scale is None else self.scale


def visible(  # noqa: PLR0917
    queries: Tensor, start: int, first: int, part: SavedKeys, documents: Tensor | None, window: int | None
) -> Tensor:
    """Mask of the keys of a part, from position ``first`` on, that each query from ``start`` on sees.

    It is [positions, keys], or [samples, 1, positions, keys].
    """
    key, _, its_documents, seen = part
    at = torch.arange(start, start + queries.shape[2], device=queries.device)[:, None]
    ahead = at - torch.arange(first, first + key.shape[2], device=queries.device)
    mask = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    if documents is not None and its_documents is not None:
        mask = mask & (documents[:, None, :, None] == its_documents[:, None, None])
    return mask if seen is None else mask & seen[:, None, None].bool()


class KeyPart(NamedTuple):
    """Part of the keys that a slice's queries attend to.

    Attributes:
        key: of the part.
        value: of the part.
        causal: True for the slice's own keys.
        mask: further limit to the keys that each query sees; None: none.
    """

    key: Tensor
    value: Tensor
    causal: bool
    mask: Tensor | None

    def forward(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output of the queries for these keys, and its log-sum-exp, [..., positions]."""
        if self._by_kernel(queries):
            result: tuple[Tensor, Tensor] = FLASH(
                queries, self.key, self.value, 0.0, self.causal, attn_mask=None, scale=scale
            )
            return result
        scores = self._scores(queries, scale)
        total = scores.logsumexp(-1)
        weights = (scores - _finite(total)[..., None]).exp()
        return weights.to(self.value.dtype) @ self.value, total

    def backward(
        self, gradient: Tensor, queries: Tensor, output: Tensor, total: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, key and value, with the output and log-sum-exp over all parts."""
        if self._by_kernel(queries):
            gradients: tuple[Tensor, Tensor, Tensor] = FLASH_BACKWARD(
                gradient, queries, self.key, self.value, output, total, 0.0, self.causal,
                attn_mask=None, scale=scale,
            )  # fmt: skip
            return gradients
        weights = (self._scores(queries, scale) - _finite(total)[..., None]).exp()
        wide = gradient.to(weights.dtype)
        along = (wide * output.to(weights.dtype)).sum(-1, keepdim=True)
        scores = weights * (wide @ self.value.to(weights.dtype).mT - along) * scale
        scores = scores.to(queries.dtype)
        return scores @ self.key, scores.mT @ queries, weights.to(gradient.dtype).mT @ gradient

    def _by_kernel(self, queries: Tensor) -> bool:
        if self.mask is not None or queries.device.type != "cpu":
            return False
        return all(tensor.stride(-1) == 1 for tensor in (queries, self.key, self.value))

    def _scores(self, queries: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(queries.dtype, torch.float32)
        scores = (queries @ self.key.mT).to(wide) * scale
        mask = self.mask
        if mask is None and self.causal:
            mask = visible(queries, 0, 0, SavedKeys(self.key, self.value), None, None)
        return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def key_part(  # noqa: PLR0917
    queries: Tensor,
    start: int,
    first: int,
    saved: SavedKeys,
    documents: Tensor | None,
    window: int | None,
    *,
    causal: bool,
) -> KeyPart | None:
    """Keys from position ``first`` on as queries from ``start`` on see them; None: beyond their window.

    Args:
        queries: [samples, heads, positions, width].
        start: position of the first query in the sequence.
        first: position of the first key.
        saved: the keys, with their values, documents and what is seen.
        documents: [samples, positions], numbers of the queries' documents.
        window: number of positions that a position sees.
        causal: True for the keys of the queries' own positions.
    """
    key, value, _, seen = saved
    inside = window is None or start + queries.shape[2] - window <= first
    if window is not None and not inside and first + key.shape[2] - 1 <= start - window:
        return None
    unmasked = inside and documents is None and seen is None
    mask = None if unmasked else visible(queries, start, first, saved, documents, window)
    return KeyPart(key, value, causal, mask)


def head_of_group(tensor: Tensor, group: int, groups: int) -> Tensor:
    """One head of each group that shares a key head: [samples, key heads, ...]."""
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups))[:, :, group]


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output of queries for all keys, and its log-sum-exp, of those for parts of the keys."""
    if len(parts) == 1:
        return parts[0]
    total = torch.stack([sums for _, sums in parts]).logsumexp(0)
    output = sum(out * (sums - _finite(total)).exp()[..., None] for out, sums in parts)
    return output, total  # type: ignore[return-value]


def _finite(total: Tensor) -> Tensor:
    return total.masked_fill(total == -math.inf, 0.0)  # of nothing: its terms are to be 0
