"""Causal attention of a slice to itself and to the slices before it, without putting these together.

The softmax of each part is merged by its log-sum-exp, and the backward goes through the parts with that of
the whole (as Ring Attention's and FlashAttention's does). So keys and values of earlier slices are saved
once, where they were made, however many slices look at them.

Source: Dao, FlashAttention-2 (arXiv 2307.08691) section 3.1; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..errors import ConfigError
from .carry import Carry
from .torch_internals import FLASH, FLASH_BACKWARD


def attend(
    carry: Carry,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Causal attention of a whole sequence, or of a slice to all earlier slices and to itself.

    The layer's ``Carry`` passes on the keys and values of earlier slices; this slice adds its own to it.

    Args:
        carry: carry of the layer.
        queries: [samples, heads, positions, width].
        keys: [samples, key heads, positions, width]; the heads are a multiple of the key heads.
        values: [samples, key heads, positions, width].
        dropout: share of the attention weights that is dropped. Above 0, each later slice concatenates and
            saves the keys and values of earlier slices.
        scale: factor of the products; None: one over the square root of the width.
        window: number of positions that a position sees, itself included; None: all earlier ones.
        documents: [samples, positions], numbers of the documents packed in a sequence, which do not attend
            to each other; None: one document. Numbers are those of the whole sequence, not of a slice.
        seen: [samples, positions], True if queries may attend to a position (False for padding); None: all
            True. A query without any key gives 0.

    Returns:
        [samples, heads, positions, width].

    Raises:
        ConfigError: documents or seen have another shape.
    """
    for name, mask in (("documents", documents), ("seen", seen)):
        if mask is not None and mask.shape != (queries.shape[0], queries.shape[2]):
            raise ConfigError(
                f"attend: {name} of shape {(*mask.shape,)} are to be of {queries.shape[0]} samples with "
                f"{queries.shape[2]} positions, as the queries are; give each slice its own part of them"
            )
    options = dropout, scale, window, documents, seen
    if carry.expects_slices:
        output: Tensor = carry._uncompiled(_attend, carry, queries, keys, values, *options)  # noqa: SLF001
        return output
    return _attend(carry, queries, keys, values, *options)


def _attend(  # noqa: PLR0917
    carry: Carry,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    dropout: float,
    scale: float | None,
    window: int | None,
    documents: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    before: tuple[_SavedKeys, ...] = carry.take(())
    parts = (*before, (keys, values, documents, seen))
    carry.leave((_joined(parts),) if carry.joins else parts)
    narrow = window is not None or documents is not None or seen is not None
    if not dropout and (before or narrow):
        flat = [tensor for part in parts for tensor in part]
        scale = 1 / math.sqrt(queries.shape[3]) if scale is None else scale
        output: Tensor = _ByParts.apply(scale, window, queries, *flat)  # type: ignore[no-untyped-call]
        return output
    mask = None
    if before or narrow:
        start = sum(part[0].shape[2] for part in before)
        masks, first = [], 0
        for part in parts:
            masks.append(_mask(queries, start, first, part, documents, window))
            first += part[0].shape[2]
        mask = torch.cat(masks, -1)
        keys, values = (
            torch.cat([key for key, *_ in parts], 2),
            torch.cat([value for _, value, *_ in parts], 2),
        )
    return functional.scaled_dot_product_attention(
        queries, keys, values, mask, dropout, is_causal=mask is None, scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )  # fmt: skip


def _joined(parts: Sequence[_SavedKeys]) -> _SavedKeys:
    keys, values, documents, seen = zip(*parts, strict=True)

    def along(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim) if len(present) == len(tensors) else None

    return torch.cat(keys, 2), torch.cat(values, 2), along(documents, 1), along(seen, 1)


_SavedKeys = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, documents and what is seen of a slice's positions."""


def _mask(  # noqa: PLR0917
    queries: Tensor, start: int, first: int, part: _SavedKeys, documents: Tensor | None, window: int | None
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


class _KeyPart(NamedTuple):
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
            mask = _mask(queries, 0, 0, (self.key, self.value, None, None), None, None)
        return scores if mask is None else scores.masked_fill(~mask, -math.inf)


class _ByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, window: int | None, queries: Tensor, *flat: Tensor | None) -> Tensor:
        parts = _parts(queries, flat, window)
        groups = queries.shape[1] // parts[0][1].key.shape[1]
        samples, heads, positions, width = queries.shape
        # With the heads beside each other, as the projection after it takes them: it then saves no copy.
        output = queries.new_empty(samples, positions, heads, width).transpose(1, 2)
        total = queries.new_empty(queries.shape[:3], dtype=torch.promote_types(queries.dtype, torch.float32))
        for group in range(groups):
            queries_of_group = _group(queries, group, groups)
            out, sums = _merged([part.forward(queries_of_group, scale) for _, part in parts])
            _group(output, group, groups).copy_(out)
            _group(total, group, groups).copy_(sums)
        ctx.save_for_backward(queries, output, total, *flat)
        ctx.scale, ctx.window = scale, window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        queries, output, total, *flat = ctx.saved_tensors
        parts = _parts(queries, flat, ctx.window)
        groups = queries.shape[1] // parts[0][1].key.shape[1]
        of_queries = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        gradients: list[Tensor | None] = [None] * len(flat)
        for group in range(groups):
            queries_of_group, gradient_of_group, out, sums = (
                _group(tensor, group, groups) for tensor in (queries, gradient, output, total)
            )
            for number, part in parts:
                query_gradient, key, value = part.backward(
                    gradient_of_group, queries_of_group, out, sums, ctx.scale
                )
                _group(of_queries, group, groups).add_(query_gradient)
                for place, its_gradient in ((number, key), (number + 1, value)):
                    earlier = gradients[place]
                    gradients[place] = its_gradient if earlier is None else earlier.add_(its_gradient)
        return None, None, of_queries, *gradients


def _group(tensor: Tensor, group: int, groups: int) -> Tensor:
    """One head of each group that shares a key head: [samples, key heads, ...]."""
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups))[:, :, group]


def _parts(queries: Tensor, flat: Sequence[Tensor | None], window: int | None) -> list[tuple[int, _KeyPart]]:
    lefts: list[Any] = [flat[place : place + 4] for place in range(0, len(flat), 4)]
    positions, documents = queries.shape[2], lefts[-1][2]
    start = sum(key.shape[2] for key, *_ in lefts[:-1])
    parts, first = [], 0
    for number, saved in enumerate(lefts):
        key, value, _, seen = saved
        count, is_own = key.shape[2], number == len(lefts) - 1
        inside = window is None or start + positions - window <= first
        if inside or first + count - 1 > start - window:
            unmasked = inside and documents is None and seen is None
            mask = None if unmasked else _mask(queries, start, first, saved, documents, window)
            parts.append((4 * number, _KeyPart(key, value, is_own, mask)))
        first += count
    return parts


def _merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    total = torch.stack([sums for _, sums in parts]).logsumexp(0)
    output = sum(out * (sums - _finite(total)).exp()[..., None] for out, sums in parts)
    return output, total  # type: ignore[return-value]


def _finite(total: Tensor) -> Tensor:
    """A log-sum-exp with 0 in place of that of nothing, whose terms are to be 0."""
    return total.masked_fill(total == -math.inf, 0.0)
