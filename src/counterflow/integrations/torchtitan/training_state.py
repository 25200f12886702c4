"""A training's state by torchtitan's names and by a model's, read tensor by tensor in both directions.

Invariant: what an optimiser keeps of a weight has the weight's shape and is divided as the weight is, or is
one value that all its parts have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from counterflow.checkpoints.files import DTYPES
from counterflow.checkpoints.reader import Checkpoint
from counterflow.checkpoints.state_tables import MODEL, OPTIMIZER, state_name
from counterflow.errors import ConfigError
from counterflow.runtime.state_format import FURTHER

from .dcp_folder import OPTIMIZERS, TorchFolder, flat
from .model_names import TitanForm, TitanNames

Size = tuple[str, tuple[int, ...]]
"""Dtype, as safetensors names it, and shape."""


@dataclass(frozen=True, slots=True)
class TitanState:
    """A training's state with torchtitan's names.

    Attributes:
        sizes: dtype and shape of tensors by key.
        readers: function that reads a tensor, by key.
        objects: what is no tensor, by key.
    """

    sizes: Mapping[str, Size]
    readers: Mapping[str, Callable[[], Tensor]]
    objects: Mapping[str, Any]


def titan_state(checkpoint: Checkpoint, weights: Mapping[str, Size], names: TitanNames | None) -> TitanState:
    """State of a checkpoint with torchtitan's names.

    Args:
        checkpoint: checkpoint of a training.
        weights: dtype and shape of its weights by first name.
        names: names in torchtitan; None: the same.

    Raises:
        ConfigError: torchtitan has no such weight.
    """
    sizes: dict[str, Size] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    forms = {name: names.form(name) if names else TitanForm((name,)) for name in weights}

    def add(key: str, form: TitanForm, shape: tuple[int, ...], prefix: str = "", suffix: str = "") -> None:
        stored = checkpoint.index.tensors[key]
        divided = stored.shape == shape
        shapes = form.shapes(shape) if divided else [stored.shape] * len(form.names)
        for number, (name, part) in enumerate(zip(form.names, shapes, strict=True)):
            sizes[f"{prefix}{name}{suffix}"] = stored.dtype, part
            read = partial(_part, checkpoint, key, form, number if divided else None)
            readers[f"{prefix}{name}{suffix}"] = read

    for name, (_, shape) in weights.items():
        add(f"{MODEL}/{name}", forms[name], shape)
    for first, further in checkpoint.index.aliases.items():
        for name in further if first in weights else ():
            add(f"{MODEL}/{first}", names.form(name) if names else TitanForm((name,)), weights[first][1])
    for key in checkpoint.index.tensors:
        kind, of, slot = state_name(key)
        if kind == OPTIMIZER and slot is not None:
            form, shape = forms[str(of)], weights[str(of)][1]
            add(key, form, shape, f"{OPTIMIZERS[0]}.state.", f".{slot}")
    shapes = {name: shape for name, (_, shape) in weights.items()}
    for name, shape in names.biases(shapes).items() if names else ():
        sizes[name], readers[name] = ("F32", shape), partial(torch.zeros, shape)
    keys = [key for key in checkpoint.index.objects if state_name(key).kind == OPTIMIZER]
    options = {
        name: {option: number for option, number in value["options"].items() if option != FURTHER}
        for key, value in checkpoint.objects(keys).items()
        for name in forms[str(state_name(key).of)].names
    }
    counters = {
        "train_state.step": checkpoint.step,
        "train_state.ntokens_seen": 0,
        "lr_scheduler.last_epoch": checkpoint.step,
    }
    return TitanState(sizes, readers, flat(options) | counters)


def _part(checkpoint: Checkpoint, key: str, form: TitanForm, number: int | None) -> Tensor:
    tensor = checkpoint.tensor(key)
    return tensor if number is None else form.split(tensor)[number].contiguous()


class ModelState:
    """State of a training in a folder of torchtitan, with a model's names.

    Args:
        folder: the folder.
        names: names in torchtitan; None: the same.

    Raises:
        ConfigError: the folder has other weights than such a model, or a bias that the model lacks.

    Attributes:
        weights: dtype and shape of weights by name.
        slots: dtype and shape of what the optimiser keeps, by name and slot.
        options: the optimiser's options by name of a weight.
    """

    def __init__(self, folder: TorchFolder, names: TitanNames | None) -> None:
        self._folder = folder
        place = str(folder.path)
        if names is None:
            self._forms, biases = {name: TitanForm((name,)) for name in folder.weights}, list[str]()
        else:
            self._forms, biases = names.forms_in(folder.weights, place)
        for name in biases:
            if folder.read(folder.weights[name]).any():
                raise ConfigError(
                    f"{place}: {name} changes the choice of experts, and the model of transformers has no "
                    "such bias; train it with load_balance_coeff=None"
                )
        self.weights = {name: self._size(name, form.names) for name, form in self._forms.items()}
        state, options = folder.state(), folder.options()
        self.slots: dict[str, Size] = {}
        for name, form in self._forms.items():
            for slot in sorted({slot for n, slot in state if n in form.names}):
                keys = [state.get((part, slot), "") for part in form.names]
                if "" in keys:
                    raise ConfigError(f"{place}: the optimiser keeps {slot} of a part of {name} only")
                self.slots[f"{name}/{slot}"] = self._slot_size(name, keys)
        self._slot_keys = {
            f"{name}/{slot}": [state[part, slot] for part in self._forms[name].names]
            for name, slot in (key.rsplit("/", 1) for key in self.slots)
        }
        self.options: dict[str, dict[str, Any]] = {}
        for name, form in self._forms.items():
            of_parts = [options.get(part) for part in form.names]
            if any(of_part != of_parts[0] for of_part in of_parts):
                raise ConfigError(
                    f"{place}: the optimiser's options of {form.names[0]} and {form.names[-1]} differ, and "
                    "the model has one weight for both"
                )
            if of_parts[0] is not None:
                self.options[name] = of_parts[0]

    def _size(self, name: str, parts: tuple[str, ...]) -> Size:
        return self._joined_size(name, [self._folder.weights[part] for part in parts])

    def _joined_size(self, name: str, keys: list[str]) -> Size:
        sizes = [self._folder.sizes[key] for key in keys]
        empty = [torch.empty(shape, dtype=DTYPES[dtype], device="meta") for dtype, shape in sizes]
        return sizes[0][0], tuple(self._forms[name].join(empty).shape)

    def _slot_size(self, name: str, keys: list[str]) -> Size:
        return self._joined_size(name, keys) if self._is_divided(name, keys) else self._folder.sizes[keys[0]]

    def _is_divided(self, name: str, keys: list[str]) -> bool:
        weights = self._folder.weights
        parts = self._forms[name].names
        shapes = [self._folder.sizes[weights[part]][1] for part in parts]
        return [self._folder.sizes[key][1] for key in keys] == shapes

    def read(self, kind: str, name: str) -> Tensor:
        """Read a weight by its name, or what the optimiser keeps of one by name and slot.

        Raises:
            ConfigError: parts of a weight have other values where they need the same.
        """
        if kind == MODEL:
            form = self._forms[name]
            tensors = [self._folder.read(self._folder.weights[part]) for part in form.names]
            return form.join(tensors).contiguous()
        keys, weight = self._slot_keys[name], name.rsplit("/", 1)[0]
        tensors = [self._folder.read(key) for key in keys]
        if self._is_divided(weight, keys):
            return self._forms[weight].join(tensors).contiguous()
        if not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            raise ConfigError(f"{self._folder.path}: {keys[0]} and {keys[-1]} differ, and the model has one")
        return tensors[0]
