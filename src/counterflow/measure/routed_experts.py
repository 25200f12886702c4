"""Routed experts of a layer as the planner's profile has them, from its modules.

Bytes are exact. Shares are estimates, by the weights with which a token is multiplied. A load is not known
before a run; it is 1.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from counterflow.common.tensors.divided_modules import expert_modules
from counterflow.planning.inputs.layer_parts import Experts

_CHOSEN = "chosen", "top_k", "k", "num_experts_per_tok"
"""Attributes of modules with the number of experts of a token."""


def experts_of(layer: nn.Module, output_bytes: float) -> Experts | None:
    """Routed experts of a layer; None: it has none, or does not say how many a token passes.

    Args:
        layer: the layer, on any device; its experts take tokens as wide as its output.
        output_bytes: size of its output for one sample.
    """
    modules = [*expert_modules(layer)]
    counts = {module.get_parameter(names[0]).shape[0] for module, names in modules}
    chosen = {_experts_per_token(layer, module) for module, _ in modules}
    if len(counts) != 1 or len(chosen) != 1 or None in chosen:
        return None
    (count,), (of_token,) = counts, chosen
    assert of_token is not None
    weights = [module.get_parameter(name) for module, names in modules for name in names]
    routed = sum(weight.numel() for weight in weights) * min(of_token, count) / count
    experts = {id(weight) for weight in weights}
    rest = sum(
        weight.numel() for weight in layer.parameters() if weight.dim() > 1 and id(weight) not in experts
    )
    share = routed / (routed + rest)
    return Experts(
        count,
        float(sum(weight.nbytes for weight in weights)),
        forward=share,
        backward=share,
        saved=share,
        peaks=share,
        sent_bytes=of_token * output_bytes * len(modules),
    )


def _experts_per_token(layer: nn.Module, experts: nn.Module) -> int | None:
    places: list[Any] = [experts, getattr(experts, "config", None), *layer.modules()]
    numbers = (getattr(place, name, None) for place in places for name in _CHOSEN)
    return next((number for number in numbers if type(number) is int), None)
