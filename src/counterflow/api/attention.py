"""Causal attention of a slice to itself and to the slices before it, without putting these together.

The softmax of each part is merged by its log-sum-exp, and the backward goes through the parts with that of
the whole (as Ring Attention's and FlashAttention's does). So keys and values of earlier slices are saved
once, where they were made, however many slices look at them.

Source: Dao, FlashAttention-2 (arXiv 2307.08691) section 3.1; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..errors import ConfigError
from .attention_parts import (
    AttentionOptions,
    KeyPart,
    SavedKeys,
    head_of_group,
    key_part,
    merged,
    visible,
)
from .carry import Carry
from .contexts import MULTIPLE, Context, chunks_of, gathered, slices_of
from .shared_attention import shared_attention


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
    options = AttentionOptions(dropout, scale, window, documents, seen)
    run = _attend if carry.context is None else _attend_in_shares
    if carry.context is None and not carry.expects_slices:
        return run(carry, queries, keys, values, options)
    output: Tensor = carry._uncompiled(run, carry, queries, keys, values, options)  # noqa: SLF001
    return output


def _attend(carry: Carry, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    before: tuple[SavedKeys, ...] = carry.take(())
    parts = (*before, SavedKeys(keys, values, options.documents, options.seen))
    carry.leave((_joined(parts),) if carry.joins else parts)
    return _attend_parts(queries, parts, options)


def extended_keys(carry: Carry, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of earlier slices and of this one, concatenated; the carry passes them on.

    Args:
        carry: carry of the layer.
        keys: [samples, key heads, positions, width].
        values: [samples, key heads, positions, width].
    """
    heads = keys.shape[1]
    parts = (*(_with_heads(part, heads) for part in carry.take(())), SavedKeys(keys, values))
    if len(parts) == 1:
        carry.leave(parts)
        return keys, values
    all_keys = _joined(parts)
    carry.leave((all_keys,) if carry.joins else parts)
    return all_keys.key, all_keys.value


def _with_heads(part: SavedKeys, heads: int) -> SavedKeys:
    """Keys of a number of heads: layers may repeat each for a group of queries, and not for one token."""
    if part.key.shape[1] > heads:
        group = part.key.shape[1] // heads
        return part._replace(key=part.key[:, ::group], value=part.value[:, ::group])
    if part.key.shape[1] < heads:
        times = heads // part.key.shape[1]
        key, value = (tensor.repeat_interleave(times, 1) for tensor in part[:2])
        return part._replace(key=key, value=value)
    return part


def _attend_in_shares(
    carry: Carry, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    assert carry.context is not None
    lengths, context = carry.context.share.lengths, carry.context.of_slice()
    parts: tuple[SavedKeys, ...] = carry.take_of_share(())
    if carry.sliced or len(lengths) == 1:
        parts = (*parts, _with_sequence_masks(context, SavedKeys(keys, values, *options[3:])))
        carry.leave_of_share(parts)
        return attend_share(context, queries, parts, options)
    cut = [
        [None] * len(lengths) if tensor is None else slices_of(tensor, lengths, dim, MULTIPLE)
        for dim, tensor in ((2, keys), (2, values), (1, options.documents), (1, options.seen))
    ]
    outputs = []
    for queries_of_slice, *part in zip(slices_of(queries, lengths, 2, MULTIPLE), *cut, strict=True):
        parts = (*parts, _with_sequence_masks(context, SavedKeys(*part)))
        outputs.append(attend_share(context, queries_of_slice, parts, options))
    return torch.cat(outputs, 2)


def _with_sequence_masks(context: Context, part: SavedKeys) -> SavedKeys:
    documents = None if part.documents is None else gathered(part.documents, context, 1)
    seen = None if part.seen is None else gathered(part.seen.to(torch.uint8), context, 1).bool()
    return part._replace(documents=documents, seen=seen)


def attend_share(
    context: Context, queries: Tensor, parts: Sequence[SavedKeys], options: AttentionOptions
) -> Tensor:
    """Causal attention of a share of a slice to its sequence, up to the slice's end.

    Args:
        context: positions of the mesh that share the slice.
        queries: [samples, heads, positions, width], of the share.
        parts: keys of the shares of the slices so far, with masks of whole slices; the last one's are of
            the positions of the queries.
        options: options; the masks are those of ``parts``.

    Returns:
        [samples, heads, positions, width].
    """
    if not options.dropout:
        return shared_attention(context, queries, parts, options)
    slices = [
        part._replace(key=gathered(part.key, context, 2), value=gathered(part.value, context, 2))
        for part in parts
    ]
    length = queries.shape[2] // 2
    outputs = []
    for queries_of_chunk, chunk in zip(queries.chunk(2, 2), chunks_of(context.share), strict=True):
        bounds = [(0, chunk * length), (chunk * length, (chunk + 1) * length)]
        parts_of_slice = [_rows(slices[-1], first, end) for first, end in bounds if first < end]
        outputs.append(_attend_parts(queries_of_chunk, [*slices[:-1], *parts_of_slice], options))
    return torch.cat(outputs, 2)


def _rows(part: SavedKeys, first: int, end: int) -> SavedKeys:
    masks = (None if mask is None else mask[:, first:end] for mask in part[2:])
    return SavedKeys(part.key[:, :, first:end], part.value[:, :, first:end], *masks)


def _attend_parts(queries: Tensor, parts: Sequence[SavedKeys], options: AttentionOptions) -> Tensor:
    """Attention to earlier parts and, causally, to the last part, which is that of the queries."""
    before, (keys, values, documents, seen) = parts[:-1], parts[-1]
    dropout, window = options.dropout, options.window
    narrow = window is not None or documents is not None or seen is not None
    if not dropout and (before or narrow):
        flat = [tensor for part in parts for tensor in part]
        scale = options.scale_of(queries)
        output: Tensor = _ByParts.apply(scale, window, queries, *flat)  # type: ignore[no-untyped-call]
        return output
    mask = None
    if before or narrow:
        start = sum(part.key.shape[2] for part in before)
        masks, first = [], 0
        for part in parts:
            masks.append(visible(queries, start, first, part, documents, window))
            first += part.key.shape[2]
        mask = torch.cat(masks, -1)
        keys, values = (
            torch.cat([part.key for part in parts], 2),
            torch.cat([part.value for part in parts], 2),
        )
    return functional.scaled_dot_product_attention(
        queries, keys, values, mask, dropout, is_causal=mask is None, scale=options.scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )  # fmt: skip


def _joined(parts: Sequence[SavedKeys]) -> SavedKeys:
    keys, values, documents, seen = zip(*parts, strict=True)

    def along(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim) if len(present) == len(tensors) else None

    return SavedKeys(torch.cat(keys, 2), torch.cat(values, 2), along(documents, 1), along(seen, 1))


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
    slices = [SavedKeys(*flat[place : place + 4]) for place in range(0, len(flat), 4)]  # type: ignore[arg-type]
    documents = slices[-1].documents
    start = sum(saved.key.shape[2] for saved in slices[:-1])
    parts, first = [], 0
    for number, saved in enumerate(slices):
        is_last = number == len(slices) - 1
        part = key_part(queries, start, first, saved, documents, window, causal=is_last)
        if part is not None:
            parts.append((4 * number, part))
        first += saved.key.shape[2]
    return parts
