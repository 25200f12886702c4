"""Causal attention of a share of a slice to the keys of its sequence, of which each position has a share.

Keys and values of all slices so far are gathered, or go around the positions of the mesh; both again in the
backward, so that a position saves its own share alone. Outputs for parts of the keys are merged by their
log-sum-exps. Gradients of keys and values return to the position that has them.

Invariant: what is exchanged depends on lengths alone, so all positions exchange the same.

Source: Liu et al., Ring Attention (arXiv 2310.01889), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_parts import AttentionOptions, KeyPart, SavedKeys, head_of_group, key_part, merged
from .contexts import Context, Share, chunks_of, gather_shares, join_sequence, share_sequence, sum_shares


def shared_attention(
    context: Context, queries: Tensor, parts: Sequence[SavedKeys], options: AttentionOptions
) -> Tensor:
    """Causal attention of a slice's share; arguments and result as of ``attend_share``, without dropout."""
    count, window = context.share.count, options.window
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + count * part.key.shape[2])
    start = starts[-2]
    # No position exchanges a slice that is beyond the window of all queries.
    near = [window is None or end > start - window + 1 for end in starts[1:]]
    parts, starts = (
        [part for part, is_near in zip(parts, near, strict=True) if is_near],
        [first for first, is_near in zip(starts, near, strict=False) if is_near],
    )
    exchange = (_Ring if context.ring else _Gathering)(context, starts)
    masks = [part[2:] for part in parts]
    attention = _Attention(context.share, exchange, masks, start, options.scale_of(queries), window)
    flat = [tensor for part in parts for tensor in part[:2]]
    output: Tensor = _SharedAttention.apply(attention, queries, *flat)  # type: ignore[no-untyped-call]
    return output


class _Run(NamedTuple):
    """Keys of consecutive positions of one slice.

    Attributes:
        slice: number of the slice, among those that are visited.
        start: first position of the slice.
        place: first position of the run in the slice.
        key: [samples, key heads, positions, width].
        value: [samples, key heads, positions, width].
        gradients: sums of the gradients of key and value; empty: none are computed.
    """

    slice: int
    start: int
    place: int
    key: Tensor
    value: Tensor
    gradients: Sequence[Tensor]


Visit = Callable[[Iterable[_Run]], None]


class _Exchange(Protocol):
    """Exchange of keys and values, [key, value, key of the next slice, ...], among positions."""

    def visit(self, shares: Sequence[Tensor], function: Visit) -> None:
        """Call a function with all keys of the sequence, run by run."""

    def differentiate(self, shares: Sequence[Tensor], function: Visit) -> list[Tensor]:
        """Call a function with all keys and sums of their gradients; return the gradients of the shares."""


class _Gathering:
    """All positions gather whole slices.

    Args:
        context: the positions.
        starts: first position of each slice.
    """

    def __init__(self, context: Context, starts: Sequence[int]) -> None:
        self._share, self._group, self._starts = context.share, context.group, starts

    def visit(self, shares: Sequence[Tensor], function: Visit) -> None:
        function(self._runs(self._slices(shares), [()] * len(self._starts)))

    def differentiate(self, shares: Sequence[Tensor], function: Visit) -> list[Tensor]:
        slices = self._slices(shares)
        gradients = [torch.zeros_like(tensor) for tensor in slices]
        function(self._runs(slices, list(zip(gradients[::2], gradients[1::2], strict=True))))
        count = self._share.count
        by_position = [
            _flat([share_sequence(tensor, Share(number, count), 2) for tensor in gradients])
            for number in range(count)
        ]
        return _unflat(sum_shares(by_position, self._group), shares)

    def _slices(self, shares: Sequence[Tensor]) -> list[Tensor]:
        by_position = [_unflat(flat, shares) for flat in gather_shares(_flat(shares), self._group)]
        return [join_sequence(shares_of_tensor, 2) for shares_of_tensor in zip(*by_position, strict=True)]

    def _runs(self, slices: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> Iterator[_Run]:
        for number, start in enumerate(self._starts):
            key, value = slices[2 * number : 2 * number + 2]
            yield _Run(number, start, 0, key, value, gradients[number])


class _Ring:
    """Shares go around the positions, so that none holds more than two; arguments as of ``_Gathering``."""

    def __init__(self, context: Context, starts: Sequence[int]) -> None:
        self._share, self._group, self._starts = context.share, context.group, starts

    def visit(self, shares: Sequence[Tensor], function: Visit) -> None:
        around = list(shares)
        for step in range(self._share.count):
            function(self._runs(step, around))
            if step < self._share.count - 1:
                around = self._send(around)

    def differentiate(self, shares: Sequence[Tensor], function: Visit) -> list[Tensor]:
        count = len(shares)
        gradients = [torch.zeros_like(share, memory_format=torch.contiguous_format) for share in shares]
        around = [*shares, *gradients]
        for step in range(self._share.count):
            function(self._runs(step, around[:count], around[count:]))
            # Gradients go on with keys and values, and are at home after the last exchange.
            around = self._send(around if step < self._share.count - 1 else around[count:])
        return around

    def _runs(self, step: int, shares: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> Iterator[_Run]:
        count = self._share.count
        chunks = chunks_of(Share((self._share.number - step) % count, count))
        for number, start in enumerate(self._starts):
            pair = slice(2 * number, 2 * number + 2)
            length = shares[pair.start].shape[2] // 2
            for place, chunk in enumerate(chunks):
                key, value, *sums = (
                    tensor.narrow(2, place * length, length) for tensor in (*shares[pair], *gradients[pair])
                )
                yield _Run(number, start, chunk * length, key, value, sums)

    def _send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        number, count = self._share.number, self._share.count
        ranks = dist.get_process_group_ranks(self._group)
        after, before = ranks[(number + 1) % count], ranks[(number - 1) % count]
        flat = _flat(tensors)
        received = torch.empty_like(flat)
        send = dist.P2POp(dist.isend, flat, after, self._group)
        receive = dist.P2POp(dist.irecv, received, before, self._group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return _unflat(received, tensors)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflat(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class _Part(NamedTuple):
    """Part of a run of keys that a chunk of the queries sees.

    Attributes:
        rows: positions of the chunk in the queries.
        keys: positions of the part in the run.
        part: keys and their mask.
        gradients: those of the run.
    """

    rows: slice
    keys: slice
    part: KeyPart
    gradients: Sequence[Tensor]


class _Attention(NamedTuple):
    """Attention of a share.

    Attributes:
        share: share of the queries.
        exchange: exchange of keys and values.
        masks: documents and what is seen of each slice that is visited.
        start: first position of the slice of the queries.
        scale: factor of the products.
        window: number of positions that a position sees.
    """

    share: Share
    exchange: _Exchange
    masks: Sequence[Sequence[Tensor | None]]
    start: int
    scale: float
    window: int | None

    def parts(self, queries: Tensor, runs: Iterable[_Run]) -> Iterator[_Part]:
        """Parts of keys that the queries see: those before a chunk of queries, and its own."""
        length = queries.shape[2] // 2
        for run in runs:
            first_of_run = run.start + run.place
            end_of_run = first_of_run + run.key.shape[2]
            for place, chunk in enumerate(chunks_of(self.share)):
                start, rows = self.start + chunk * length, slice(place * length, (place + 1) * length)
                bounds = (
                    (first_of_run, min(end_of_run, start)),
                    (max(first_of_run, start), min(end_of_run, start + length)),
                )
                for first, end in bounds:
                    if first < end:
                        keys = slice(first - first_of_run, end - first_of_run)
                        part = self._part(queries[:, :, rows], start, chunk * length, run, keys)
                        if part is not None:
                            yield _Part(rows, keys, part, run.gradients)

    def _part(self, queries: Tensor, start: int, place: int, run: _Run, keys: slice) -> KeyPart | None:
        first, last = run.place + keys.start, run.place + keys.stop
        masks = (None if mask is None else mask[:, first:last] for mask in self.masks[run.slice])
        saved = SavedKeys(run.key[:, :, keys], run.value[:, :, keys], *masks)
        documents, first = self.masks[-1][0], run.start + first
        if documents is not None:
            documents = documents[:, place : place + queries.shape[2]]
        return key_part(queries, start, first, saved, documents, self.window, causal=first == start)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: _Attention, queries: Tensor, *shares: Tensor) -> Tensor:
        groups = queries.shape[1] // shares[0].shape[1]
        samples, heads, positions, width = queries.shape
        wide = torch.promote_types(queries.dtype, torch.float32)
        # With the heads beside each other, as the projection after it takes them: it then saves no copy.
        sums = queries.new_zeros(samples, positions, heads, width, dtype=wide).transpose(1, 2)
        total = queries.new_full(queries.shape[:3], -math.inf, dtype=wide)

        def visit(runs: Iterable[_Run]) -> None:
            for rows, _, part, _ in attention.parts(queries, runs):
                for group in range(groups):
                    queries_of_group, out, logarithm = (
                        head_of_group(tensor[:, :, rows], group, groups) for tensor in (queries, sums, total)
                    )
                    results = [(out, logarithm), part.forward(queries_of_group, attention.scale)]
                    for target, result in zip((out, logarithm), merged(results), strict=True):
                        target.copy_(result)

        attention.exchange.visit(shares, visit)
        output = sums.to(queries.dtype)
        ctx.save_for_backward(queries, output, total, *shares)
        ctx.attention = attention
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        queries, output, total, *shares = ctx.saved_tensors
        attention: _Attention = ctx.attention
        groups = queries.shape[1] // shares[0].shape[1]
        of_queries = torch.zeros_like(queries, memory_format=torch.contiguous_format)

        def visit(runs: Iterable[_Run]) -> None:
            for rows, keys, part, (of_key, of_value) in attention.parts(queries, runs):
                for group in range(groups):
                    upstream, queries_of_group, out, logarithm, of_group = (
                        head_of_group(tensor[:, :, rows], group, groups)
                        for tensor in (gradient, queries, output, total, of_queries)
                    )
                    query_gradient, key, value = part.backward(
                        upstream, queries_of_group, out, logarithm, attention.scale
                    )
                    of_group.add_(query_gradient)
                    of_key[:, :, keys] += key
                    of_value[:, :, keys] += value

        return None, of_queries, *attention.exchange.differentiate(shares, visit)
