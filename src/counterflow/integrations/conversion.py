"""Conversion of a checkpoint's weights into one safetensors file or a folder of transformers, and back; and
of a whole checkpoint into a folder of torchtitan, and back.

Invariant: tensors are read and written one after another, unchanged bit for bit; the target exists whole or
not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from counterflow.checkpoints import files
from counterflow.checkpoints.index import INDEX, METADATA, Chunk, Index, Stored, Written, name_of
from counterflow.checkpoints.reader import Checkpoint
from counterflow.checkpoints.state_tables import (
    MODEL,
    OPTIMIZER,
    OPTIONS,
    SCHEDULER,
    file_of,
    name_in_file,
)
from counterflow.common.json_models import Result, result_of
from counterflow.errors import ConfigError, CounterflowError
from counterflow.models.hf.folder_files import SINGLE, files_by_tensor, has_weights

from .transformers.model_files import Read, Table, by_file_names, by_model_names

if TYPE_CHECKING:
    from .torchtitan.model_names import TitanNames

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion.

    Attributes:
        path: the file or folder.
        kind: kind of the target, for people.
        tensors: number of its tensors.
        bytes: size of the file of weights.
    """

    path: Path
    kind: str
    tensors: int
    bytes: int


ConvertedShown = result_of("`counterflow convert`.", Result, Converted)


def convert(
    source: Path,
    target: Path,
    model: Path | None = None,
    *,
    ema: bool = False,
    torchtitan: bool = False,
    optimizer: str | None = None,
) -> Converted:
    """Convert weights from one form into another, or a whole training to or from torchtitan's.

    Args:
        source: a run or a checkpoint; a safetensors file; a folder of transformers with such files; or one of
            torch.distributed.checkpoint, as torchtitan writes it.
        target: a path that ends with ``.safetensors``; otherwise a folder: of transformers or torchtitan if
            ``source`` is a checkpoint, or of checkpoints, with one of the source's step, if it is not. It
            must not exist.
        model: a folder of transformers. Its config and tokenizer are written with a checkpoint's weights
            (default: the run's); or a new checkpoint has the names of its model in place of those of files
            (default: ``source`` if it has a config) or of torchtitan.
        ema: whether to convert averages of the trained weights, in the weights' precision.
        torchtitan: whether the target is a folder of torchtitan, with the optimiser's state.
        optimizer: class of the optimiser whose state a folder of torchtitan has, if that does not show it.

    Raises:
        ConfigError: the source is something else or damaged, has no averages, or is of another model; or the
            target exists.
        CounterflowError: the target cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: exists already; name a new file or folder")
    into_file = target.suffix == ".safetensors"
    of_torch = (source / METADATA).is_file()
    weights_only = source.suffix == ".safetensors" or has_weights(source)
    if optimizer is not None and (into_file or not of_torch):
        raise ConfigError(
            f"--optimizer {optimizer}: is for the state in a folder of torchtitan; leave it out here"
        )
    if torchtitan:
        _require_training(source, target, ema=ema, is_run=not (of_torch or weights_only))
    if model is not None and into_file and not of_torch:
        raise ConfigError(
            f"{model}: a safetensors file contains weights only; leave out --model, or name a folder"
        )
    if not (of_torch or weights_only):
        return _from_checkpoint(source, target, model, ema=ema, torchtitan=torchtitan)
    if ema:
        raise ConfigError(f"{source}: contains weights only, and no average of them; leave out --ema")
    if of_torch:
        return _from_torch(source, target, optimizer, model, into_file=into_file)
    opened = _Files(source)
    if into_file:
        return _into_file(opened.sizes, opened.read, target)
    table: Table = opened.sizes
    read: Read = opened.read
    folder = model or (source if source.is_dir() else None)
    if folder is not None:
        table, read = by_model_names(opened.sizes, opened.read, folder)
    return _into_checkpoint(_TrainingState({MODEL: table}, lambda _, name: read(name)), target)


def _require_training(source: Path, target: Path, *, ema: bool, is_run: bool) -> None:
    if not is_run:
        raise ConfigError(f"{source}: is not the checkpoint of a run; convert it to one first")
    for present, flag in (
        (ema, "--ema"),
        (target.suffix == ".safetensors", ".safetensors"),
    ):
        if present:
            raise ConfigError(
                f"{target}: torchtitan goes on with the weights and the optimiser's state in a folder; leave "
                f"out {flag}"
            )


def _from_checkpoint(
    source: Path, target: Path, model: Path | None, *, ema: bool, torchtitan: bool
) -> Converted:
    checkpoint = Checkpoint.load(source, str(source))
    checkpoint.verify()
    table, read = _weights_of(checkpoint, ema=ema), partial(checkpoint.weight, ema=ema)
    if torchtitan:
        return _into_torchtitan(checkpoint, table, target, model)
    if target.suffix == ".safetensors":
        return _into_file(table, read, target)
    return _into_transformers(checkpoint, table, read, target, model)


class _Files:
    def __init__(self, source: Path) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        if source.is_file() or source.suffix == ".safetensors":
            paths = [source]
        else:
            paths = [source / name for name in sorted({*files_by_tensor(source).values()})]
        try:
            self._open: dict[str, Any] = {}
            self.sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
            for path in paths:
                opened: Any = safe_open(path, framework="pt")
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    part = opened.get_slice(name)
                    if part.get_dtype() not in files.DTYPES:
                        raise ConfigError(
                            f"{path}: {name} is {part.get_dtype()}, which this Counterflow does not support"
                        )
                    self._open[name] = opened
                    self.sizes[name] = part.get_dtype(), tuple(part.get_shape())
        except FileNotFoundError as error:
            raise ConfigError(f"{source}: no such file: {error.filename or error}") from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{source}: cannot be read as safetensors: {str(error)[:200]}") from None

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        tensor: Tensor = self._open[name].get_tensor(name)
        return tensor


def _weights_of(checkpoint: Checkpoint, *, ema: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    extra = next((key for key in checkpoint.index.objects if key.startswith(f"{MODEL}/")), None)
    if extra is not None:
        raise ConfigError(
            f"{checkpoint.place}: {extra.partition('/')[2]} is not a tensor, and a safetensors "
            "file contains only tensors; read the checkpoint by counterflow.load_weights"
        )
    stored = checkpoint.index.tensors
    return {
        name: (stored[f"{MODEL}/{name}"].dtype, stored[f"{MODEL}/{name}"].shape)
        for name in checkpoint.names(ema=ema)
    }


def _into_file(table: Any, read: Any, target: Path) -> Converted:
    with _draft(target) as draft:
        written = files.write_tensors(draft, table, read)
    return Converted(target, "weights in one safetensors file", len(table), written.bytes)


def _into_transformers(
    checkpoint: Checkpoint,
    table: Table,
    read: Read,
    target: Path,
    model: Path | None,
) -> Converted:
    if _config(checkpoint).get("lora", {}).get("rank") is not None:
        raise ConfigError(
            f"{checkpoint.place}: contains adapters in addition to a model's weights; the folder "
            "`adapter` of the run contains them as peft reads them"
        )
    model_folder = model or _model_folder(checkpoint)
    if model_folder is None or not (model_folder / "config.json").is_file():
        raise ConfigError(
            f"{target}: a folder of transformers needs the model's config, but {str(model_folder or '.')!r} "
            "has no config.json; give --model FOLDER, or a target that ends with .safetensors"
        )
    sizes, read_piece = by_file_names(table, read, model_folder)
    with _draft(target) as draft:
        draft.mkdir(parents=True)
        for file in sorted(model_folder.iterdir()):
            if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)
        _note_dtype(draft / "config.json", {dtype for dtype, _ in table.values()})
        written = files.write_tensors(draft / SINGLE, sizes, read_piece)
        files.settle(draft)
    return Converted(target, "a folder that transformers reads", len(sizes), written.bytes)


def _note_dtype(config: Path, dtypes: set[str]) -> None:
    # transformers would round the weights to the dtype in the config.
    floats = {
        str(files.DTYPES[d]).removeprefix("torch.") for d in dtypes if files.DTYPES[d].is_floating_point
    }
    if len(floats) == 1:
        keys = json.loads(config.read_bytes())
        keys.pop("torch_dtype", None)
        keys["dtype"] = floats.pop()
        config.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _TrainingState:
    """The state of a training, to be written as a checkpoint.

    Attributes:
        tensors: by kind (the weights, the optimiser's state), tables by the rest of the key.
        read: function of a kind and the rest of a key that returns the tensor.
        objects: what is no tensor, by key.
        step: number of updates made.
    """

    tensors: Mapping[str, Table]
    read: Callable[[str, str], Tensor]
    objects: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0

    def read_named(self, kind: str, of_file: Mapping[str, str], name: str) -> Tensor:
        """Read a tensor by its name in a file."""
        return self.read(kind, of_file[name])


def _into_checkpoint(state: _TrainingState, target: Path) -> Converted:
    with _draft(target) as root:
        draft = root / name_of(state.step)
        draft.mkdir(parents=True)
        tensors: dict[str, Stored] = {}
        written: dict[str, Written] = {}
        for kind, table in state.tensors.items():
            keys = {f"{kind}/{name}": (name, size) for name, size in table.items()}
            of_file = {name_in_file(key): keys[key] for key in keys}
            sizes = {name: size for name, (_, size) in of_file.items()}
            file = file_of(f"{kind}/", 0, tensor=True)
            written[file] = files.write_tensors(
                draft / file,
                sizes,
                partial(
                    state.read_named,
                    kind,
                    {name: stored_name for name, (stored_name, _) in of_file.items()},
                ),
                {name: [0] * len(shape) for name, (_, shape) in sizes.items()},
            )
            for key, (_, (dtype, shape)) in keys.items():
                chunk = Chunk(file=file, offsets=(0,) * len(shape), sizes=shape)
                tensors[key] = Stored(dtype=dtype, shape=shape, chunks=(chunk,))
        file = file_of(f"{OPTIONS}/", 0, tensor=False)
        if state.objects:
            written[file] = files.write(draft / file, [files.packed(dict(state.objects))])
        index = Index(
            step=state.step,
            seed=0,
            layout="converted",
            tensors=tensors,
            objects=dict.fromkeys(state.objects, file),
            aliases={},
            files=written,
            about={},
        )
        files.write(draft / INDEX, [index.dumps()])
        files.settle(draft)
    kind = f"a checkpoint that train.resume {'goes on' if state.objects else 'begins'} with"
    return Converted(target, kind, len(tensors), sum(file.bytes for file in written.values()))


def _from_torch(
    source: Path, target: Path, optimizer: str | None, model: Path | None, *, into_file: bool
) -> Converted:
    from .torchtitan.dcp_folder import TorchFolder, optimizer_of  # noqa: PLC0415 - it takes a while
    from .torchtitan.model_names import TitanNames  # noqa: PLC0415
    from .torchtitan.training_state import ModelState  # noqa: PLC0415

    folder = TorchFolder(source)
    state = ModelState(folder, TitanNames(_model_type(model), str(model)) if model is not None else None)
    if into_file:
        return _into_file(state.weights, partial(state.read, MODEL), target)
    tensors: dict[str, Table] = {MODEL: state.weights}
    if state.slots:
        tensors[OPTIMIZER] = state.slots
    objects: dict[str, Any] = {}
    if state.options:
        optimizer_name = optimizer or optimizer_of(
            state.options, {name.rpartition("/")[2] for name in state.slots}, str(source)
        )
        objects = {
            f"{OPTIONS}/{name}": {"optimizer": optimizer_name, "options": o}
            for name, o in state.options.items()
        }
        if folder.schedule_step is not None:
            objects[f"{SCHEDULER}/0"] = {"last_epoch": folder.schedule_step}
    step = folder.step if objects else 0
    return _into_checkpoint(_TrainingState(tensors, state.read, objects, step=step), target)


def _into_torchtitan(checkpoint: Checkpoint, weights: Table, target: Path, model: Path | None) -> Converted:
    from .torchtitan.dcp_folder import write  # noqa: PLC0415 - it takes a while
    from .torchtitan.training_state import titan_state  # noqa: PLC0415

    state = titan_state(checkpoint, weights, _titan_names(checkpoint, weights, model))
    with _draft(target) as draft:
        write(draft, state.sizes, lambda key: state.readers[key](), state.objects)
        files.settle(draft)
    size = sum(file.stat().st_size for file in target.iterdir())
    kind = "a folder that torchtitan goes on with (it counts its tokens anew)"
    return Converted(target, kind, len(state.sizes), size)


def _titan_names(checkpoint: Checkpoint, weights: Table, model: Path | None) -> TitanNames | None:
    """Names in torchtitan of a model of transformers; None: the checkpoint is of another model.

    Raises:
        ConfigError: torchtitan has no such model, or it is unknown which one it is.
    """
    from .torchtitan.model_names import TABLES, TitanNames  # noqa: PLC0415

    folder = model or _model_folder(checkpoint)
    kind = _model_type(folder)
    experts = next((name for name in weights if _OF_EXPERTS.match(name)), None)
    if model is not None or kind in TABLES or (experts and kind):
        return TitanNames(kind, str(folder))
    if experts:
        raise ConfigError(
            f"{checkpoint.place}: {experts} is of a model of transformers, whose experts have other names in "
            "torchtitan; give its folder with --model"
        )
    return None


_OF_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.")


def _model_folder(checkpoint: Checkpoint) -> Path | None:
    path = _config(checkpoint).get("model", {}).get("path")
    return None if path is None else Path(str(path))


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    return tomllib.loads(str(checkpoint.index.run.get("config", "")))


def _model_type(folder: Path | None) -> str:
    if folder is None:
        return ""
    try:
        return str(json.loads((folder / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.rename(target)
        files.settle(target.parent)
    except BaseException as error:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CounterflowError(f"cannot write {target}: {error.strerror or error}") from None
        raise
