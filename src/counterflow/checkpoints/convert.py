"""Conversion of a checkpoint's weights into one safetensors file or a folder of transformers, and back.

Invariant: tensors are read and written one after another, unchanged bit for bit; the target exists whole or
not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from counterflow.errors import ConfigError, CounterflowError
from counterflow.shown import Result, result_of

from . import files
from .index import INDEX, Chunk, Index, Stored, name_of
from .reader import Checkpoint
from .state import MODEL

SINGLE = "model.safetensors"
_SHARDS = "model.safetensors.index.json"
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


def convert(source: Path, target: Path, model: Path | None = None, *, ema: bool = False) -> Converted:
    """Convert weights from one form into another.

    Args:
        source: a run or a checkpoint; a safetensors file; or a folder of transformers with such files.
        target: a path that ends with ``.safetensors``; otherwise a folder: of transformers if ``source`` is a
            checkpoint, or of checkpoints, with one of step 0, if it is not. It must not exist.
        model: a folder of transformers whose config and tokenizer are written with a checkpoint's weights;
            default: the run's.
        ema: whether to convert averages of the trained weights, in the weights' precision.

    Raises:
        ConfigError: the source is something else or damaged, or has no averages; or the target exists.
        CounterflowError: the target cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: exists already; name a new file or folder")
    into_file = target.suffix == ".safetensors"
    if model is not None and into_file:
        raise ConfigError(
            f"{model}: a safetensors file contains weights only; leave out --model, or name a folder"
        )
    if source.suffix != ".safetensors" and not _is_of_transformers(source):
        found = Checkpoint.load(source, str(source))
        found.verify()
        table, read = _weights_of(found, ema=ema), partial(found.weight, ema=ema)
        if into_file:
            return _into_file(table, read, target)
        return _into_transformers(found, table, read, target, model)
    if ema:
        raise ConfigError(f"{source}: contains weights only, and no average of them; leave out --ema")
    opened = _Files(source)
    if into_file:
        return _into_file(opened.sizes, opened.read, target)
    if model is not None:
        raise ConfigError(f"{model}: a checkpoint contains weights only; leave out --model")
    return _into_checkpoint(opened, target)


class _Files:
    """The tensors of a safetensors file, or of those of a folder of transformers."""

    def __init__(self, source: Path) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        try:
            paths = [source] if source.is_file() or source.suffix == ".safetensors" else _shards(source)
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


def _is_of_transformers(path: Path) -> bool:
    return (path / SINGLE).is_file() or (path / _SHARDS).is_file()


def _shards(folder: Path) -> list[Path]:
    if not (folder / _SHARDS).is_file():
        return [folder / SINGLE]
    try:
        names = json.loads((folder / _SHARDS).read_bytes())["weight_map"].values()
        return [folder / Path(str(name)).name for name in sorted(set(names))]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{folder / _SHARDS}: is damaged") from None


def _weights_of(found: Checkpoint, *, ema: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    extra = next((key for key in found.index.objects if key.startswith(f"{MODEL}/")), None)
    if extra is not None:
        raise ConfigError(
            f"{found.place}: {extra.partition('/')[2]} is not a tensor, and a safetensors file contains only "
            "tensors; "
            "read the checkpoint by counterflow.load_weights"
        )
    stored = found.index.tensors
    return {
        name: (stored[f"{MODEL}/{name}"].dtype, stored[f"{MODEL}/{name}"].shape)
        for name in found.names(ema=ema)
    }


def _into_file(table: Any, read: Any, target: Path) -> Converted:
    with _draft(target) as draft:
        written = files.write_tensors(draft, table, read)
    return Converted(target, "weights in one safetensors file", len(table), written.bytes)


def _into_transformers(
    found: Checkpoint,
    table: dict[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    target: Path,
    model: Path | None,
) -> Converted:
    keys = tomllib.loads(str(found.index.about.get("config", "")))
    if keys.get("lora", {}).get("rank") is not None:
        raise ConfigError(
            f"{found.place}: contains adapters in addition to a model's weights; the folder `adapter` of the "
            "run contains them "
            "as peft reads them"
        )
    given = model or Path(str(keys.get("model", {}).get("path", "")))
    if not (given / "config.json").is_file():
        raise ConfigError(
            f"{target}: a folder of transformers needs the model's config, but {str(given)!r} has no "
            "config.json; give --model FOLDER, or a target that ends with .safetensors"
        )
    with _draft(target) as draft:
        draft.mkdir(parents=True)
        for file in sorted(given.iterdir()):
            if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)
        _note_dtype(draft / "config.json", {dtype for dtype, _ in table.values()})
        written = files.write_tensors(draft / SINGLE, table, read)
        files.settle(draft)
    return Converted(target, "a folder that transformers reads", len(table), written.bytes)


def _note_dtype(config: Path, dtypes: set[str]) -> None:
    """Write the dtype of the weights into the config: transformers would round them to the one in it."""
    floats = {
        str(files.DTYPES[d]).removeprefix("torch.") for d in dtypes if files.DTYPES[d].is_floating_point
    }
    if len(floats) == 1:
        found = json.loads(config.read_bytes())
        found.pop("torch_dtype", None)
        found["dtype"] = floats.pop()
        config.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _into_checkpoint(opened: _Files, target: Path) -> Converted:
    """Write a checkpoint of step 0, with which a training begins."""
    name = "model-0.safetensors"
    with _draft(target) as root:
        draft = root / name_of(0)
        draft.mkdir(parents=True)
        offsets = {key: [0] * len(shape) for key, (_, shape) in opened.sizes.items()}
        written = files.write_tensors(draft / name, opened.sizes, opened.read, offsets)
        tensors = {
            f"{MODEL}/{key}": Stored(
                dtype=dtype,
                shape=shape,
                chunks=(Chunk(file=name, offsets=(0,) * len(shape), sizes=shape),),
            )
            for key, (dtype, shape) in opened.sizes.items()
        }
        index = Index(
            step=0,
            seed=0,
            layout="converted",
            tensors=tensors,
            objects={},
            aliases={},
            files={name: written},
            about={},
        )
        files.write(draft / INDEX, [index.dumps()])
        files.settle(draft)
    return Converted(target, "a checkpoint that train.resume begins with", len(tensors), written.bytes)


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """A draft of the target, until it is complete."""
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
