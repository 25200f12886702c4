"""The layers of any model, and the names their parameters have in it.

Invariant: layer i+1 takes what layer i gives, as ONE argument: a tensor or a tuple of tensors. A nested
``nn.Sequential`` is one layer. Nothing here runs a layer or moves one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from counterflow.common.tensors.torch_private import children_of, hooks_of_module
from counterflow.errors import ConfigError

Activation = Tensor | tuple[Tensor, ...]
"""Output of one layer and input of the next."""

Model = nn.Module | Sequence[nn.Module]
"""An ``nn.Sequential``, a list of layers, or any module together with a function that lists its layers."""

EXTRA_STATE = "_extra_state"
"""Name of a module's extra state in a ``state_dict``."""

ListLayers = Callable[[Any], Iterable[nn.Module]]
"""A user's function: the model to its layers, in the order in which they run."""


def layers_of(model: Model, list_layers: ListLayers | None = None) -> list[nn.Module]:
    """The model's layers, in the order in which they run.

    Args:
        model: an ``nn.Sequential``, a list of modules (or ``nn.ModuleList``), or any other module.
        list_layers: lists the layers of any other module; they may be its own submodules, or modules that
            wrap some of them.

    Raises:
        ConfigError: no layers, something that is no module, a module nobody listed the layers of, or a
            parameter of the model that requires a gradient and that no listed layer has.

    >>> [type(layer).__name__ for layer in layers_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))]
    ['Linear', 'ReLU']
    """
    layers = _listed(model, list_layers)
    if not layers:
        raise ConfigError(f"the {type(model).__name__} has no layers: give at least one")
    for index, layer in enumerate(layers):
        _refuse_layer(index, layer)
    _refuse_shared_memory(layers)
    if isinstance(model, nn.Module):
        _refuse_missing(model, layers)
        if not any(layer is model for layer in layers):
            refuse_root(model)
    return layers


def _listed(model: Model, list_layers: ListLayers | None) -> list[nn.Module]:
    if list_layers is not None:
        return list(list_layers(model))
    if isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward:
        raise ConfigError(
            f"the {type(model).__name__} has a forward of its own, which no stage would run; move it into "
            "layers, or give example=, the inputs of a step, so that its layers are captured"
        )
    if isinstance(model, (nn.Sequential, nn.ModuleList)):
        return list(model)  # not children(), which skips a module that stands there twice
    if isinstance(model, Sequence):
        return list(model)
    raise ConfigError(
        f"the layers of {type(model).__name__} are not known: give example=, the inputs of a step, and they "
        "are captured; or an nn.Sequential, a list of modules, or list_layers, a function that lists this "
        "model's layers"
    )


def _refuse_layer(index: int, layer: object) -> None:
    place = f"layer {index} ({type(layer).__name__})"
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"layer {index} is a {type(layer).__name__}: every layer must be an nn.Module")
    for child in layer.modules():
        _refuse_kind(place, child)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of {place} has no shape yet: give the layer its sizes, or run the model once before "
                "it goes into a pipeline"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ConfigError(
                f"{name} of {place} is a {kind} tensor, which has no memory of its own to copy and compare; "
                "keep the dense tensors that it is made of (indices and values, values and offsets), and "
                "make it in the layer's forward"
            )


def state_names(model: Model, list_layers: ListLayers | None = None) -> list[dict[str, str]]:
    """For each layer, the model's name of each entry of the layer's ``state_dict``, and of each parameter.

    A layer that only wraps parts of the model has the names of those parts.

    Args:
        model: as in :func:`layers_of`.
        list_layers: as in :func:`layers_of`.

    Raises:
        ConfigError: as :func:`layers_of`; a wrapping layer with a parameter the model does not have.

    >>> state_names(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    [{}, {'weight': '1.weight', 'bias': '1.bias'}]
    """
    layers = layers_of(model, list_layers)
    known: dict[int, str] = {}
    extra: dict[int, str] = {}
    if isinstance(model, nn.Module):
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                known.setdefault(id(tensor), name)
        for name, module in model.named_modules():
            extra[id(module)] = f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE
    names = []
    for index, (layer, prefix) in enumerate(zip(layers, _prefixes(model, layers, list_layers), strict=True)):
        entries = layer.state_dict(keep_vars=True)
        if prefix is not None:
            # A state_dict hook may rename a parameter, which is updated under its own name.
            in_layer = [*entries, *(name for name, _ in layer.named_parameters(remove_duplicate=False))]
            names.append({name: prefix + name for name in in_layer})
            continue
        layer_names = {}
        for name, tensor in entries.items():
            owner, _, leaf = name.rpartition(".")
            model_name = (
                extra.get(id(layer.get_submodule(owner))) if leaf == EXTRA_STATE else known.get(id(tensor))
            )
            if model_name is None:
                raise ConfigError(
                    f"{name} of layer {index} ({type(layer).__name__}) is no parameter or buffer of the "
                    f"{type(model).__name__}: a layer may only wrap what the model has"
                )
            layer_names[name] = model_name
        names.append(layer_names)
    return names


def aliases_of(model: Model) -> dict[str, tuple[str, ...]]:
    """The tensors that the model's ``state_dict`` has under several names: by the first one, all names.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> aliases_of(tied)
    {'0.weight': ('0.weight', '1.weight')}
    """
    if not isinstance(model, nn.Module):
        return {}
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    return {same[0]: tuple(same) for same in names.values() if len(same) > 1}


def parameter_count(layers: Sequence[nn.Module]) -> int:
    """Return the number of elements of the layers' parameters; a tied parameter counts once.

    >>> linear = nn.Linear(3, 2)
    >>> parameter_count([linear, nn.ReLU(), linear])
    8
    """
    parameters = {id(parameter): parameter for layer in layers for parameter in layer.parameters()}
    return sum(parameter.numel() for parameter in parameters.values())


def _prefixes(model: Model, layers: Sequence[nn.Module], list_layers: ListLayers | None) -> list[str | None]:
    """Return each layer's name in the model with a dot; None for a layer that is no submodule of it."""
    if not isinstance(model, nn.Module):
        return [f"{index}." for index in range(len(layers))]
    if list_layers is None:
        # By place, for the same module may stand in a Sequential twice.
        return [f"{name}." for name in children_of(model)]
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names[id(module)] = f"{name}." if name else ""
    return [names.get(id(layer)) for layer in layers]


def _refuse_missing(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    listed = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in listed and parameter.requires_grad:
            raise ConfigError(
                f"{name} of the {type(model).__name__} is in none of the {len(layers)} listed layers and "
                "would never be trained: list a layer that has it, or freeze it by requires_grad_(False)"
            )


def _refuse_kind(place: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"{place} is scripted or traced by torch.jit, whose modules cannot be taken apart; give the "
            "module that it was made of (and compile=True)"
        )
    if getattr(module, "scale_grad_by_freq", False):
        raise ConfigError(
            f"{place} has scale_grad_by_freq=True, which counts how often an index is in the whole mini-"
            "batch, and a stage sees one micro-batch; leave it out"
        )
    if isinstance(module, nn.SyncBatchNorm):
        raise ConfigError(
            f"{place} has a SyncBatchNorm, which waits in each forward for the workers of all stages, and "
            "these run other micro-batches, or none, then; take a BatchNorm, whose running statistics "
            "are averaged over copies and replicas, with larger micro-batches if it needs more samples"
        )


def refuse_root(model: nn.Module) -> None:
    """Refuse hooks and a forward of a model whose own forward never runs.

    Raises:
        ConfigError: it has some.
    """
    if "forward" in vars(model):
        raise ConfigError(
            f"the {type(model).__name__} was given a forward of its own, which no stage would run; give one "
            "to its layers"
        )
    if hooks_of_module(model):
        raise ConfigError(
            f"the {type(model).__name__} has hooks of its own forward or backward, which no stage would run; "
            "register them on layers"
        )


def _refuse_shared_memory(layers: Sequence[nn.Module]) -> None:
    spans: list[tuple[int, int, int, str]] = []
    seen: set[int] = set()
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.is_contiguous()
            if id(parameter) in seen or not plain:
                continue
            seen.add(id(parameter))
            begin = parameter.data_ptr()
            spans.append((begin, begin + parameter.nbytes, index, name))
    spans.sort()
    for (_, end, index, name), (begin, _, second, second_name) in pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"{name} of layer {index} and {second_name} of layer {second} are two parameters with the "
                "same memory; make them one parameter, or give each its own (.clone())"
            )
