"""Weights of a model of transformers by its names and by those of its files, read tensor by tensor.

Files have some weights in other forms, such as those of each expert by itself (``models/hf/file_forms.py``).
Without transformers, or for a config that it does not know, names in files are taken for the model's.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterflow.checkpoints.files import DTYPES, dtype_name
from counterflow.errors import ConfigError
from counterflow.models.hf.file_forms import FileForms, StoredWeight, stored_weights
from counterflow.models.hf.weight_files import load

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype, as safetensors names it, and shape of tensors by name."""

Read = Callable[[str], Tensor]


def by_model_names(table: Table, read: Read, folder: Path) -> tuple[Table, Read]:
    """Weights by the names of the model in a folder.

    Args:
        table: tensors by their names in files.
        read: function of such a name that returns the tensor.
        folder: folder with the model's config.

    Raises:
        ConfigError: weights are quantized, or in a form that needs more than these tensors.
    """
    model = _meta_model(folder)
    if model is None:
        return table, read
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{folder}: its weights are quantized; read them with from_pretrained, and save that model"
        )
    stored = stored_weights(model, table)
    covered = {name for weight in stored.values() for names in weight.sources.values() for name in names}
    if missing := sorted(table.keys() - covered):
        raise ConfigError(
            f"{folder}: {missing[0]} is in a form that needs the model to be read; read it with "
            "from_pretrained, and save a checkpoint of a pipeline"
        )
    empty = {n: torch.empty(shape, dtype=DTYPES[d], device="meta") for n, (d, shape) in table.items()}
    sizes = {}
    for name, weight in stored.items():
        tensor = _joined(weight, empty.__getitem__)
        sizes[name] = dtype_name(tensor.dtype, name), tuple(tensor.shape)
    return sizes, lambda name: _joined(stored[name], read)


def _joined(weight: StoredWeight, read: Read) -> Tensor:
    return weight.read(lambda name, _: read(name))


def by_file_names(table: Table, read: Read, folder: Path) -> tuple[Table, Read]:
    """Weights by the names that transformers' files of the model in a folder have.

    Args:
        table: tensors by their names in the model.
        read: function of such a name that returns the tensor.
        folder: folder with the model's config.

    Raises:
        ConfigError: the tensors are not those of the model; another head is allowed, as for transformers.
    """
    model = _meta_model(folder)
    if model is None:
        return table, read
    known = _names_in_model(model, table)
    _require_same(model, table, known, folder)
    forms = FileForms(model)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    sources: dict[str, str] = {}
    for name, (dtype, shape) in table.items():
        empty = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for key, piece in (forms.pieces(name, empty) if name in known else {name: empty}).items():
            sizes[key], sources[key] = (dtype, tuple(piece.shape)), name
    return sizes, _Pieces(forms, sources, read, known).read


def _names_in_model(model: Any, names: Iterable[str]) -> dict[str, str]:
    # transformers adds the prefix of the base model, and leaves it out, where the model's names need it.
    prefix, state = f"{model.base_model_prefix}.", model.state_dict().keys()
    forms = {name: (name, name.removeprefix(prefix), prefix + name) for name in names}
    return {
        name: next(form for form in forms[name] if form in state) for name in forms if state & {*forms[name]}
    }


def _require_same(model: Any, table: Table, known: Mapping[str, str], folder: Path) -> None:
    kind = f"{folder}: its {type(model).__name__}"
    hint = "give the folder of the model that was trained, or a target that ends with .safetensors"
    prefix, state = f"{model.base_model_prefix}.", model.state_dict(keep_vars=True)
    for name, in_model in known.items():
        shape, expected = table[name][1], tuple(state[in_model].shape)
        if shape != expected:
            raise ConfigError(f"{kind} has {in_model} of shape {expected}, the checkpoint of {shape}; {hint}")
    further = _without(
        table.keys() - known.keys(), getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    )
    has_prefix = any(name.startswith(prefix) for name in table)
    for name in further:
        if not has_prefix or name.startswith(prefix):
            raise ConfigError(f"{kind} has no {name}, which the checkpoint contains; {hint}")
    present = {id(state[in_model]) for in_model in known.values()}  # one name of a tied weight is enough
    missing = [name for name, tensor in state.items() if id(tensor) not in present]
    base = {id(tensor) for tensor in model.base_model.state_dict(keep_vars=True).values()}
    is_named = type(model).__name__ in (model.config.architectures or ())
    for name in _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)):
        if id(state[name]) in base or (is_named and not further):
            raise ConfigError(f"{kind} has {name}, which the checkpoint does not contain; {hint}")


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns or ()))


class _Pieces:
    def __init__(
        self, forms: FileForms, sources: Mapping[str, str], read: Read, known: Container[str]
    ) -> None:
        self._forms, self._sources, self._read, self._known = forms, sources, read, known
        self._pieces: dict[str, Tensor] = {}

    def read(self, key: str) -> Tensor:
        """Read a tensor by its name in the files."""
        if key not in self._pieces:
            name = self._sources[key]
            if name not in self._known:
                return self._read(name)
            self._pieces = self._forms.pieces(name, self._read(name))
        return self._pieces.pop(key)


def _meta_model(folder: Path) -> Any:
    if not (folder / "config.json").is_file() or importlib.util.find_spec("transformers") is None:
        return None
    try:
        return load(folder, weights=False)
    except (ConfigError, ValueError):  # transformers has no such model
        return None
