"""What a run goes on from: which checkpoint, whether it fits the config, and what the config changes.

Invariant: a run that resumes says from where, and which keys have other values than when that was written.
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
    """The checkpoint that a run goes on from.

    Args:
        config: of the run.
        start: what was found before, which is read again.
        again: whether the run failed after it had begun, perhaps with all steps made.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    resume = config.train.resume
    if resume is None:
        return None
    if resume == AUTO:
        assert config.train.out is not None  # a config is refused without
        below = config.train.steps if again else None
        return Checkpoint.load(start, _AUTO) if start is not None else _last(config.train.out, below)
    return Checkpoint.load(start or Path(resume), f"train.resume = {resume}")


def _last(run: Path, below: int | None = None) -> Checkpoint | None:
    """The last checkpoint of a run whose files are all there, of fewer steps; None: it wrote none."""
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
    """Put a pipeline where the run was; all workers call it.

    Args:
        start: the checkpoint.
        pipeline: of the run.
        auto: whether the next attempt is to find the checkpoint before, if this one is damaged.

    Raises:
        ConfigError: it does not fit, or is damaged.
    """
    try:
        start.read_into(pipeline, options=False)
    except DamagedError as error:
        if not auto:
            raise
        if pipeline.transport.rank == 0:
            put_aside(start.path)
        raise DamagedError(
            f"{error}; it is put aside as damaged-{start.path.name}, and the same command goes on from the "
            "one before"
        ) from None


def check(start: Checkpoint, model: Model, list_layers: ListLayers | None, config: RunConfig) -> None:
    """Refuse a checkpoint of another model or optimiser, or a run that would make no step.

    Args:
        start: the checkpoint.
        model: what it is to be read into.
        list_layers: its layers; None: it is a list of them.
        config: of the run.

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
        raise ConfigError(f"{place}: only {where} has {name!r}; resume with the model it was made with")
    for name, shape in shapes.items():
        if theirs[name] != shape:
            raise ConfigError(
                f"{place}: {name} has shape {theirs[name]}, {shape} in the "
                "config's model; resume with the model it was made with"
            )
    had = start.index.about.get("optimizer")
    if had != kind and (start.step or start.index.has_training):
        raise ConfigError(f"{place}: holds the state of optimizer.name = {had}, not of {kind}; give the same")
    if start.step >= steps:
        raise ConfigError(
            f"{place}: it has made {start.step} steps, and train.steps = {steps}; "
            f"give train.steps = {start.step + 1} or more"
        )


def changes(start: Checkpoint, config: RunConfig) -> tuple[str, ...]:
    """The keys with other values than when a checkpoint was written, with both values."""
    texts = str(start.index.about.get("config", "")), config.to_toml()
    before, now = (by_key(tomllib.loads(text)) for text in texts)
    return tuple(
        f"{key} = {toml.shown(now.get(key))}, was {toml.shown(before.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if key not in _OWN and now.get(key) != before.get(key)
    )


def history(start: Checkpoint | None) -> bytes:
    """The metrics until a checkpoint, which it has; none of one that was not written by a run.

    Raises:
        ConfigError: they are damaged.
    """
    return b"" if start is None or METRICS not in start.index.files else start.file(METRICS)
