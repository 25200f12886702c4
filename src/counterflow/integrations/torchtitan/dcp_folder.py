"""Folders that torch.distributed.checkpoint writes, with the names of torchtitan, read and written.

There a weight has the model's own name; what the optimiser keeps of it is ``optimizer.state.NAME.SLOT`` and
its options are ``optimizer.param_groups.NAME.OPTION``, as torch's ``get_optimizer_state_dict`` names them if
it flattens them. Folders with the weights below ``model.`` are read too, and with ``optim`` in place of
``optimizer``.

Their metadata are a pickle, which can run any code. It is read without: what it may be made of is listed
here, and torch reads the other parts with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from counterflow.checkpoints.files import DTYPES, dtype_name
from counterflow.checkpoints.index import METADATA
from counterflow.errors import ConfigError

OPTIMIZERS = "optimizer", "optim"
_EXTRAS = "lr_scheduler", "train_state", "dataloader"
"""What a folder may have beside weights and the optimiser's state."""

_PURE = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES.values()),
}
"""Modules and names that are read in such a pickle; none of them runs code."""


class TorchFolder:
    """An opened folder.

    Args:
        path: the folder.

    Raises:
        ConfigError: it is damaged, or has something that is none of weights and state of an optimiser.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = _metadata(path)
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        tensors = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._object_keys = self._metadata.state_dict_metadata.keys() - tensors.keys()
        entries = self._metadata.state_dict_metadata
        self._optimizer = next((n for n in OPTIMIZERS if any(key.startswith(f"{n}.") for key in entries)), "")
        not_weights = tuple(f"{name}." for name in (*OPTIMIZERS, *_EXTRAS))
        weights = [key for key in tensors if not key.startswith(not_weights)]
        below = "model." if weights and all(key.startswith("model.") for key in weights) else ""
        self.weights = {key.removeprefix(below): key for key in weights}
        """The folder's key of each weight and buffer, by its name in the model."""
        if not weights:
            raise ConfigError(f"{path}: has no weights; give a folder of a whole model's training")
        self.sizes = {
            key: (dtype_name(entry.properties.dtype, key), tuple(entry.size))
            for key, entry in tensors.items()
        }
        """Dtype, as safetensors names it, and shape of each tensor, by the folder's key."""

    @property
    def step(self) -> int:
        """The number of updates made; 0 if the folder does not say it."""
        return self._number("train_state.step") or self._number("step") or 0

    @property
    def schedule_step(self) -> int | None:
        """The step at which the learning rate's schedule is; None if the folder does not say it."""
        return self._number("lr_scheduler.last_epoch")

    def _number(self, key: str) -> int | None:
        if key in self.sizes:
            return int(self.read(key).item())
        return int(self.objects([key])[key]) if key in self._object_keys else None

    def state(self) -> dict[tuple[str, str], str]:
        """The folder's key of what the optimiser keeps, by the weight's name and the slot.

        Raises:
            ConfigError: what is kept is not of a weight.
        """
        prefix = f"{self._optimizer}.state."
        keys: dict[tuple[str, str], str] = {}
        for key in self.sizes if self._optimizer else ():
            if key.startswith(prefix):
                name, _, slot = key.removeprefix(prefix).rpartition(".")
                if name not in self.weights:
                    raise ConfigError(
                        f"{self.path}: {key} belongs to no weight of the model; convert the weights only, "
                        "to a file that ends with .safetensors"
                    )
                keys[name, slot] = key
        return keys

    def options(self) -> dict[str, dict[str, Any]]:
        """The optimiser's options by the name of each weight that it updates.

        Raises:
            ConfigError: they are of groups and not of weights.
        """
        prefix = f"{self._optimizer}.param_groups."
        keys = [
            key for key in (*self._object_keys, *self.sizes) if self._optimizer and key.startswith(prefix)
        ]
        values = self.objects([key for key in keys if key in self._object_keys])
        values |= {key: self.read(key) for key in keys if key not in values}
        options: dict[str, dict[str, Any]] = {}
        for key in keys:
            name, _, option = key.removeprefix(prefix).rpartition(".")
            if name not in self.weights:
                raise ConfigError(
                    f"{self.path}: the optimiser's options are of {name or option!r}, which is no weight; "
                    "write the folder with torch's get_optimizer_state_dict and flatten_optimizer_state_dict"
                )
            options.setdefault(name, {})[option] = values[key]
        return options

    def read(self, key: str) -> Tensor:
        """Read one tensor, put together from its pieces."""
        dtype, shape = self.sizes[key]
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        self._fill({key: tensor})
        return tensor

    def objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read what is no tensor."""
        return self._fill(dict.fromkeys(keys, b""))

    def _fill(self, state: dict[str, Any]) -> dict[str, Any]:
        planner = _Reading()
        planner.set_up_planner(state, self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        try:
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{self.path}: {next(iter(state))} cannot be read: {_first(error)}") from None
        return planner.objects


class _Reading(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type is LoadItemType.BYTE_IO
        self.objects[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PURE:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not read")


def _metadata(path: Path) -> Metadata:
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
    except OSError as error:
        raise ConfigError(f"{path / METADATA}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise ConfigError(f"{path / METADATA}: is damaged, or no metadata: {_first(error)}") from None
    if not isinstance(metadata, Metadata):
        raise ConfigError(f"{path / METADATA}: is not the metadata of torch.distributed.checkpoint")
    return metadata


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    objects: Mapping[str, Any],
) -> None:
    """Write a folder; tensors are read one after another.

    Args:
        path: the folder, which is made.
        tensors: by key, dtype and shape.
        read: function of a key that returns the tensor.
        objects: what is no tensor, by key.

    Raises:
        OSError: it cannot be written.
    """
    planner = _LazySavePlanner(read)
    empty = {
        key: torch.empty(shape, dtype=DTYPES[dtype], device="meta") for key, (dtype, shape) in tensors.items()
    }
    planner.set_up_planner(empty | dict(objects), is_coordinator=True)
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])


class _LazySavePlanner(DefaultSavePlanner):
    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        item = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(item, Tensor) and item.is_meta else item


def optimizer_of(options: Mapping[str, Mapping[str, Any]], slots: set[str], place: str) -> str:
    """The class of the optimiser, which such a folder does not name, by its options and what it keeps.

    Raises:
        ConfigError: they do not show it.

    >>> optimizer_of({"0.weight": {"decoupled_weight_decay": True}}, {"exp_avg", "step"}, "")
    'AdamW'
    """
    names = {option for values in options.values() for option in values}
    decoupled = {values.get("decoupled_weight_decay") for values in options.values()}
    if "exp_avg" in slots and decoupled in ({True}, {False}):
        return "AdamW" if decoupled == {True} else "Adam"
    if "nesterov" in names and slots <= {"momentum_buffer"}:
        return "SGD"
    raise ConfigError(
        f"{place}: does not show of which optimiser its state is; give --optimizer with the name of the class"
    )


def flat(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """An optimiser's options by the folder's keys; the learning rate that a schedule begins with is there.

    >>> flat({"0.weight": {"lr": 0.1, "momentum": 0.9}})  # doctest: +NORMALIZE_WHITESPACE
    {'optimizer.param_groups.0.weight.initial_lr': 0.1, 'optimizer.param_groups.0.weight.lr': 0.1,
     'optimizer.param_groups.0.weight.momentum': 0.9}
    """
    return {
        f"{OPTIMIZERS[0]}.param_groups.{name}.{option}": value
        for name, values in options.items()
        for option, value in cast("dict[str, Any]", {"initial_lr": values.get("lr"), **values}).items()
    }
