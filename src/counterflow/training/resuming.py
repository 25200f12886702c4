"""How a run resumes: from which checkpoint, whether it fits the config, and what the config changes.

Invariant: a run that resumes names the checkpoint, and the keys that differ from the checkpoint's config.
"""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

from torch import Tensor, nn

from counterflow import toml
from counterflow.checkpoints.index import CHECKPOINT, complete, put_aside
from counterflow.checkpoints.reader import Checkpoint, DamagedError
from counterflow.checkpoints.state import MODEL
from counterflow.errors import ConfigError
from counterflow.runtime.parameters.unlisted import unlisted_names
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.layers import ListLayers, Model, layers_of, state_names

from .config import RunConfig, by_key
from .folder import METRICS
from .sections.keys import AUTO

_LOG = logging.getLogger(__name__)

_AUTO = 'train.resume = "auto"'

_OWN = {"train.resume", "train.out", "train.memory_every", "train.fewer_after"}
"""Keys of a run that do not change what it trains."""


def found(config: RunConfig, start: Path | None = None, *, again: bool = False) -> Checkpoint | None:
    """The checkpoint that a run resumes from.

    Args:
        config: config of the run.
        start: checkpoint that was found before, which is read again.
        again: whether the run failed after it had begun, possibly with all steps made.

    Raises:
        ConfigError: there is no checkpoint, or it is damaged.
    """
    resume = config.train.resume
    if resume is None:
        return None
    if resume == AUTO:
        assert config.train.out is not None  # a config without train.out is refused
        below = config.train.steps if again else None
        return Checkpoint.load(start, _AUTO) if start is not None else _last(config.train.out, below)
    return Checkpoint.load(start or Path(resume), f"train.resume = {resume}")


def _last(run: Path, below: int | None = None) -> Checkpoint | None:
    """The last complete checkpoint of a run, of fewer steps than ``below``; None: the run wrote none."""
    problem: DamagedError | None = None
    for folder in reversed(complete(run / CHECKPOINT)):
        try:
            last = Checkpoint.load(folder, _AUTO)
            if below is None or last.step < below:
                return last
        except DamagedError as error:
            _LOG.warning("%s", error)
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def read(start: Checkpoint, pipeline: Pipeline, *, auto: bool) -> None:
    """Load a checkpoint into a pipeline; all workers call it.

    Args:
        start: the checkpoint.
        pipeline: pipeline of the run.
        auto: whether the next attempt shall find the previous checkpoint if this one is damaged.

    Raises:
        ConfigError: the checkpoint does not fit, or is damaged.
    """
    try:
        start.read_into(pipeline, options=False)
    except DamagedError as error:
        if not auto:
            raise
        if pipeline.transport.rank == 0:
            put_aside(start.path)
        raise DamagedError(
            f"{error}; it is renamed to damaged-{start.path.name}; run the same command to resume from the "
            "one before"
        ) from None


def check(start: Checkpoint, model: Model, list_layers: ListLayers | None, config: RunConfig) -> None:
    """Refuse a checkpoint of another model or optimiser, or a run that would make no step.

    Args:
        start: the checkpoint.
        model: model that the checkpoint is loaded into.
        list_layers: function that lists its layers; None: the model is a list of layers.
        config: config of the run.

    Raises:
        ConfigError: a name, a shape or the optimiser differs, or there is nothing left to do.
    """
    place, kind, steps = start.place, config.optimizer.name, config.train.steps
    theirs = {
        key.removeprefix(f"{MODEL}/"): stored.shape
        for key, stored in start.index.tensors.items()
        if key.startswith(f"{MODEL}/")
    }
    for first, names in start.index.aliases.items():
        theirs |= {name: theirs[first] for name in names if first in theirs}
    layers, names_of = layers_of(model, list_layers), state_names(model, list_layers)
    state = {
        names[name]: value
        for names, layer in zip(names_of, layers, strict=True)
        for name, value in layer.state_dict().items()
    }
    if isinstance(model, nn.Module):
        every = model.state_dict()
        state |= {name: every[name] for name in unlisted_names(model, names_of)}
    shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    for name in sorted(shapes.keys() ^ theirs.keys()):
        where = "the checkpoint" if name in theirs else "the config's model"
        raise ConfigError(f"{place}: only {where} has {name!r}; resume with the model of the checkpoint")
    for name, shape in shapes.items():
        if theirs[name] != shape:
            raise ConfigError(
                f"{place}: {name} has shape {theirs[name]}, {shape} in the "
                "config's model; resume with the model of the checkpoint"
            )
    had = start.index.about.get("optimizer")
    if had not in {None, kind} and (start.step or start.index.has_training):
        raise ConfigError(
            f"{place}: contains the state of optimizer.name = {had}, not of {kind}; give the same optimiser"
        )
    if start.step >= steps:
        raise ConfigError(
            f"{place}: it has made {start.step} steps, and train.steps = {steps}; "
            f"give train.steps = {start.step + 1} or more"
        )


def changes(start: Checkpoint, config: RunConfig) -> tuple[str, ...]:
    """The keys that differ from the config of a checkpoint, with both values; none if it has no config."""
    if "config" not in start.index.about:
        return ()
    texts = str(start.index.about.get("config", "")), config.to_toml()
    before, now = (by_key(tomllib.loads(text)) for text in texts)
    return tuple(
        f"{key} = {toml.shown(now.get(key))}, was {toml.shown(before.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if key not in _OWN and now.get(key) != before.get(key)
    )


def history(start: Checkpoint | None) -> bytes:
    """The metrics until a checkpoint, which it contains; empty for a checkpoint that no run wrote.

    Raises:
        ConfigError: the metrics are damaged.
    """
    return b"" if start is None or METRICS not in start.index.files else start.file(METRICS)
