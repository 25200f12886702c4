"""A run's checkpoint: weights by the model's own names, the optimiser's state by the same names, the step.

A folder with ``checkpoint.json``, which says what belongs to it, and a file for each stage, written by the
first worker that holds it: no worker ever has the whole model. Files are read by mapping them into memory.

Invariant: a checkpoint does not depend on the schedule it was made under: a run may go on under another
scheme, depth or width. ``checkpoint.json`` is written last, in place of the one before; until then that one
is whole.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterflow.errors import ConfigError, CounterflowError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.layers import ListLayers, Model, layers_of, state_names

from .folder import CHECKPOINT, INDEX, whole

FORMAT = "counterflow-checkpoint"
VERSION = 2

_DAMAGE = RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError
"""What reading a file that is no checkpoint may raise."""

OptimizerState = dict[str, dict[str, Any]]
"""By the name of a parameter: what the optimiser keeps for it."""


def save(pipeline: Pipeline, kind: str, folder: Path) -> None:
    """Write a pipeline's checkpoint, in place of the one before; all workers call it.

    Args:
        pipeline: with nothing under way.
        kind: of its optimiser.
        folder: of checkpoints, on storage that all workers share.

    Raises:
        WorkerError: the copies of a stage differ.
        CounterflowError: it cannot be written.
    """
    weights, transport = pipeline.weights, pipeline.transport
    weights.check_copies(f"after {pipeline.steps} steps")
    part = f"step-{pipeline.steps}"
    for stage, holders in enumerate(weights.holders):
        if transport.rank == pipeline.ranks[0][holders[0]]:
            (folder / part).mkdir(parents=True, exist_ok=True)
            found = {"model": weights.state_dict(stage), "optimizer": _optimizer_state(pipeline, stage)}
            with whole(folder / part / _file(stage)) as file:
                torch.save(found, file)
    transport.gather([])  # all are written
    if transport.rank:
        return
    files = [f"{part}/{_file(stage)}" for stage in range(len(weights.holders))]
    for name in files:
        if not (folder / name).exists():
            raise CounterflowError(
                f"rank 0 does not see {folder / name}, which another worker wrote; give a folder on "
                "storage that all machines share as train.out"
            )
    index = {
        "format": FORMAT,
        "format_version": VERSION,
        "step": pipeline.steps,
        "optimizer": kind,
        "stages": len(files),
        "files": files,
    }
    with whole(folder / INDEX) as file:
        file.write((json.dumps(index, indent=2) + "\n").encode())
    for old in folder.glob("step-*"):
        if old.name != part:
            shutil.rmtree(old, ignore_errors=True)


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """The weights that a run came to, for ``model.load_state_dict``.

    Args:
        path: the run's folder.

    Returns:
        Parameters and buffers by their names in the model, on the CPU, mapped from their files: a run that
        goes on removes these when it writes its next checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or it is damaged.
    """
    return Checkpoint.load(Path(path), str(path)).model


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a run can go on from.

    Attributes:
        step: updates made.
        model: parameters and buffers by their names in the model.
        optimizer: what the optimiser keeps for each parameter.
        kind: which optimiser that is.
        path: where it was read from.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: OptimizerState
    kind: str
    path: Path

    @classmethod
    def load(cls, path: Path, place: str) -> Checkpoint:
        """Read what ``save`` wrote.

        Args:
            path: its folder, the ``checkpoint.json`` in it, or the folder of a run.
            place: who asked for it, for errors.

        Raises:
            ConfigError: it cannot be read, or is something else.
        """
        if not path.exists():
            raise ConfigError(f"{place}: there is no such file or folder")
        index = next((p for p in (path / INDEX, path / CHECKPOINT / INDEX) if p.exists()), path)
        damaged = ConfigError(
            f"{place}: is no checkpoint of a run, or damaged; give the folder of a run of `counterflow train`"
        )
        try:
            data = json.loads(index.read_bytes())
            mine, version = data["format"] == FORMAT, data["format_version"]
            names = data["files"] if mine and version == VERSION else ()
            parts = [
                torch.load(index.parent / name, map_location="cpu", weights_only=True, mmap=True)
                for name in names
            ]
            model = {name: tensor for part in parts for name, tensor in part["model"].items()}
            optimizer = {name: state for part in parts for name, state in part["optimizer"].items()}
            step, kind, stages = int(data["step"]), str(data["optimizer"]), int(data.get("stages", 0))
        except IsADirectoryError:
            raise damaged from None
        except OSError as error:
            raise ConfigError(f"{place}: cannot be read: {error.filename}: {error.strerror}") from None
        except _DAMAGE:
            raise damaged from None
        if mine and version != VERSION:
            raise ConfigError(
                f"{place}: is a checkpoint of version {version}, and this Counterflow reads version "
                f"{VERSION}; go on with the one that wrote it"
            )
        if not mine or len(parts) != stages:
            raise damaged
        return cls(step, model, optimizer, kind, path)

    def check(self, model: Model, list_layers: ListLayers | None, kind: str, steps: int) -> None:
        """Refuse it for another model or optimiser, or for a run that would make no step.

        Args:
            model: what it is to be read into.
            list_layers: its layers; None: it is a list of them.
            kind: the optimiser of the run.
            steps: of the run in total.

        Raises:
            ConfigError: a name, a shape or the optimiser differs, or there is nothing left to do.
        """
        place = f"train.resume = {self.path}"
        shapes = {
            names[name]: tensor.shape
            for names, layer in zip(
                state_names(model, list_layers), layers_of(model, list_layers), strict=True
            )
            for name, tensor in layer.state_dict().items()
        }
        for name in sorted(shapes.keys() ^ self.model.keys()):
            where = "the checkpoint" if name in self.model else "the config's model"
            raise ConfigError(f"{place}: only {where} has {name!r}; resume with the model it was made with")
        for name, shape in shapes.items():
            if self.model[name].shape != shape:
                raise ConfigError(
                    f"{place}: {name} has shape {tuple(self.model[name].shape)}, {tuple(shape)} in the "
                    "config's model; resume with the model it was made with"
                )
        if self.kind != kind:
            raise ConfigError(
                f"{place}: holds the state of optimizer.name = {self.kind}, not of {kind}; give the same"
            )
        if self.step >= steps:
            raise ConfigError(
                f"{place}: it has made {self.step} steps, and train.steps = {steps}; "
                f"give train.steps = {self.step + 1} or more"
            )

    def restore(self, pipeline: Pipeline) -> None:
        """Put a pipeline where the run was that wrote this."""
        pipeline.load_state_dict(self.model)
        pipeline.steps = self.step
        names = _names(pipeline)
        for optimizer in pipeline.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    kept = next((self.optimizer[n] for n in names[id(parameter)] if n in self.optimizer), {})
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device if value.dim() else "cpu", copy=True)
                        if isinstance(value, Tensor)
                        else value
                        for key, value in kept.items()
                    }


def _names(pipeline: Pipeline) -> dict[int, list[str]]:
    """The names by which the model knows each parameter at hand, by identity."""
    names: dict[int, list[str]] = {}
    for stage in pipeline.stages.values():
        for layer in stage.layers:
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(layer.names[name])
    return names


def _optimizer_state(pipeline: Pipeline, stage: int) -> OptimizerState:
    """What the optimiser of a stage keeps, under every name of each parameter."""
    names = _names(pipeline)
    optimizer = pipeline.optimizers.get(stage)
    states: Mapping[Tensor, dict[str, Any]] = {} if optimizer is None else optimizer.state
    return {
        name: {key: _copied(value) for key, value in state.items()}
        for parameter, state in states.items()
        for name in names[id(parameter)]
    }


def _file(stage: int) -> str:
    return f"stage-{stage}.pt"


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
