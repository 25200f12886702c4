"""Reads checkpoints: all of one, or what a worker of another layout needs of it.

Invariant: nothing of a file is used before its contents were compared with the digest in the index; files are
mapped, and of tensors only those parts are read that are wanted.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.base import Transport

from . import files
from .index import CHECKPOINT, INDEX, Index, complete
from .state import AVERAGE, MODEL, OPTIMIZER, dtype_of, kept_of, load, name_in_file, wanted


def load_weights(path: Path | str, *, ema: bool = False) -> dict[str, Tensor]:
    """The weights of a checkpoint, for ``model.load_state_dict``.

    Args:
        path: the folder of a run or of checkpoints, of which the last complete one is read; or the folder of
            one of them.
        ema: whether trained weights are their averages, where there is one.

    Returns:
        Parameters and buffers by their names in the model, on the CPU.

    Raises:
        ConfigError: there is no checkpoint, it is damaged, or has no average.
    """
    return Checkpoint.load(Path(path), str(path)).weights(ema=ema)


class DamagedError(ConfigError):
    """What is on the disk is not what was written."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        index: what belongs to it.
        place: who asked for it, for errors.
    """

    path: Path
    index: Index
    place: str
    _open: dict[str, Any] = field(default_factory=dict)
    """By name: files that were compared with their digests."""

    @classmethod
    def load(cls, path: Path, place: str) -> Checkpoint:
        """Find the last complete checkpoint; its files are there and as long as they were.

        Args:
            path: the folder of a run or of checkpoints, that of one of them, or its ``checkpoint.json``.
            place: who asked for it, for errors.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        if not path.exists():
            raise ConfigError(f"{place}: there is no such file or folder")
        if path.is_file():
            folder = path.parent
            index = Index.load(path, place)
        else:
            folder = found_in(path) or path
            if not (folder / INDEX).exists():
                old = next((p for p in (path / INDEX, path / CHECKPOINT / INDEX) if p.is_file()), None)
                if old is not None:
                    Index.load(old, place)  # tells the version
                raise ConfigError(
                    f"{place}: is no checkpoint, and has none that is complete; give the folder of a run of "
                    "`counterflow train`"
                )
            index = Index.load(folder / INDEX, place)
        found = cls(folder, index, place)
        for name, file in index.files.items():
            found._refuse(files.problem_of(folder / name, file, whole=False))
        return found

    def _refuse(self, problem: str) -> None:
        if problem:
            raise DamagedError(
                f"{self.place}: {self.path} is damaged: {problem}; go on from another checkpoint"
            )

    @property
    def step(self) -> int:
        """Updates made."""
        return self.index.step

    def verify(self, transport: Transport | None = None) -> None:
        """Compare the contents of all files with their digests.

        Args:
            transport: with one all workers call it, and each compares its share.

        Raises:
            ConfigError: one differs; on all workers.
        """
        rank, world = (transport.rank, transport.world_size) if transport is not None else (0, 1)
        problem = ""
        for name in sorted(self.index.files)[rank::world]:
            problem = problem or files.problem_of(self.path / name, self.index.files[name], whole=True)
        problems = transport.gather_objects(problem) if transport is not None else [problem]
        for found in problems:
            self._refuse(str(found))

    def read_into(self, pipeline: Pipeline, *, training: bool = True, options: bool = True) -> None:
        """Put a pipeline where the training was that wrote this; all workers call it.

        Args:
            pipeline: of the same model, under any schedule.
            training: whether its optimiser goes on too, and steps are counted and numbers drawn from there.
            options: whether the optimiser's options and the learning rate's schedule are read too.

        Raises:
            ConfigError: it does not fit, or is damaged.
        """
        from .dcp import fill  # noqa: PLC0415 - it takes a while

        if not self.step and not self.index.has_training:  # weights that a training begins with
            training = False
        pipeline.settle("reading a checkpoint")
        steps = pipeline.transport.gather([float(self.step)])
        for rank, (step,) in enumerate(steps):
            if step != steps[0][0]:
                raise ConfigError(
                    f"rank {rank} goes on from step {step:g} and rank 0 from step {steps[0][0]:g}: let "
                    "all see the same folder"
                )
        tensors, keys = wanted(pipeline, self.index, self.place, training=training)
        self.verify(pipeline.transport)
        fill(tensors, keys, self.index, self._slice)
        objects = self.objects(theirs for key, theirs in keys.items() if key not in tensors)
        state = {key: tensors[key] if key in tensors else objects[theirs] for key, theirs in keys.items()}
        load(pipeline, state, self.place, training=training, options=options)
        if training:
            pipeline.steps = self.step
            if options:
                pipeline.streams.seed = self.index.seed

    # -- all of it, in one process

    @property
    def model(self) -> dict[str, Any]:
        """Parameters, buffers and extra state, by all their names in the model."""
        return self.weights()

    def weights(self, *, ema: bool = False) -> dict[str, Any]:
        """The same; with ``ema`` trained weights are their averages.

        Raises:
            ConfigError: there is no average.
        """
        self.verify()
        found = {name: self.weight(name, ema=ema) for name in self.names(ema=ema)}
        for first, names in self.index.aliases.items():
            if first in found:
                found |= dict.fromkeys(names, found[first])
        extra = [key for key in self.index.objects if key.startswith(f"{MODEL}/")]
        return found | {key.partition("/")[2]: value for key, value in self.objects(extra).items()}

    def names(self, *, ema: bool = False) -> list[str]:
        """The first names of all weights and buffers.

        Raises:
            ConfigError: averages are wanted, and there are none.
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
        """By name of a parameter: what the optimiser keeps for it."""
        self.verify()
        found: dict[str, dict[str, Any]] = {}
        numbers = self.objects(key for key in self.index.objects if kept_of(key).kind == OPTIMIZER)
        for key in (*numbers, *self.index.tensors):
            kind, name, slot = kept_of(key)
            if kind == OPTIMIZER:
                kept = found.setdefault(str(name), {})
                if slot is not None:
                    kept[slot] = numbers[key] if key in numbers else self.tensor(key)
        return found

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, put together from its pieces."""
        stored = self.index.tensors[key]
        pieces = [
            (chunk, self._slice(chunk.file, key, tuple(slice(0, n) for n in chunk.sizes)))
            for chunk in stored.chunks
        ]
        if len(pieces) == 1:
            return pieces[0][1]
        whole = torch.empty(stored.shape, dtype=pieces[0][1].dtype)
        for chunk, piece in pieces:
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
        return whole

    def objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is no tensor, by key."""
        found = {}
        for key in sorted(keys):
            name = self.index.objects[key]
            if name not in self._open:
                try:
                    self._open[name] = torch.load(self.path / name, map_location="cpu", weights_only=True)
                except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
                    self._refuse(f"{name} cannot be read ({type(error).__name__})")
            found[key] = self._open[name][key]
        return found

    def file(self, name: str) -> bytes:
        """The contents of a further file.

        Raises:
            ConfigError: it is damaged.
        """
        self._refuse(files.problem_of(self.path / name, self.index.files[name], whole=True))
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


def found_in(path: Path) -> Path | None:
    """The last complete checkpoint in the folder of a run or of checkpoints; or the folder, if it is one."""
    if (path / INDEX).is_file() and (path / INDEX).parent.name.startswith("step-"):
        return path
    every = complete(path / CHECKPOINT) or complete(path)
    return every[-1] if every else None
