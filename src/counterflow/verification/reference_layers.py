"""Layers of the reference: copies of a model's, with names in its state, on one device, with weights.

Names of parameters are part of what is compared, so their rules are written down here once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.tensors.torch_private import hooks_of, is_loss

from .reference_seeds import RandomSeeds

LOSS = -1
"""Number of a loss function among the layers."""


@dataclass(frozen=True, slots=True)
class ReferenceLayer:
    """A layer of the model, or a loss function that has weights or buffers.

    Attributes:
        index: number of the layer; -1: the loss function.
        names: names in the model's state by the layer's own.
        module: the layer.
    """

    index: int
    names: Mapping[str, str]
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """State of the layer by the model's names."""
        state = self.module.state_dict()
        return {self.names[name]: value for name, value in state.items() if name in self.names}


def named_layers(layers: nn.Sequential | Sequence[nn.Module]) -> Iterator[ReferenceLayer]:
    """Layers with the names of a list, or of an ``nn.Sequential``."""
    prefixes = [str(index) for index in range(len(layers))]
    if isinstance(layers, nn.Sequential):
        names = [name for name, _ in layers.named_modules(remove_duplicate=False)]
        prefixes = [name for name in names if name and "." not in name]
    for index, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True)):
        names = [*layer.state_dict(), *(name for name, _ in layer.named_parameters(remove_duplicate=False))]
        yield ReferenceLayer(index, {name: f"{prefix}.{name}" for name in names}, layer)


def loss_layer(loss_function: object) -> list[ReferenceLayer]:
    """A loss function that is a module with weights or buffers; those of torch's own losses are no state."""
    if not isinstance(loss_function, nn.Module):
        return []
    constants = {
        f"{place}.{name}" if place else name
        for place, module in loss_function.named_modules()
        if is_loss(module)
        for name, _ in module.named_buffers(recurse=False)
    }
    names = {n: f"loss_function.{n}" for n in loss_function.state_dict() if n not in constants}
    has_any = names or next(loss_function.buffers(), None) is not None
    return [ReferenceLayer(LOSS, names, loss_function)] if has_any else []


def copied_layers(layers: Sequence[ReferenceLayer]) -> list[ReferenceLayer]:
    """Copies that share what the layers share, with hooks and attributes of parameters."""
    memo: dict[int, Any] = {}
    copies = []
    for layer in layers:
        for module in layer.module.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:  # weight norm's, say: computed anew
                    memo[id(value)] = value.detach().clone()
        parameters = [p for p in layer.module.parameters() if id(p) not in memo]
        copies.append(replace(layer, module=copy.deepcopy(layer.module, memo)))
        for parameter in parameters:
            _attach(memo[id(parameter)], *copy.deepcopy((parameter.__dict__, *hooks_of(parameter)), memo))
    return copies


def placed_layers(
    layers: Sequence[ReferenceLayer], device: torch.device, seeds: RandomSeeds
) -> list[ReferenceLayer]:
    """Layers on a device; weights on the meta device are initialised, each layer's from a seed of its own."""
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for layer in layers:
        module = layer.module
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(device)
            continue
        before = dict(module.named_parameters(remove_duplicate=False))
        module.to_empty(device=device)
        firsts: dict[int, nn.Parameter] = {}
        for name, old in before.items():  # what is tied within the layer is initialised once
            _set(module, name, firsts.setdefault(id(old), module.get_parameter(name)))
        with seeds.restored():
            seeds.seed_weights(layer.index)
            make_weights = getattr(module, "make_weights", None)
            if callable(make_weights):
                make_weights()
            for child in () if callable(make_weights) else module.modules():
                reset = getattr(child, "reset_parameters", None)
                if callable(reset):
                    reset()
        for name, old in before.items():
            new = module.get_parameter(name)
            if id(old) in replaced:
                _set(module, name, replaced[id(old)][1])
                continue
            replaced[id(old)] = old, new
            if new is not old:
                _attach(new, old.__dict__, *hooks_of(old))
    return list(layers)


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _attach(
    parameter: nn.Parameter, attributes: Mapping[str, Any], before: Sequence[Any], after: Sequence[Any]
) -> None:
    vars(parameter).update(attributes)
    trains = parameter.requires_grad
    parameter.requires_grad_()  # a frozen one accepts no hooks
    for hook in before:
        parameter.register_hook(hook)
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trains)
