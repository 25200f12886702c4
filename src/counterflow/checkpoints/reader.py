"""Reads checkpoints: a whole one, or the parts that a worker of another layout needs.

Invariant: a file is used only after its contents were compared with the digest in the index; files are
mapped, and only the needed parts of tensors are read.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.state_format import refuse_untied
from counterflow.runtime.transport.base import Transport

from . import files
from .index import CHECKPOINT, INDEX, METADATA, DamagedError, Index, complete
from .state_tables import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    dtype_of,
    name_in_file,
    prepare,
    state_name,
    tied_keys,
    wanted,
)


def load_weights(path: Path | str, *, ema: bool = False) -> dict[str, Tensor]:
    """The weights of a checkpoint, for ``model.load_state_dict``.

    Args:
        path: folder of a run or of checkpoints, of which the last complete one is read; or folder of a
            checkpoint.
        ema: whether to return averages of the trained weights.

    Returns:
        Parameters and buffers by their names in the model, on the CPU.

    Raises:
        ConfigError: the checkpoint does not exist, is damaged, or has no average.
    """
    return Checkpoint.load(Path(path), str(path)).weights(ema=ema)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: folder of the checkpoint.
        index: its index.
        place: what names it, for errors.
    """

    path: Path
    index: Index
    place: str
    _open: dict[str, Any] = field(default_factory=dict)
    """Files by name that were compared with their digests."""
    _compared: set[str] = field(default_factory=set)
    """Names of the files whose digests all workers together have compared."""

    @classmethod
    def load(cls, path: Path, place: str) -> Checkpoint:
        """Find the last complete checkpoint; its files have to exist with their lengths.

        Args:
            path: folder of a run or of checkpoints, folder of a checkpoint, or its ``checkpoint.json``.
            place: what names it, for errors.

        Raises:
            ConfigError: no checkpoint exists, or it is damaged.
        """
        if not path.exists():
            raise ConfigError(f"{place}: no such file or folder")
        if path.is_file():
            folder = path.parent
            index = Index.load(path, place)
        else:
            folder = found_in(path) or path
            if not (folder / INDEX).exists():
                old = next((p for p in (path / INDEX, path / CHECKPOINT / INDEX) if p.is_file()), None)
                if old is not None:
                    Index.load(old, place)  # checks the version
                if (path / METADATA).is_file():
                    raise ConfigError(
                        f"{place}: is a folder of torch.distributed.checkpoint; convert it first with "
                        f"`counterflow convert {place} NEW`"
                    )
                raise ConfigError(
                    f"{place}: is not a checkpoint, and contains no complete one; give the folder of a run "
                    "of `counterflow train`"
                )
            index = Index.load(folder / INDEX, place)
        checkpoint = cls(folder, index, place)
        for name, file in index.files.items():
            checkpoint._refuse(files.problem_of(folder / name, file, contents=False))
        return checkpoint

    def _refuse(self, problem: str) -> None:
        if problem:
            damaged = f"{self.path} is damaged: {problem}"
            error = DamagedError(f"{self.place}: {damaged}; resume from another checkpoint")
            error.problem = damaged
            raise error

    @property
    def step(self) -> int:
        """Number of updates made."""
        return self.index.step

    def verify(self, transport: Transport | None = None) -> None:
        """Compare the contents of all files with their digests.

        Args:
            transport: if given, all workers call it, and each compares its share; a second call compares
                nothing.

        Raises:
            DamagedError: a file differs; raised on all workers.
        """
        if transport is not None and self._compared:
            return
        rank, world = (transport.rank, transport.world_size) if transport is not None else (0, 1)
        problem = ""
        for name in sorted(self.index.files)[rank::world]:
            problem = problem or files.problem_of(self.path / name, self.index.files[name], contents=True)
        problems = transport.gather_objects(problem) if transport is not None else [problem]
        for reported in problems:
            self._refuse(str(reported))
        if transport is not None:
            self._compared.update(self.index.files)

    def read_into(self, pipeline: Pipeline, *, training: bool = True, options: bool = True) -> None:
        """Load this checkpoint into a pipeline; all workers call it.

        Args:
            pipeline: a pipeline of the same model, with any schedule.
            training: whether to resume the optimiser, the count of steps and random draws too.
            options: whether to load the optimiser's options and the learning rate's schedule too.

        Raises:
            ConfigError: the checkpoint does not fit, or is damaged.
        """
        from .dcp import fill  # noqa: PLC0415 - it takes a while

        if not self.step and not self.index.has_training:  # weights with which a training begins
            training = False
        pipeline.settle("reading a checkpoint")
        steps = pipeline.transport.gather([float(self.step)])
        for rank, (step,) in enumerate(steps):
            if step != steps[0][0]:
                raise ConfigError(
                    f"rank {rank} resumes from step {step:g} but rank 0 from step {steps[0][0]:g}; give "
                    "all the same shared folder"
                )
        with _agreed(pipeline.transport):
            tensors, keys = wanted(pipeline, self.index, self.place, training=training)
        self.verify(pipeline.transport)
        for key, further_key in tied_keys(pipeline, self.index):
            names = (name_in_file(key), name_in_file(further_key))
            refuse_untied(self.place, names, (self.tensor(key), self.tensor(further_key)))
        fill(tensors, keys, self.index, self._slice)
        objects = self.objects(stored_key for key, stored_key in keys.items() if key not in tensors)
        state = {
            key: tensors[key] if key in tensors else objects[stored_key] for key, stored_key in keys.items()
        }
        with _agreed(pipeline.transport):
            load = prepare(pipeline, state, self.place, training=training, options=options)
        load()
        if training:
            pipeline.steps = self.step
            if options:
                pipeline.streams.seed = self.index.seed

    @property
    def model(self) -> dict[str, Any]:
        """Parameters, buffers and extra state, by all their names in the model."""
        return self.weights()

    def weights(self, *, ema: bool = False) -> dict[str, Any]:
        """Parameters, buffers and extra state as in ``model``; with ``ema`` averages of the trained weights.

        Raises:
            ConfigError: the checkpoint has no average.
        """
        self.verify()
        weights = {name: self.weight(name, ema=ema) for name in self.names(ema=ema)}
        for first, names in self.index.aliases.items():
            if first in weights:
                weights |= dict.fromkeys(names, weights[first])
        extra = [key for key in self.index.objects if key.startswith(f"{MODEL}/")]
        return weights | {key.partition("/")[2]: value for key, value in self.objects(extra).items()}

    def names(self, *, ema: bool = False) -> list[str]:
        """The first names of all weights and buffers.

        Raises:
            ConfigError: averages are asked for, but the checkpoint has none.
        """
        if ema and not any(key.startswith(f"{AVERAGE}/") for key in self.index.tensors):
            raise ConfigError(f"{self.place}: has no average of the weights; train with train.ema_decay")
        prefix = f"{MODEL}/"
        return [key.removeprefix(prefix) for key in self.index.tensors if key.startswith(prefix)]

    def weight(self, name: str, *, ema: bool = False) -> Tensor:
        """A whole weight or buffer by its first name; with ``ema`` its average, in the weight's dtype."""
        key, average = f"{MODEL}/{name}", f"{AVERAGE}/{name}"
        if ema and average in self.index.tensors:
            return self.tensor(average).to(dtype_of(self.index.tensors[key], self.place))
        return self.tensor(key)

    @property
    def optimizer(self) -> dict[str, dict[str, Any]]:
        """Optimiser state of each parameter, by its name."""
        self.verify()
        state: dict[str, dict[str, Any]] = {}
        numbers = self.objects(key for key in self.index.objects if state_name(key).kind == OPTIMIZER)
        for key in (*numbers, *self.index.tensors):
            kind, name, slot = state_name(key)
            if kind == OPTIMIZER:
                slots = state.setdefault(str(name), {})
                if slot is not None:
                    slots[slot] = numbers[key] if key in numbers else self.tensor(key)
        return state

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, assembled from its pieces."""
        stored = self.index.tensors[key]
        pieces = [
            (chunk, self._slice(chunk.file, key, tuple(slice(0, n) for n in chunk.sizes)))
            for chunk in stored.chunks
        ]
        if len(pieces) == 1:
            return pieces[0][1]
        tensor = torch.empty(stored.shape, dtype=pieces[0][1].dtype)
        for chunk, piece in pieces:
            tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
        return tensor

    def objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Objects that are not tensors, by key."""
        objects = {}
        for key in sorted(keys):
            name = self.index.objects[key]
            if name not in self._open:
                try:
                    self._open[name] = torch.load(self.path / name, map_location="cpu", weights_only=True)
                except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
                    self._refuse(f"{name} cannot be read ({type(error).__name__})")
            objects[key] = self._open[name][key]
        return objects

    def file(self, name: str) -> bytes:
        """The contents of a further file.

        Raises:
            ConfigError: the file is damaged.
        """
        self._refuse(files.problem_of(self.path / name, self.index.files[name], contents=True))
        return (self.path / name).read_bytes()

    def _slice(self, file: str, key: str, slices: tuple[slice, ...]) -> Tensor:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            opened, name = self._open[file], name_in_file(key)
            return cast("Tensor", opened.get_slice(name)[slices] if slices else opened.get_tensor(name))
        except (SafetensorError, OSError) as error:
            self._refuse(f"{file} cannot be read: {str(error)[:200]}")
            raise


@contextmanager
def _agreed(transport: Transport) -> Iterator[None]:
    # Before anything is loaded: a checkpoint that does not fit one worker is loaded by none.
    error: ConfigError | None = None
    try:
        yield
    except DamagedError:  # the others see that this worker ends
        raise
    except ConfigError as refusal:
        error = refusal
    messages = transport.gather_objects(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ConfigError(f"rank {rank} cannot load it: {message}")


def damage(folder: Path) -> str:
    """Problem of a checkpoint whose index or whose files' lengths differ; empty if there is none.

    Contents are not read, so a file with a changed bit has no problem here.
    """
    try:
        Checkpoint.load(folder, str(folder))
    except DamagedError as error:
        return error.problem
    except ConfigError:  # another version
        return ""
    return ""


def found_in(path: Path) -> Path | None:
    """The last complete checkpoint in the folder of a run or of checkpoints, or the folder itself if it is
    one.
    """
    if (path / INDEX).is_file() and (path / INDEX).parent.name.startswith("step-"):
        return path
    checkpoints = complete(path / CHECKPOINT) or complete(path)
    return checkpoints[-1] if checkpoints else None
