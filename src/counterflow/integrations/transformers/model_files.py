"""Weights of a model of transformers by its names and by those of its files, read tensor by tensor.

Files have some weights in other forms, such as those of each expert by itself (``models/hf/file_forms.py``).
Without transformers, or for a config that it does not know, names in files are taken for the model's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
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
    """
    model = _meta_model(folder)
    if model is None or not table.keys() <= model.state_dict().keys():
        return table, read
    forms = FileForms(model)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    sources: dict[str, str] = {}
    for name, (dtype, shape) in table.items():
        empty = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for key, piece in forms.pieces(name, empty).items():
            sizes[key], sources[key] = (dtype, tuple(piece.shape)), name
    return sizes, _Pieces(forms, sources, read).read


class _Pieces:
    def __init__(self, forms: FileForms, sources: Mapping[str, str], read: Read) -> None:
        self._forms, self._sources, self._read = forms, sources, read
        self._pieces: dict[str, Tensor] = {}

    def read(self, key: str) -> Tensor:
        """Read a tensor by its name in the files."""
        if key not in self._pieces:
            name = self._sources[key]
            self._pieces = self._forms.pieces(name, self._read(name))
        return self._pieces.pop(key)


def _meta_model(folder: Path) -> Any:
    if not (folder / "config.json").is_file() or importlib.util.find_spec("transformers") is None:
        return None
    try:
        return load(folder, weights=False)
    except ConfigError:
        return None
