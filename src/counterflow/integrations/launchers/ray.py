"""Runs under Ray Train: ``TorchTrainer(Loop(config), …)``.

Ray sets torchrun's variables and initialises torch.distributed; a worker adds how often Ray has started it.
The run's folder is in the folder of Ray's run, so Ray takes the checkpoints without copying them.

Invariant: all workers report the same number of times, as Ray demands: it holds each until all are there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from counterflow.checkpoints.index import CHECKPOINT, complete
from counterflow.common.extras import imported
from counterflow.errors import ConfigError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.world import rank_info
from counterflow.training.callbacks import Callback
from counterflow.training.config import RunConfig
from counterflow.training.training_report import Numbers

from .worker import trained_at

FOLDER = "counterflow"
"""The run's folder within the folder of Ray's run."""

_START = ".ray"
"""File in the run's folder: which ``Loop`` trains there, and how often Ray has started its workers again."""

_RAYS = 1_000_000
"""Maximum restarts as far as a worker knows: Ray counts failures itself (``max_failures``)."""


class Loop:
    """Function that each worker of a ``TorchTrainer`` calls: it trains as a config says.

    Every ``report_every`` steps, and at the end, the last metrics go to ``ray.train.report``, with the newest
    checkpoint if it is new. After a failure, or with another number of workers, Ray starts all workers again,
    and the run goes on.

    Args:
        config: config of the run, without ``train.out``: Ray's ``RunConfig(storage_path=…, name=…)`` says
            where. With ``train.fewer_after = 0`` it runs on fewer workers, as ``num_workers=(2, 4)`` allows.
        callbacks: called on rank 0; they are pickled.
        report_every: number of steps between reports.

    Raises:
        ConfigError: the config names a folder, or Ray is not installed.
    """

    def __init__(self, config: RunConfig, *callbacks: Callback, report_every: int = 10) -> None:
        imported("ray", "ray")
        if config.train.out is not None:
            raise ConfigError(
                f'train.out = "{config.train.out}": under Ray the run is in the folder of Ray\'s run; leave '
                "it out, and give TorchTrainer a RunConfig(storage_path=…, name=…)"
            )
        self.config, self.callbacks, self.report_every = config, callbacks, report_every
        self.name = uuid.uuid4().hex

    def __call__(self) -> None:
        """Train as this worker.

        Raises:
            ConfigError: the run cannot be started here.
            WorkerError: a worker failed; Ray starts all again.
        """
        train = imported("ray.train", "ray")
        folder = _folder(train)
        here = rank_info()
        assert here is not None, "TorchTrainer sets the variables of torchrun"
        restarts = _begun(folder, self.name) if not here.rank else 0
        here = replace(here, launcher="ray", restarts=restarts, most_restarts=_RAYS)
        reports = _Reports(train, folder, self.report_every, first=not here.rank)
        config = self.config.but(train={"out": folder})
        try:
            trained_at(here, config, *self.callbacks, reports, each_step=reports.stepped)
            reports.report()
        finally:
            world.leave()


class _Reports(Callback):
    """Passes on metrics and checkpoints to Ray, from all workers at the same steps.

    Args:
        train: the module ``ray.train``.
        folder: folder of the run.
        interval: number of steps between reports.
        first: whether this is rank 0, whose numbers count.
    """

    def __init__(self, train: Any, folder: Path, interval: int, *, first: bool) -> None:
        self._train, self._folder, self._interval, self._first = train, folder, interval, first
        self._last: Numbers = {}
        self._reported: Path | None = None

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Take the newest numbers; those of an evaluation stay until the next one."""
        for line in lines:
            self._last = {**self._last, **line}

    def stepped(self, done: int) -> None:
        """Report if it is time."""
        if done % self._interval == 0:
            self.report()

    def report(self) -> None:
        """Report; Ray holds this worker until all are here."""
        checkpoint = None
        if self._first:
            newest = next(reversed(complete(self._folder / CHECKPOINT)), None)
            if newest != self._reported:
                self._reported, checkpoint = newest, self._train.Checkpoint.from_directory(str(newest))
        self._train.report(
            dict(self._last),
            checkpoint=checkpoint,
            checkpoint_upload_mode=self._train.CheckpointUploadMode.NO_UPLOAD,  # it is where Ray keeps them
        )


def _folder(train: Any) -> Path:
    storage = train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        raise ConfigError(
            f"RunConfig(storage_path=…) is on {kind}: workers write parts of checkpoints as files; choose a "
            "folder that all machines mount"
        )
    folder = Path(storage.experiment_fs_path) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _begun(folder: Path, name: str) -> int:
    """As rank 0: how often Ray has started this ``Loop`` again; another one begins at 0."""
    file = folder / _START
    before = json.loads(file.read_text()) if file.exists() else {}
    restarts = before["restarts"] + 1 if before.get("name") == name else 0
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"name": name, "restarts": restarts}))
    draft.replace(file)
    return restarts
