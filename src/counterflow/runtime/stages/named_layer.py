"""A layer of the model with its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from counterflow.common.tensors.torch_private import is_loss
from counterflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedLayer:
    """A layer of the model.

    Attributes:
        index: number among all layers of the model.
        names: names in the model's state_dict, by the layer's names of parameters and buffers.
        module: the layer.
    """

    index: int
    names: Mapping[str, str]
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """Return the entries of its ``state_dict`` that are the model's state, by the layer's names."""
        return {name: value for name, value in self.module.state_dict().items() if name in self.names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state``."""
        rest = {n: value for n, value in self.module.state_dict().items() if n not in self.names}
        self.module.load_state_dict({**rest, **state})


def place_of(layer: NamedLayer) -> str:
    """Return the name of a layer, or the loss function, for messages."""
    which = "the loss function" if layer.index == LOSS else f"layer {layer.index}"
    return f"{which} ({type(layer.module).__name__})"


LOSS = -1
"""The number of a loss function among the layers."""


def loss_layer(loss_function: object) -> NamedLayer | None:
    """Return the layer of a loss function that is a module with weights or buffers; the last stage has it.

    Its weights are in the model's state, and its buffers, which training may change. Buffers of torch's
    losses (weights of classes) are not: they are arguments of the loss.

    Raises:
        ConfigError: it is a loss of torch that returns no mean.
    """
    if is_loss(loss_function) and loss_function.reduction not in ("mean", "batchmean"):
        raise ConfigError(
            f"the loss function is a {type(loss_function).__name__} with "
            f"reduction={loss_function.reduction!r}, and each micro-batch gives the mean over its samples; "
            "take reduction='mean', or a function that returns a cf.LossSum"
        )
    if not isinstance(loss_function, nn.Module):
        return None
    arguments = {
        f"{place}.{name}" if place else name
        for place, module in loss_function.named_modules()
        if is_loss(module)
        for name, _ in module.named_buffers(recurse=False)
    }
    saved = (name for name in loss_function.state_dict(keep_vars=True) if name not in arguments)
    names = {name: f"loss_function.{name}" for name in saved}
    has_any = names or any(True for _ in loss_function.buffers())
    return NamedLayer(LOSS, names, loss_function) if has_any else None
