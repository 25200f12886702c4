"""Start of a resumed run: its checkpoint, whether it fits the config, and what the config changes.

Invariant: a run that resumes names the checkpoint, and the keys that differ from the checkpoint's config.
With ``auto`` a damaged checkpoint costs the steps after the previous one, and never ends the run.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from counterflow.capture.model_layers import layers_of, state_names
from counterflow.checkpoints.exclusion import set_aside, set_aside_after
from counterflow.checkpoints.index import CHECKPOINT, DamagedError, complete
from counterflow.checkpoints.reader import Checkpoint
from counterflow.checkpoints.state_tables import MODEL
from counterflow.common import toml
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.state_format import extra_state_names
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.workers import world

from .config import RunConfig, by_key
from .folder import METRICS
from .sections.keys import AUTO
from .source import ModelAndData

_LOG = logging.getLogger(__name__)

_AUTO = 'train.resume = "auto"'

_RUN_KEYS = {"train.resume", "train.out", "train.memory_every", "train.fewer_after"}
"""Keys of a run that do not change what it trains."""

DATA = "data"
"""Entry of a run in a checkpoint's index: the digest of the data."""

_DATA_SECTIONS = {"data", "model"}
"""Sections of a config that decide which data are read, and how."""


def starting_checkpoint(config: RunConfig, start: Path | None = None) -> Checkpoint | None:
    """The checkpoint that a run resumes from.

    Args:
        config: config of the run.
        start: checkpoint that was found before, which is read again.

    Raises:
        ConfigError: there is no checkpoint, or, without ``auto``, it is damaged.
    """
    resume = config.train.resume
    if resume is None:
        return None
    if resume == AUTO:
        assert config.train.out is not None  # a config without train.out is refused
        return Checkpoint.load(start, _AUTO) if start is not None else _last(config.train.out / CHECKPOINT)
    return Checkpoint.load(start or Path(resume), f"train.resume = {resume}")


def _last(root: Path) -> Checkpoint | None:
    """The last complete checkpoint of a run that is not damaged, as far as is seen without reading weights;
    None: there is none, so the run begins anew or from the workers' memory.
    """
    for folder in reversed(complete(root)):
        try:
            return _checked(folder)
        except DamagedError as error:
            if not world.rank():
                _LOG.warning("%s; an earlier state is used", error.problem)
    return None


def _checked(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.load(folder, _AUTO)
    history(checkpoint)
    return checkpoint


def verify_start(start: Checkpoint, transport: Transport) -> Checkpoint | None:
    """Compare a checkpoint with its digests; rename a damaged one, and find the one before. All workers call
    it.

    Args:
        start: the checkpoint that ``auto`` chose.
        transport: transport to the other workers.

    Returns:
        ``start`` if it is whole; otherwise the last one that is not damaged, which is not yet compared; None:
        there is none.
    """
    try:
        start.verify(transport)
    except DamagedError as error:
        last = None
        if transport.rank == 0:
            set_aside(start.path, error.problem)
            set_aside_after(start.path.parent, start.step, verify=history)
            last = _last(start.path.parent)
        path = transport.gather_objects(last and str(last.path))[0]
        return None if path is None else Checkpoint.load(Path(str(path)), _AUTO)
    return start


def read(start: Checkpoint, pipeline: Pipeline, *, auto: bool) -> None:
    """Load a checkpoint into a pipeline; all workers call it.

    Args:
        start: the checkpoint.
        pipeline: pipeline of the run.
        auto: whether the next attempt shall find the previous checkpoint if this one is damaged.

    Raises:
        ConfigError: the checkpoint does not fit, or is damaged.
        WorkerError: with ``auto``, it is damaged although its digests fit, or was damaged meanwhile.
    """
    try:
        start.read_into(pipeline, options=False)
    except DamagedError as error:
        if not auto:
            raise
        if pipeline.transport.rank == 0:
            set_aside(start.path, error.problem)
        raise WorkerError(
            f"{error.problem}; it is renamed to damaged-{start.path.name}: run the same command to resume "
            "from the one before"
        ) from None


def _saved_shapes(
    start: Checkpoint, layers: Iterable[tuple[Mapping[str, str], nn.Module]]
) -> dict[str, tuple[int, ...]]:
    # By all names that the checkpoint and the model know.
    shapes = {
        key.removeprefix(f"{MODEL}/"): stored.shape
        for key, stored in start.index.tensors.items()
        if key.startswith(f"{MODEL}/")
    }
    groups = [[first, *names] for first, names in start.index.aliases.items()]
    tied: dict[int, list[str]] = {}
    for names, layer in layers:
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(names[name])
    for group in (*groups, *tied.values()):  # of a tied weight one name is enough
        shape = next((shapes[name] for name in group if name in shapes), None)
        if shape is not None:
            shapes = dict.fromkeys(group, shape) | shapes
    return shapes


def check(start: Checkpoint, bundle: ModelAndData, config: RunConfig) -> None:
    """Refuse a checkpoint of another model, optimiser or data, or a run that would make no step.

    With ``auto`` a checkpoint of all steps is accepted: a run that was killed after it ends well.

    Args:
        start: the checkpoint.
        bundle: model that the checkpoint is loaded into, and its data.
        config: config of the run.

    Raises:
        ConfigError: a name, a shape, the optimiser or the data differ, or there is nothing left to do.
    """
    place, kind, steps = start.place, config.optimizer.name, config.train.steps
    auto = config.train.resume == AUTO
    model, list_layers = bundle.model, bundle.list_layers
    layers, names_of = layers_of(model, list_layers), state_names(model, list_layers)
    state = {
        names[name]: value
        for names, layer in zip(names_of, layers, strict=True)
        for name, value in layer.state_dict().items()
    }
    if isinstance(model, nn.Module):
        whole_state = model.state_dict()
        state |= {name: whole_state[name] for name in extra_state_names(model, names_of)}
    saved_shapes = _saved_shapes(start, zip(names_of, layers, strict=True))
    shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    for name in sorted(shapes.keys() ^ saved_shapes.keys()):
        where = "the checkpoint" if name in saved_shapes else "the config's model"
        raise ConfigError(f"{place}: only {where} has {name!r}; resume with the model of the checkpoint")
    for name, shape in shapes.items():
        if saved_shapes[name] != shape:
            raise ConfigError(
                f"{place}: {name} has shape {saved_shapes[name]}, {shape} in the "
                "config's model; resume with the model of the checkpoint"
            )
    had = start.index.run.get("optimizer")
    if had not in {None, kind} and (start.step or start.index.has_training):
        raise ConfigError(
            f"{place}: contains the state of optimizer.name = {had}, not of {kind}; give the same optimiser"
        )
    if auto and has_other_data(start, bundle.digest, config):
        raise ConfigError(
            f"{place}: {_data_of(config)} changed since {start.path} was written; put it back, or resume "
            f"with the changed data: train.resume = {toml.dumps(str(start.path))}"
        )
    if start.step > steps or (start.step == steps and not auto):
        raise ConfigError(
            f"{place}: it has made {start.step} steps, and train.steps = {steps}; "
            f"give train.steps = {start.step + 1} or more"
        )


def changes(start: Checkpoint, data: str, config: RunConfig) -> tuple[str, ...]:
    """The keys that differ from the config of a checkpoint, with both values, and data with other contents.

    Args:
        start: the checkpoint.
        data: digest of the data of the run.
        config: config of the run.

    Returns:
        A text for each; none if the checkpoint has no config.
    """
    texts = tuple(
        f"{key} = {toml.shown(now)}, was {toml.shown(before)}"
        for key, (before, now) in _differing(start, config).items()
        if key not in _RUN_KEYS
    )
    return (*texts, f"{_data_of(config)} changed") if has_other_data(start, data, config) else texts


def _differing(start: Checkpoint, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    if "config" not in start.index.run:
        return {}
    texts = str(start.index.run["config"]), config.to_toml()
    before, now = (by_key(tomllib.loads(text)) for text in texts)
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if now.get(key) != before.get(key)
    }


def has_other_data(start: Checkpoint, data: str, config: RunConfig) -> bool:
    """True if data have other contents than at a checkpoint, although the config asks for the same.

    Args:
        start: the checkpoint; one without a digest of the data has no other data.
        data: digest of the data of the run.
        config: config of the run.
    """
    if start.index.run.get(DATA) in {None, data}:
        return False
    return not any(key.partition(".")[0] in _DATA_SECTIONS for key in _differing(start, config))


def _data_of(config: RunConfig) -> str:
    path = config.data.path
    return "the text that ships with Python" if path is None else f"data.path = {toml.dumps(str(path))}"


def history(start: Checkpoint | None) -> bytes:
    """The metrics until a checkpoint, which it contains; empty for a checkpoint that no run wrote.

    Raises:
        ConfigError: the metrics are damaged.
    """
    return b"" if start is None or METRICS not in start.index.files else start.file(METRICS)
