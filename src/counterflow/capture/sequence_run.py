"""Runs of a captured layer on slices of a sequence, or on its tokens one after another.

Context tensors are computed for the whole sequence so far, and narrowed to the slice's positions. Attention
gets the keys and values of earlier slices from a ``Carry``, and leaves them with its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from counterflow.api.attention import attend, extended_keys
from counterflow.api.carry import Carry
from counterflow.errors import ConfigError

from .layer_contents import SequenceSteps
from .placeholders import Around
from .record import ATTENTION, AttentionCall, RecordedCall


def run_step(step: RecordedCall, around: Around) -> None:
    """Run a step, and add its tensors to the values around it.

    Raises:
        ConfigError: it returns another number of values than for the example.
    """
    args, named = step.takes.filled(around)
    call: Any = step.function if step.module is None else around.members[step.module]
    if step.within is None:
        result = call(*args, **named)
    else:
        with step.within.replayed(around.device):
            result = call(*args, **named)
    leaves = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
    if len(leaves) != step.leaves:
        raise ConfigError(
            f"{step.module or call} returns {len(leaves)} values, but returned {step.leaves} for the "
            "example that the layers were found with; find them with an example of this kind"
        )
    for index, ref in step.gives:
        around.values[ref] = leaves[index]


def run_sequence(sequence: SequenceSteps, around: Around, carries: Sequence[Carry]) -> None:
    """Run a layer's steps on a slice, and add their tensors to the values around them.

    Args:
        sequence: the steps.
        around: values that fill placeholders, for the slice.
        carries: carries of the layer: of its positions, and of each call of attention.
    """
    values = around.values
    length = around.sizes[sequence.length]
    start, before = carries[0].take((0, ()))
    inputs = [values[ref] for ref in sequence.inputs]
    if before:
        inputs = [torch.cat(pair, 1) for pair in zip(before, inputs, strict=True)]
    total = start + length
    carries[0].leave((total, tuple(inputs)))
    context = dict(zip(sequence.inputs, inputs, strict=True))
    for step in sequence.context:
        run_step(step, around._replace(values=context, sizes={**around.sizes, sequence.length: total}))
    for ref, dims in sequence.dims.items():
        values[ref] = context[ref].narrow(dims[0], start, length) if dims and start else context[ref]
    attention = deque(carries[1:])
    part = sequence.part
    for step, calls, frees in zip(part.steps, sequence.attentions, part.frees, strict=True):
        if calls:
            with CarriedAttention(step, calls, [attention.popleft() for _ in calls]):
                run_step(step, around)
        else:
            run_step(step, around)
        for ref in frees:
            values.pop(ref, None)


class CarriedAttention(TorchFunctionMode):
    """Lets the calls of attention in a step see earlier slices.

    Args:
        step: the step.
        calls: its calls of attention, in order.
        carries: carry of each.
    """

    def __init__(self, step: RecordedCall, calls: Sequence[AttentionCall], carries: Sequence[Carry]) -> None:
        super().__init__()
        self._step, self._calls = step, deque(zip(calls, carries, strict=True))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A call of torch."""
        del types
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") != ATTENTION:
            return func(*args, **kwargs)
        if not self._calls:
            raise self._refusal("calls attention more often than before")
        call, carry = self._calls.popleft()
        return self._attention(call, carry, *args, **kwargs)

    def _attention(  # noqa: PLR0917 - torch's own
        self,
        call: AttentionCall,
        carry: Carry,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del is_causal  # which models leave out for a token alone
        if call.masked != (attn_mask is not None):
            raise self._refusal("calls attention with a mask, or without one, otherwise than before")
        queries, positions = query.shape[2], key.shape[2]
        if attn_mask is None and queries == positions and query.shape[-1] == value.shape[-1]:
            return attend(carry, query, key, value, dropout=dropout_p, scale=scale)
        keys, values = extended_keys(carry, key, value)
        total = keys.shape[2]
        if attn_mask is not None and attn_mask.shape[-1] != total:
            raise self._refusal(f"has attention with a mask of {attn_mask.shape[-1]} of {total} positions")
        if attn_mask is None and positions > 1:  # else the queries of a group of heads, of one position
            if queries != positions:
                raise self._refusal(f"has attention of {queries} positions to {positions}")
            rows = torch.ones(positions, total, dtype=torch.bool, device=query.device)
            attn_mask = rows.tril(total - positions)
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )

    def _refusal(self, what: str) -> ConfigError:
        path = self._step.module if self._step.module is not None else self._step.inside
        return ConfigError(
            f"{path!r} {what}, so its state between slices and tokens is not known; train whole sequences"
        )
