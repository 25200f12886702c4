"""A layer whose routed experts are divided over positions of the mesh, and the exchanges of their tokens.

Every position sends its tokens to those of their experts and receives as many in the average, so an uneven
load makes the position with the most tokens, for which all others wait, slower by ``Experts.load``. Positions
of tensor parallelism have the same tokens; if they divide experts, each sends a share, and outputs are
gathered in a forward, gradients of the tokens in a backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from counterflow.schedule.op import OpKind

from ..inputs.cluster import Collective
from ..inputs.layer_parts import Experts
from ..inputs.profile import LayerProfile
from .tensor_parallel import of_fewer

_SAVED = ("saved_bytes", "kept_bytes")
_PEAKS = (
    "forward_peak_bytes",
    "backward_peak_bytes",
    "input_gradient_peak_bytes",
    "weight_gradients_peak_bytes",
)


def of_experts(
    layer: LayerProfile,
    experts: Experts,
    exchange: Collective,
    *,
    shares: int = 1,
    gather: Collective | None = None,
) -> LayerProfile:
    """The layer of one of the positions that share its experts, with all weights still.

    Args:
        layer: the layer with all experts.
        experts: its routed experts.
        exchange: cost of an all-to-all over the positions.
        shares: positions that send shares of the same tokens.
        gather: cost of an all-gather over these.

    >>> experts = Experts(4, 20.0, forward=0.5, backward=0.5, sent_bytes=6.0, load=1.5)
    >>> whole = LayerProfile((1.0,), (8.0,), (16.0,), (100.0,), 40.0, 10.0, experts=experts)
    >>> one = of_experts(whole, experts, Collective(latency_seconds=1.0, seconds_per_byte=0.5))
    >>> one.forward_seconds, one.backward_seconds  # 4 + 1.5·4 + 1 for counts + 2·(1 + 4.5), 8 + 1.5·8 + 11
    ((22.0,), (31.0,))
    >>> half = of_experts(whole, experts, Collective(1.0, 0.5), shares=2, gather=Collective(0.0, 0.1))
    >>> half.forward_seconds, half.saved_bytes  # 4 + 1.5·4/2 + 1 + 2·(1 + 4.5/2) + 0.1·10
    ((15.5,), (100.0,))
    """
    lines, load = layer.lines(), experts.load
    gather = gather or Collective()
    tokens = [
        2 * exchange.seconds(load * experts.sent_bytes * n / shares)
        + gather.seconds(layer.output_bytes * n)
        + experts.overhead_seconds
        for n in layer.samples
    ]

    def loaded(amounts: tuple[float, ...], share: float) -> tuple[float, ...]:
        return tuple((1 - share + load * share / shares) * amount for amount in amounts)

    def seconds(kind: OpKind, share: float, more: float | None = None) -> tuple[float, ...]:
        line = lines[kind]
        amounts = tuple(
            (1 - share) * line.at(n) + load * share * of_fewer(line, n / shares) for n in layer.samples
        )
        if more is None:
            return amounts
        return tuple(amount + both + more for amount, both in zip(amounts, tokens, strict=True))

    amounts: dict[str, Any] = {name: loaded(getattr(layer, name), experts.saved) for name in _SAVED}
    amounts |= {name: loaded(getattr(layer, name), experts.peaks) for name in _PEAKS}
    return replace(
        layer,
        # Before its tokens, a position sends the number of those for each expert.
        forward_seconds=seconds(OpKind.FORWARD, experts.forward, exchange.latency_seconds),
        backward_seconds=seconds(OpKind.BACKWARD, experts.backward, 0.0),
        input_gradient_seconds=seconds(OpKind.INPUT_GRADIENT, experts.backward, 0.0),
        weight_gradients_seconds=seconds(OpKind.WEIGHT_GRADIENTS, experts.backward),
        **amounts,
    )
