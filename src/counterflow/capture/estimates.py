"""Estimated cost of each layer of a model, without running it: floating-point operations.

The engine cuts a model by this cost if no cuts are given; ``schedule.cuts`` makes stages from costs, and
``measure`` measures the cost of layers on a device.

Invariant: the model is left as it was. Every layer is counted, embedding and head included.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from counterflow.errors import ConfigError

from .model_layers import Activation


def estimated_costs(
    layers: Sequence[nn.Module],
    sample: Activation | None = None,
    *,
    kinds: Sequence[Hashable] | None = None,
) -> list[float]:
    """Floating-point operations of each layer's forward, estimated without computing anything.

    With a sample the layers run on the meta device and their matrix products and convolutions are counted,
    and one operation for every number of a layer's output, so that none is free. Without a sample it is what
    one row (a token, a pixel) costs: two operations for every number of a matrix, one for every number of a
    vector, and for a lookup one for every number of the row looked up. That is blind to resolution: comparing
    convolutions takes a sample.

    Args:
        layers: the model's layers.
        sample: the first layer's input, on any device, ``meta`` too; only shapes and dtypes are used.
        kinds: kind of each layer; layers of one kind cost the same for the same input, so only the first
            one runs. None: each is of its own kind.

    Raises:
        ConfigError: a layer that does not run on the meta device with this sample.

    >>> estimated_costs([nn.Embedding(100, 4), nn.Linear(4, 8)])
    [4.0, 72.0]
    >>> estimated_costs([nn.Linear(4, 8), nn.ReLU()], torch.empty(3, 4))
    [216.0, 24.0]
    """
    if sample is None:
        return [_parameter_cost(layer) for layer in layers]
    costs: list[float] = []
    value = _on_meta(sample)
    known: dict[Hashable, tuple[Activation, float]] = {}
    for index, layer in enumerate(layers):
        key = (kinds[index] if kinds is not None else index, *_shapes(value))
        if key in known:
            value, cost = known[key]
            costs.append(cost)
            continue
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                value = functional_call(layer, state, (value,))
        except Exception as error:
            raise ConfigError(
                f"layer {index} ({type(layer).__name__}) does not run on the meta device with this sample: "
                f"{error}; estimate without a sample, or give costs"
            ) from error
        numbers = sum(tensor.numel() for tensor in _tensors(value))
        costs.append(float(counter.get_total_flops() + numbers))
        known[key] = value, costs[-1]
    return costs


def _shapes(value: Activation) -> tuple[Hashable, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in _tensors(value))


def _parameter_cost(layer: nn.Module) -> float:
    cost = 0
    for module in layer.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            cost += module.embedding_dim
            continue
        for parameter in module.parameters(recurse=False):
            cost += parameter.numel() * (2 if parameter.dim() > 1 else 1)
    return float(cost)


def _on_meta(value: Activation) -> Activation:
    moved = tuple(torch.empty_like(tensor, device="meta") for tensor in _tensors(value))
    return moved if isinstance(value, tuple) else moved[0]


def _tensors(value: Activation) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
