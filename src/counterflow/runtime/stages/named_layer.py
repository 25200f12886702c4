"""A layer of the model with its names, and how layers on the meta device are made.

Invariant: whether a layer's weights were given or are made here, they do not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from counterflow.errors import ConfigError

from ..torch_private import hooks_of, is_loss
from .ownership import attach
from .randomness import RandomStreams
from .recomputation import Buffers


@dataclass(frozen=True, slots=True)
class NamedLayer:
    """A layer of the model.

    Attributes:
        index: its number among all layers of the model.
        names: its own names of parameters and buffers to those in the model's state_dict.
        module: the layer.
    """

    index: int
    names: Mapping[str, str]
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """What of its ``state_dict`` is the model's state, by its own names."""
        return {name: value for name, value in self.module.state_dict().items() if name in self.names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what ``state`` gave."""
        others = {n: value for n, value in self.module.state_dict().items() if n not in self.names}
        self.module.load_state_dict({**others, **state})


def place_of(layer: NamedLayer) -> str:
    """How a layer, or the loss function, is called in messages."""
    which = "the loss function" if layer.index == LOSS else f"layer {layer.index}"
    return f"{which} ({type(layer.module).__name__})"


LOSS = -1
"""The number of a loss function among the layers."""


def loss_layer(loss_function: object) -> NamedLayer | None:
    """A loss function that is a module with weights or buffers, which belong to the last stage.

    Its weights are in the model's state, and its buffers, which training may change. Those of torch's own
    losses (weights of classes) are not: they are what the user made the loss with.

    Raises:
        ConfigError: it is one of torch's that gives no mean.
    """
    if is_loss(loss_function) and loss_function.reduction not in ("mean", "batchmean"):
        raise ConfigError(
            f"the loss function is a {type(loss_function).__name__} with "
            f"reduction={loss_function.reduction!r}, and each micro-batch gives the mean over its samples; "
            "take reduction='mean', or a function that returns a cf.LossSum"
        )
    if not isinstance(loss_function, nn.Module):
        return None
    given = {
        f"{place}.{name}" if place else name
        for place, module in loss_function.named_modules()
        if is_loss(module)
        for name, _ in module.named_buffers(recurse=False)
    }
    kept = (name for name in loss_function.state_dict(keep_vars=True) if name not in given)
    names = {name: f"loss_function.{name}" for name in kept}
    has_any = names or any(True for _ in loss_function.buffers())
    return NamedLayer(LOSS, names, loss_function) if has_any else None


def have_statistics(layers: Sequence[NamedLayer]) -> bool:
    """Whether a training forward of these layers changes what copies average or add up."""
    buffers = Buffers(layer.module for layer in layers)
    return bool(buffers.norms or buffers.summed)


def materialised(
    layers: Sequence[NamedLayer], device: torch.device, streams: RandomStreams
) -> list[NamedLayer]:
    """The layers on the worker's device; those on the meta device are made there and initialised.

    Each is initialised from a stream keyed by its number, by its own ``make_weights`` or else by
    ``reset_parameters`` of its modules, so that its weights depend neither on the cut nor on the worker.
    Parameters that layers share stay shared.

    Args:
        layers: the worker's layers.
        device: where they shall be.
        streams: the run's random streams.

    Raises:
        ConfigError: a module on the meta device has parameters or buffers but no ``reset_parameters``; or a
            part of a layer is on the meta device and the rest is not.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    result = []
    for layer in layers:
        module = layer.module
        tensors = dict((*module.named_parameters(), *module.named_buffers()))
        meta = [name for name, tensor in tensors.items() if tensor.is_meta]
        if meta:
            real = next((name for name, tensor in tensors.items() if not tensor.is_meta), None)
            if real is not None:
                raise ConfigError(
                    f"layer {layer.index} ({type(module).__name__}) has {meta[0]} on the meta device and "
                    f"{real} on a real one: it would be made anew; build the whole layer on one of them"
                )
            _made(module, layer, device, streams, made)
        else:
            module.to(device)
        result.append(NamedLayer(layer.index, layer.names, module))
    return result


def _made(
    module: nn.Module,
    layer: NamedLayer,
    device: torch.device,
    streams: RandomStreams,
    made: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    place = f"layer {layer.index} ({type(module).__name__})"
    make_weights = getattr(module, "make_weights", None)
    for name, child in module.named_modules() if not callable(make_weights) else ():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if own and not callable(getattr(child, "reset_parameters", None)):
            raise ConfigError(
                f"{place} is on the meta device, and its module {name or 'itself'!r} "
                f"({type(child).__name__}) has no reset_parameters() to make its weights with; give it one, "
                "or build the layers on a real device"
            )
    before = dict(module.named_parameters(remove_duplicate=False))
    module.to_empty(device=device)
    firsts: dict[int, nn.Parameter] = {}
    for name, old in before.items():  # what is tied within the layer is made once
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, firsts.setdefault(id(old), module.get_parameter(name)))
    with streams.initial(layer.index):
        if callable(make_weights):
            make_weights()
        else:
            for child in module.modules():
                reset = getattr(child, "reset_parameters", None)
                if callable(reset):
                    reset()
    for name, old in before.items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        if id(old) in made:
            setattr(holder, leaf, made[id(old)][1])
        else:
            new = getattr(holder, leaf)
            made[id(old)] = old, new  # the old one too, so that its id stays its own
            if new is not old:
                attach(new, old.__dict__, *hooks_of(old))
