"""Initialisation of layers that are on the meta device.

Invariant: weights that are initialised here do not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from counterflow.common.tensors.module_copies import attach_to_parameter
from counterflow.common.tensors.torch_private import hooks_of
from counterflow.errors import ConfigError

from .buffers import Buffers
from .named_layer import NamedLayer
from .randomness import RandomStreams


def have_statistics(layers: Sequence[NamedLayer]) -> bool:
    """True if a training forward of these layers changes buffers that copies average or add up."""
    buffers = Buffers(layer.module for layer in layers)
    return bool(buffers.norms or buffers.summed)


def materialised(
    layers: Sequence[NamedLayer],
    device: torch.device,
    streams: RandomStreams,
    divided: Collection[nn.Parameter] = (),
) -> list[NamedLayer]:
    """Move layers to the worker's device; layers on the meta device are allocated there and initialised.

    Each is initialised from a stream keyed by its number, by its ``make_weights`` or else by
    ``reset_parameters`` of its modules, so that its weights depend neither on the cut nor on the worker.
    Parameters that layers share stay shared.

    Args:
        layers: the worker's layers.
        device: device of the result.
        streams: random streams of the run.
        divided: parameters of which this worker will have some rows; they stay on the meta device if their
            layer reads such rows later (``reads_rows``, ``read_rows``).

    Raises:
        ConfigError: a module on the meta device has parameters or buffers but no ``reset_parameters``; or a
            part of a layer is on the meta device and the rest is not.
    """
    initialised: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
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
            rows = getattr(module, "reads_rows", None)
            later = [
                name
                for name, parameter in module.named_parameters()
                if callable(rows) and parameter in divided and rows(name)
            ]
            _initialise(module, layer, device, streams, initialised, later)
        else:
            module.to(device)
        result.append(NamedLayer(layer.index, layer.names, module))
    return result


@contextmanager
def _without(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    parameters = {name: module.get_parameter(name) for name in names}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, None)
    yield
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)


def _initialise(  # noqa: PLR0917
    module: nn.Module,
    layer: NamedLayer,
    device: torch.device,
    streams: RandomStreams,
    initialised: dict[int, tuple[nn.Parameter, nn.Parameter]],
    later: Sequence[str],
) -> None:
    place = f"layer {layer.index} ({type(module).__name__})"
    make_weights = getattr(module, "make_weights", None)
    for name, child in module.named_modules() if not callable(make_weights) else ():
        direct = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if direct and not callable(getattr(child, "reset_parameters", None)):
            raise ConfigError(
                f"{place} is on the meta device, and its module {name or 'itself'!r} "
                f"({type(child).__name__}) has no reset_parameters() to make its weights with; give it one, "
                "or build the layers on a real device"
            )
    before = dict(module.named_parameters(remove_duplicate=False))
    with _without(module, later):
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
        if id(old) in initialised:
            setattr(holder, leaf, initialised[id(old)][1])
        else:
            new = getattr(holder, leaf)
            initialised[id(old)] = old, new  # also ``old``, so that its id is not reused
            if new is not old:
                attach_to_parameter(new, old.__dict__, *hooks_of(old))
