"""A layer whose sequences are shared by positions of the mesh, and what they gather for its attention.

Each position has a head and a tail of every sequence, so all have the same work in causal attention. Keys and
values are gathered in a forward and saved for the backward, which sums their gradients at their positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from counterflow.schedule.op import OpKind

from ..inputs.cluster import Collective
from ..inputs.model import Model
from ..inputs.profile import LayerProfile
from .tensor_parallel import of_fewer

_DIVIDED = (
    "kept_bytes",
    "kept_input_bytes",
    "kept_output_bytes",
    "kept_gradient_bytes",
    "kept_output_gradient_bytes",
    "kept_anyway_bytes",
    "held_input_bytes",
    "weight_gradients_peak_bytes",
)
_WITH_KEYS = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "input_gradient_peak_bytes")


def of_context(layer: LayerProfile, positions: int, gather: Collective) -> LayerProfile:
    """The layer of one of the positions that share sequences.

    Args:
        layer: the layer of a whole sequence.
        positions: C, 1 or more.
        gather: cost of an all-gather over them, and of a reduce-scatter.

    >>> from counterflow.planning.inputs.layer_parts import Contexts
    >>> whole = LayerProfile((1.0,), (8.0,), (16.0,), (100.0,), 40.0, 10.0, contexts=Contexts(12.0))
    >>> half = of_context(whole, 2, Collective(latency_seconds=0.5, seconds_per_byte=0.25))
    >>> half.forward_seconds, half.backward_seconds, half.saved(1)  # 4 + 2·0.5 + 12/4, and 50 + 12/2
    ((8.0,), (12.0,), 56.0)
    """
    if positions == 1:
        return layer
    lines, sizes = layer.lines(), layer.samples
    keys = 0.0 if layer.contexts is None else layer.contexts.gathered_bytes
    exchange = [0.0] * len(sizes)
    if layer.contexts is not None:
        exchange = [
            2 * gather.latency_seconds + gather.seconds_per_byte * keys * n + layer.contexts.overhead_seconds
            for n in sizes
        ]

    def seconds(kind: OpKind, *, exchanges: bool) -> tuple[float, ...]:
        line, fixed = lines[kind], layer.fixed_share
        return tuple(
            fixed * line.at(n) + (1 - fixed) * of_fewer(line, n / positions) + (more if exchanges else 0.0)
            for n, more in zip(sizes, exchange, strict=True)
        )

    def smaller(name: str, more: float = 0.0) -> tuple[float, ...]:
        amounts = getattr(layer, name)
        rows = zip(sizes, amounts, strict=True) if amounts else ()
        return tuple(amount / positions + more * n for n, amount in rows)

    remote = keys * (1 - 1 / positions)  # keys and values of other positions
    amounts: dict[str, Any] = {name: smaller(name) for name in _DIVIDED}
    amounts |= {name: smaller(name, remote) for name in _WITH_KEYS}
    experts = layer.experts
    return replace(
        layer,
        forward_seconds=seconds(OpKind.FORWARD, exchanges=True),
        backward_seconds=seconds(OpKind.BACKWARD, exchanges=True),
        input_gradient_seconds=seconds(OpKind.INPUT_GRADIENT, exchanges=True),
        weight_gradients_seconds=seconds(OpKind.WEIGHT_GRADIENTS, exchanges=False),
        output_bytes=layer.output_bytes / positions,
        state_bytes=layer.state_bytes / positions,
        experts=experts and replace(experts, sent_bytes=experts.sent_bytes / positions),
        **amounts,
    )


def context_model(model: Model, positions: int) -> Model:
    """The model whose inputs and skip connections are shares of sequences."""
    if positions == 1:
        return model
    skips = tuple(replace(skip, size_bytes=skip.size_bytes / positions) for skip in model.skips)
    return replace(model, input_bytes=model.input_bytes / positions, skips=skips)
