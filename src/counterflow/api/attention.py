"""Causal attention of a slice to itself and to the slices before it, without putting these together.

The softmax of each part is merged by its log-sum-exp, and the backward goes through the parts with that of
the whole (as Ring Attention's and FlashAttention's does). So keys and values of earlier slices are saved
once, where they were made, however many slices look at them.

Source: Dao, FlashAttention-2 (arXiv 2307.08691) section 3.1; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..errors import ConfigError
from .attention_parts import KeyPart, SavedKeys, head_of_group, key_part, merged, visible
from .carry import Carry
from .contexts import Context, chunks_of, gathered
from .ring_attention import ring_attention


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
    if carry.context is not None:
        output: Tensor = carry._uncompiled(attend_share, carry.context, queries, keys, values, *options)  # noqa: SLF001
    elif carry.expects_slices:
        output = carry._uncompiled(_attend, carry, queries, keys, values, *options)  # noqa: SLF001
    else:
        output = _attend(carry, queries, keys, values, *options)
    return output


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
    before: tuple[SavedKeys, ...] = carry.take(())
    parts = (*before, (keys, values, documents, seen))
    carry.leave((_joined(parts),) if carry.joins else parts)
    return _attend_parts(queries, parts, dropout, scale, window)


def attend_share(  # noqa: PLR0917
    context: Context,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Causal attention of a share of a sequence to the sequence; arguments as of ``attend``, of this share.

    Args:
        context: positions of the mesh that share the sequence.
        queries: [samples, heads, positions, width].
        keys: [samples, key heads, positions, width].
        values: [samples, key heads, positions, width].
        dropout: share of the attention weights that is dropped.
        scale: factor of the products.
        window: number of positions that a position sees.
        documents: [samples, positions], numbers of documents in the whole sequence.
        seen: [samples, positions], True if queries may attend to a position.

    Returns:
        [samples, heads, positions, width].
    """
    whole_documents = None if documents is None else gathered(documents, context, 1)
    whole_seen = None if seen is None else gathered(seen.to(torch.uint8), context, 1).bool()
    if context.ring and not dropout:
        return ring_attention(context, queries, keys, values, scale, window, whole_documents, whole_seen)
    whole_keys, whole_values = gathered(keys, context, 2), gathered(values, context, 2)
    length = queries.shape[2] // 2
    outputs = []
    for queries_of_chunk, chunk in zip(queries.chunk(2, 2), chunks_of(context.share), strict=True):
        bounds = [(0, chunk * length), (chunk * length, (chunk + 1) * length)]
        parts = [
            (
                whole_keys[:, :, first:end],
                whole_values[:, :, first:end],
                None if whole_documents is None else whole_documents[:, first:end],
                None if whole_seen is None else whole_seen[:, first:end],
            )
            for first, end in bounds
            if first < end
        ]
        outputs.append(_attend_parts(queries_of_chunk, parts, dropout, scale, window))
    return torch.cat(outputs, 2)


def _attend_parts(
    queries: Tensor, parts: Sequence[SavedKeys], dropout: float, scale: float | None, window: int | None
) -> Tensor:
    """Attention to earlier parts and, causally, to the last part, which is that of the queries."""
    before, (keys, values, documents, seen) = parts[:-1], parts[-1]
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
            masks.append(visible(queries, start, first, part, documents, window))
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


def _joined(parts: Sequence[SavedKeys]) -> SavedKeys:
    keys, values, documents, seen = zip(*parts, strict=True)

    def along(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim) if len(present) == len(tensors) else None

    return torch.cat(keys, 2), torch.cat(values, 2), along(documents, 1), along(seen, 1)


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
            queries_of_group = head_of_group(queries, group, groups)
            out, sums = merged([part.forward(queries_of_group, scale) for _, part in parts])
            head_of_group(output, group, groups).copy_(out)
            head_of_group(total, group, groups).copy_(sums)
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
                head_of_group(tensor, group, groups) for tensor in (queries, gradient, output, total)
            )
            for number, part in parts:
                query_gradient, key, value = part.backward(
                    gradient_of_group, queries_of_group, out, sums, ctx.scale
                )
                head_of_group(of_queries, group, groups).add_(query_gradient)
                for place, its_gradient in ((number, key), (number + 1, value)):
                    earlier = gradients[place]
                    gradients[place] = its_gradient if earlier is None else earlier.add_(its_gradient)
        return None, None, of_queries, *gradients


def _parts(queries: Tensor, flat: Sequence[Tensor | None], window: int | None) -> list[tuple[int, KeyPart]]:
    lefts: list[Any] = [flat[place : place + 4] for place in range(0, len(flat), 4)]
    documents = lefts[-1][2]
    start = sum(key.shape[2] for key, *_ in lefts[:-1])
    parts, first = [], 0
    for number, saved in enumerate(lefts):
        is_last = number == len(lefts) - 1
        part = key_part(queries, start, first, saved, documents, window, causal=is_last)
        if part is not None:
            parts.append((4 * number, part))
        first += saved[0].shape[2]
    return parts
