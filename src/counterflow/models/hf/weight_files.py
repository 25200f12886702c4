"""The weights of a transformers model that was built on the meta device: each layer gets its own, and no
others.

They are read from the safetensors files of a folder, tensor by tensor, or made by the model's own rules
(``_init_weights``; those of peft for its adapters).

Invariant: no memory stays uninitialised; a tensor that neither the folder nor a rule fills is an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from counterflow.common.extras import imported
from counterflow.errors import ConfigError

from .file_forms import ALL, Load, StoredWeight, stored_weights
from .folder_files import files_by_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SOURCE = "_counterflow_folder"
"""Attribute of a model that was loaded on the meta device."""

MAKING = threading.Lock()
"""Held while transformers or peft make a model, because they change state that all threads share."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folder:
    """The tensors of a folder's safetensors files.

    Attributes:
        path: the folder.
        files: by a tensor's name in the files, its file.
        stored: by a tensor's name in the model, its form in the files.
        prefix: prefix of the base model's names in the model, which a folder may lack.
    """

    path: Path
    files: Mapping[str, str]
    stored: Mapping[str, StoredWeight]
    prefix: str

    @classmethod
    def read(cls, path: Path, model: PreTrainedModel) -> Folder:
        """Read which tensors a folder contains.

        Args:
            path: the folder.
            model: the model, whose class defines the names of its stored tensors.

        Raises:
            ConfigError: the folder has no such files, or they cannot be read.
        """
        files = files_by_tensor(path)
        prefix = model.base_model_prefix
        return cls(path, files, stored_weights(model, files), f"{prefix}." if prefix else "")

    def find(self, names: Iterable[str]) -> StoredWeight | None:
        """Form in the files of a tensor with these names in the model."""
        for name in names:
            for known in (name, name.removeprefix(self.prefix), self.prefix + name):
                if known in self.stored:
                    return self.stored[known]
        return None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by their names in the model."""
        with ExitStack() as stack:
            load = self._loader(stack)
            return {name: weight.read(load) for name, weight in self.stored.items()}

    def _loader(self, stack: ExitStack) -> Load:
        from safetensors import safe_open  # noqa: PLC0415

        opened: dict[str, Any] = {}

        def load(name: str, rows: slice) -> Tensor:
            file = self.files[name]
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(self.path / file, "pt"))
            reader = opened[file]
            tensor: Tensor = reader.get_tensor(name) if rows == ALL else reader.get_slice(name)[rows]
            return tensor

        return load

    def copy_to(self, tensors: Iterable[tuple[StoredWeight, Sequence[Tensor]]], rows: slice = ALL) -> None:
        """Read weights into tensors, each file opened once.

        Args:
            tensors: weights and the tensors that get their values.
            rows: rows of the weights that the tensors have.

        Raises:
            ConfigError: a tensor has another shape.
        """
        with ExitStack() as stack:
            load = self._loader(stack)
            for weight, copies in tensors:
                values = weight.read(load, rows)
                for tensor in copies:
                    if values.shape != tensor.shape:
                        raise ConfigError(
                            f"{self.path}: {weight.name} has shape {tuple(values.shape)}, but "
                            f"{tuple(tensor.shape)} in the model; give the config that belongs to the weights"
                        )
                    tensor.copy_(values)

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a folder without all tensors of the base model; a head may be new if it has another class.

        Raises:
            ConfigError: a tensor is missing.
        """
        its_own = type(model).__name__ in (model.config.architectures or ())
        base, prefix = model.base_model, self.prefix if model.base_model is not model else ""
        inside = {prefix + name for name in base.state_dict()}
        missing = [names for names in _names(model).values() if self.find(names) is None]
        for names in missing:
            if its_own or inside.intersection(names):
                raise ConfigError(
                    f"{self.path}: the files have no {names[0]}, which the {type(model).__name__} has; if "
                    "they store it in another form, make the model with from_pretrained on every worker"
                )
        if missing:
            _log.warning(
                "%s: the files have no %s; it is initialised",
                self.path,
                ", ".join(names[0] for names in missing),
            )


def load(
    path: Path | str,
    *,
    auto: Any = None,
    dtype: torch.dtype | str = torch.float32,
    weights: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """A model on the meta device, in training mode; in a pipeline each worker reads its own stages' weights.

    Args:
        path: a folder with ``config.json`` and safetensors files, or a name that transformers knows.
        auto: a class of transformers, such as ``AutoModelForCausalLM``; by default the one that the config
            names.
        dtype: dtype of the weights, however they are stored; ``"auto"``: as the config says.
        weights: whether they are read; otherwise the model's own rules make them.
        options: further options of the config, such as ``attn_implementation="eager"``.

    Raises:
        ConfigError: transformers is not installed; the folder or the model cannot be read, or they do not
            fit.
    """
    transformers = imported("transformers")
    config = read_config(path, **options)
    if weights and getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{path}: its weights are quantized, and are read as they are; read them with from_pretrained, "
            "which dequantizes them, and save that model"
        )
    folder = local_folder(path, weights=weights) if weights else None
    if auto is None:
        names = config.architectures or []
        auto = next((candidate for name in names if (candidate := getattr(transformers, name, None))), None)
        auto = auto or transformers.AutoModelForCausalLM
    chosen = getattr(config, "dtype", None) if dtype == "auto" else dtype
    make = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    with MAKING, torch.device("meta"):
        model: PreTrainedModel = make(config, dtype=chosen or torch.float32)
    model.train()
    model.name_or_path = str(path)
    if folder is not None:
        source = Folder.read(folder, model)
        source.check(model)
        setattr(model, _SOURCE, source)
    return model


def read_config(path: Path | str, **options: Any) -> Any:
    """The config of a model.

    Raises:
        ConfigError: the config cannot be read.
    """
    transformers = imported("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(str(path), **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path}: is not a model that transformers can read: {reason}") from None


_PADDED_POSITIONS = "camembert", "roberta", "xlm-roberta"
"""Models that number positions after the padding token's id, and have none before it."""


def most_positions(config: Any) -> int | None:
    """Maximum tokens of a sample by a model's config; None if it does not say."""
    most = getattr(config, "max_position_embeddings", None)
    if type(most) is not int:
        return None
    return most - (config.pad_token_id + 1) if config.model_type in _PADDED_POSITIONS else most


def local_folder(path: Path | str, *, weights: bool = True) -> Path:
    """The folder of a model's files: the folder itself, or transformers' cache of a name.

    Raises:
        ConfigError: the files are not available.
    """
    if Path(path).is_dir():
        return Path(path)
    hub = imported("huggingface_hub")
    wanted = ["*.json", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
    try:
        return Path(hub.snapshot_download(str(path), allow_patterns=wanted))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{path}: is not a folder, and cannot be downloaded from the hub: {reason}"
        ) from None


class Filling:
    """Fills the weights of the layers of a model that is on the meta device.

    Args:
        whole: the model of transformers.
        adapters: peft's configs, by adapter.
    """

    def __init__(self, model: PreTrainedModel, adapters: Mapping[str, Any]) -> None:
        self.meta = any(tensor.is_meta for tensor in model.parameters())
        self.folder: Folder | None = vars(model).get(_SOURCE)
        self.adapters = adapters
        self.names = _names(model) if self.meta else {}
        self.rules = _without_modules(model)
        for adapter, config in adapters.items() if self.meta else ():
            how = getattr(config, "init_lora_weights", True)
            if config.peft_type != "LORA" or how not in (True, False, "gaussian"):
                raise ConfigError(
                    f"adapter {adapter!r} cannot be made on the meta device ({config.peft_type}, "
                    f"init_lora_weights={how!r}); use LoRA with init_lora_weights True, False or "
                    "'gaussian', or build the model on a real device"
                )

    def __deepcopy__(self, memo: object) -> Filling:
        """Itself: it is immutable, and threads share it."""
        return self

    def of(self, layer: nn.Module) -> dict[str, tuple[str, ...]]:
        """For each tensor of the layer its names in the model."""
        tensors = layer.state_dict(keep_vars=True)
        return {name: self.names[id(tensor)] for name, tensor in tensors.items() if id(tensor) in self.names}

    def stored(self, names: tuple[str, ...]) -> StoredWeight | None:
        """Form in the folder's files of a tensor with these names in the model; None: it is in none."""
        return self.folder.find(names) if self.folder is not None else None

    def fill(self, layer: nn.Module, names: Mapping[str, tuple[str, ...]]) -> None:
        """Give the tensors of a layer their values, except those that are on the meta device.

        Raises:
            ConfigError: no rule defines a tensor.
        """
        tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
        tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        with torch.no_grad(), _unset(tensors) as unset:
            # peft has a copy of modules that are trained in addition to adapters
            read: dict[str, tuple[StoredWeight, list[Tensor]]] = {}
            for name, tensor in tensors.items():
                weight = self.stored(names.get(name, ()))
                if weight is not None:
                    read.setdefault(weight.name, (weight, []))[1].append(tensor)
                    tensor._is_hf_initialized = True  # type: ignore[attr-defined] # a rule leaves it alone
            layer.apply(self._make)
            for _, copies in read.values():
                for tensor in copies:
                    del tensor._is_hf_initialized  # type: ignore[attr-defined]
            if self.folder is not None:
                self.folder.copy_to(read.values())
        if unset:
            raise ConfigError(
                f"{unset[0]} of a {type(self.rules).__name__} is on the meta device, but its "
                "_init_weights does not make it; build the model on a real device"
            )

    def _make(self, module: nn.Module) -> None:
        if self.adapters and callable(reset := getattr(module, "reset_lora_parameters", None)):
            for adapter, config in self.adapters.items():
                reset(adapter, config.init_lora_weights)
        else:
            self.rules._init_weights(module)


@contextmanager
def _unset(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    marks = {name: _mark(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.fill_(marks[name])
    unset: list[str] = []
    yield unset
    for name, tensor in tensors.items():
        mark = marks[name]
        odd = tensor.isnan() if mark != mark else tensor == mark  # noqa: PLR0124
        if tensor.dtype is not torch.bool and odd.any():
            unset.append(name)


def _mark(tensor: Tensor) -> Any:
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min


def _names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each tensor by its identity, without peft's additions.

    >>> _names(nn.Sequential(nn.Linear(1, 1, bias=False))).values()
    dict_values([('0.weight',)])
    """
    by_id: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_id.setdefault(id(tensor), []).append(original_name(name))
    return {key: tuple(names) for key, names in by_id.items()}


def original_name(name: str) -> str:
    """Name of a tensor in the model before peft added adapters.

    >>> original_name("model.layers.0.q_proj.base_layer.weight")
    'model.layers.0.q_proj.weight'
    >>> original_name("lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    parts = iter(name.split("."))
    remaining = []
    for part in parts:
        if part == "modules_to_save":
            next(parts, None)
        elif part not in ("base_layer", "original_module"):
            remaining.append(part)
    return ".".join(remaining)


def _without_modules(model: PreTrainedModel) -> Any:
    rules = object.__new__(type(model))
    nn.Module.__init__(rules)
    rules.__dict__.update({name: value for name, value in vars(model).items() if name == "config"})
    return rules


class Layer(nn.Module):
    """A layer of the list: its weights can be made, or read, on its worker."""

    def fill_with(self, filling: Filling) -> None:
        """Note how the weights are made if the layer is on the meta device."""
        self.filling, self.names = filling, filling.of(self)

    def make_weights(self) -> None:
        """Fill weights from the model's folder, or by its own rules, except those on the meta device."""
        self.filling.fill(self, self.names)

    def reads_rows(self, name: str) -> bool:
        """True if rows of a weight can be read without the others."""
        return not self.filling.adapters and self.filling.stored(self.names.get(name, ())) is not None

    def read_rows(self, name: str, target: Tensor, first: int) -> None:
        """Read rows of a weight, as many as a tensor has, beginning with a number."""
        weight, folder = self.filling.stored(self.names[name]), self.filling.folder
        assert weight is not None
        assert folder is not None
        with torch.no_grad():
            folder.copy_to([(weight, [target])], slice(first, first + target.shape[0]))
