"""Causal attention of a share of a sequence, whose keys and values go around the positions of the mesh.

Invariant: no position holds more keys than those of two shares.

Source: Liu et al., Ring Attention (arXiv 2310.01889), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_parts import KeyPart, head_of_group, key_part, merged
from .contexts import Context, Share, chunks_of


def ring_attention(  # noqa: PLR0917
    context: Context,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None,
    documents: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    """Causal attention of a share, whose keys and values go around; outputs are merged by their log-sum-exps.

    Args:
        context: positions of the mesh that share the sequence.
        queries: [samples, heads, positions, width], of the share.
        keys: [samples, key heads, positions, width], of the share.
        values: [samples, key heads, positions, width], of the share.
        scale: factor of the products; None: one over the square root of the width.
        window: number of positions that a position sees.
        documents: [samples, all positions], numbers of documents.
        seen: [samples, all positions], True if queries may attend to a position.

    Returns:
        [samples, heads, positions, width].
    """
    scale = 1 / math.sqrt(queries.shape[3]) if scale is None else scale
    ring = _Ring(context, scale, window, documents, seen)
    output: Tensor = _RingAttention.apply(ring, queries, keys, values)  # type: ignore[no-untyped-call]
    return output


class _Ring(NamedTuple):
    context: Context
    scale: float
    window: int | None
    documents: Tensor | None
    seen: Tensor | None

    def parts(
        self, number: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Iterator[tuple[int, int, KeyPart]]:
        """Visible chunks of keys at a position: (number of the chunk of queries, of that of keys, part)."""
        count, length = self.context.share.count, queries.shape[2] // 2
        for place, chunk_of_queries in enumerate(chunks_of(self.context.share)):
            start = chunk_of_queries * length
            queries_of_chunk = queries[:, :, place * length : (place + 1) * length]
            documents = self._of_chunk(self.documents, start, length)
            for key_place, chunk in enumerate(chunks_of(Share(number, count))):
                if chunk > chunk_of_queries:
                    continue
                first, at = chunk * length, slice(key_place * length, (key_place + 1) * length)
                texts = self._of_chunk(self.documents, first, length)
                saved = keys[:, :, at], values[:, :, at], texts, self._of_chunk(self.seen, first, length)
                part = key_part(
                    queries_of_chunk, start, first, saved, documents, self.window,
                    causal=chunk == chunk_of_queries,
                )  # fmt: skip
                if part is not None:
                    yield place, key_place, part

    @staticmethod
    def _of_chunk(mask: Tensor | None, first: int, length: int) -> Tensor | None:
        return None if mask is None else mask[:, first : first + length]

    def exchange(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send tensors to the next position, and receive those of the one before."""
        group, share = self.context.group, self.context.share
        number, count = share.number, share.count
        ranks = dist.get_process_group_ranks(group)
        after, before = ranks[(number + 1) % count], ranks[(number - 1) % count]
        received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        sends = [dist.P2POp(dist.isend, tensor.contiguous(), after, group) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
        # Gloo pairs messages by their order, so all positions post in one order.
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        return received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        number, count = ring.context.share.number, ring.context.share.count
        groups, length = queries.shape[1] // keys.shape[1], queries.shape[2] // 2
        samples, heads, positions, width = queries.shape
        output = queries.new_empty(samples, positions, heads, width).transpose(1, 2)
        wide = torch.promote_types(queries.dtype, torch.float32)
        total = queries.new_full(queries.shape[:3], -math.inf, dtype=wide)
        output.zero_()
        around = [keys, values]
        for step in range(count):
            for place, _, part in ring.parts((number - step) % count, queries, *around):
                at = slice(place * length, (place + 1) * length)
                for group in range(groups):
                    queries_of_group = head_of_group(queries[:, :, at], group, groups)
                    out, sums = (
                        head_of_group(output[:, :, at], group, groups),
                        head_of_group(total[:, :, at], group, groups),
                    )
                    joined, joined_sums = merged(
                        [(out.to(wide), sums), part.forward(queries_of_group, ring.scale)]
                    )
                    out.copy_(joined)
                    sums.copy_(joined_sums)
            if step < count - 1:
                around = ring.exchange(around)
        ctx.save_for_backward(queries, keys, values, output, total)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        queries, keys, values, output, total = ctx.saved_tensors
        ring: _Ring = ctx.ring
        number, count = ring.context.share.number, ring.context.share.count
        groups, length = queries.shape[1] // keys.shape[1], queries.shape[2] // 2
        of_queries = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        around = [keys, values, torch.zeros_like(keys), torch.zeros_like(values)]
        for step in range(count):
            of_keys, of_values = around[2:]
            for place, key_place, part in ring.parts((number - step) % count, queries, *around[:2]):
                at = slice(place * length, (place + 1) * length)
                key_at = slice(key_place * length, (key_place + 1) * length)
                for group in range(groups):
                    queries_of_group, of_output, out, sums = (
                        head_of_group(t[:, :, at], group, groups) for t in (queries, gradient, output, total)
                    )
                    query_gradient, key, value = part.backward(
                        of_output, queries_of_group, out, sums, ring.scale
                    )
                    head_of_group(of_queries[:, :, at], group, groups).add_(query_gradient)
                    of_keys[:, :, key_at] += key
                    of_values[:, :, key_at] += value
            # Their gradients go on with keys and values, and are at home after the last exchange.
            around = ring.exchange(around if step < count - 1 else around[2:])
        return None, of_queries, *around
