"""What is told of a run while it runs, and to whom: the user's callbacks and the loggers of the config.

Invariant: a callback that fails is told of once and left out from then on; the run goes on. Knows no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from counterflow.extras import imported

from .config import RunConfig
from .folder import TENSORBOARD
from .report import About, Numbers

_LOG = logging.getLogger(__name__)


class Callback:
    """What a run tells; a subclass overrides what it wants to hear.

    All methods are called in one process: where ``run`` was called, or under torchrun and Slurm on rank 0,
    between two steps, which wait for it. An error in one is logged, and the callback is not called again.

    >>> class Losses(Callback):
    ...     def recorded(self, lines):
    ...         print(*(f"{line['step']}: {line['loss']}" for line in lines if "loss" in line))
    >>> Losses().recorded([{"step": 1, "loss": 2.5, "seconds": 0.1}, {"step": 1, "validation_loss": 2.0}])
    1: 2.5
    """

    def begun(self, about: About, folder: Path) -> None:
        """Everything has been found right, and workers are about to start.

        Args:
            about: what is trained.
            folder: where the run writes.
        """

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """More lines of ``metrics.jsonl`` are there, each with ``step`` and ``seconds``.

        Args:
            lines: of a step ``loss``, ``grad_norm``, ``learning_rate`` and ``samples_per_second`` as well; of
                an evaluation ``validation_loss``, with averaged weights ``ema_validation_loss``. After a
                restart no step is told again. May be empty.
        """

    def happened(self, event: str) -> None:
        """A worker failed, or the run goes on after that; in words."""

    def ended(self) -> None:
        """No more will come, whatever the reason; ``summary.json`` is in the folder if all went well."""


_TAGS = {"validation_loss": "validation/loss", "ema_validation_loss": "validation/ema_loss"}
"""What has another name on the board than ``train/`` and its own."""


class TensorBoard(Callback):
    """Writes metrics for TensorBoard, into ``tensorboard`` of the run's folder or into a folder of your own.

    Args:
        folder: where to; None: the run's.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        imported("tensorboard", "tensorboard")
        self.folder = folder
        self._purged: int | None = None
        self._writer: Any = None

    def begun(self, about: About, folder: Path) -> None:
        """Take the run's folder; lines of steps that it will make again are hidden."""
        self.folder = self.folder or folder / TENSORBOARD
        self._purged = about.first_step + 1 if about.first_step else None

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Write scalars: ``train/loss`` and so on, ``validation/loss`` and ``validation/ema_loss``."""
        for line in lines:
            if self._writer is None:  # not before: a run that makes no step leaves nothing
                board = imported("torch.utils.tensorboard")
                self._writer = board.SummaryWriter(str(self.folder), purge_step=self._purged)
            for name, value in line.items():
                if name not in ("step", "seconds"):
                    tag = _TAGS.get(name, f"train/{name}")
                    self._writer.add_scalar(tag, value, int(line["step"]))
        if lines:
            self._writer.flush()

    def ended(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


LOGGERS = {"tensorboard": TensorBoard}
"""What ``train.loggers`` may name."""


def loggers(config: RunConfig) -> list[Callback]:
    """The loggers that a config names.

    Raises:
        ConfigError: the package of one is not installed.
    """
    return [LOGGERS[name]() for name in config.train.loggers or ()]


class Callbacks(Callback):
    """Tells several what one is told."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._left = list(callbacks)

    def begun(self, about: About, folder: Path) -> None:
        """Tell all."""
        self._tell("begun", about, folder)

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Tell all."""
        self._tell("recorded", lines)

    def happened(self, event: str) -> None:
        """Tell all."""
        self._tell("happened", event)

    def ended(self) -> None:
        """Tell all."""
        self._tell("ended")

    def _tell(self, what: str, *arguments: Any) -> None:
        for callback in tuple(self._left):
            try:
                getattr(callback, what)(*arguments)
            except Exception:
                self._left.remove(callback)
                _LOG.warning(
                    "%s.%s failed; the run goes on without it", type(callback).__name__, what, exc_info=True
                )
