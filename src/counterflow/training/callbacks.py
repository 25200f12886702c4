"""Callbacks: the user's own and the config's loggers are informed about a run while it runs.

Invariant: the error of a callback is logged once and the callback is not called again; the run continues.
torch is not imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from counterflow.common.extras import imported

from .config import RunConfig
from .folder import TENSORBOARD
from .training_report import About, Numbers

_LOG = logging.getLogger(__name__)


class Callback:
    """Receives what a run reports; a subclass overrides the methods that it needs.

    All methods are called in one process: where ``run`` was called, or under torchrun and Slurm on rank 0,
    between two steps, which wait for it. An error in one is logged, and the callback is not called again.

    >>> class Losses(Callback):
    ...     def recorded(self, lines):
    ...         print(*(f"{line['step']}: {line['loss']}" for line in lines if "loss" in line))
    >>> Losses().recorded([{"step": 1, "loss": 2.5, "seconds": 0.1}, {"step": 1, "validation_loss": 2.0}])
    1: 2.5
    """

    def begun(self, about: About, folder: Path) -> None:
        """Called after all checks have passed, before workers start.

        Args:
            about: what is trained.
            folder: the run's folder.
        """

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Called with new lines of ``metrics.jsonl``, each with ``step`` and ``seconds``.

        Args:
            lines: a step's line also contains ``loss``, ``grad_norm``, ``learning_rate`` and
                ``samples_per_second``; an evaluation's line contains ``validation_loss`` and, with averaged
                weights, ``ema_validation_loss``. After a restart no step is reported again. May be empty.
        """

    def happened(self, event: str) -> None:
        """Called with a sentence after a worker failed, and when the run continues."""

    def ended(self) -> None:
        """Called once at the end, for whatever reason; ``summary.json`` exists if all went well."""


_TAGS = {"validation_loss": "validation/loss", "ema_validation_loss": "validation/ema_loss"}
"""Metrics whose name on the board is not ``train/`` and their own name."""


class TensorBoard(Callback):
    """Writes metrics for TensorBoard, into ``tensorboard`` of the run's folder or into a folder of your own.

    Args:
        folder: folder to write to; None: the run's folder.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        imported("tensorboard", "tensorboard")
        self.folder = folder
        self._purged: int | None = None
        self._writer: Any = None

    def begun(self, about: About, folder: Path) -> None:
        """Open the run's folder; lines of steps that the run will repeat are hidden."""
        self.folder = self.folder or folder / TENSORBOARD
        self._purged = about.first_step + 1 if about.first_step else None

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Write scalars: ``train/loss`` and so on, ``validation/loss`` and ``validation/ema_loss``."""
        for line in lines:
            if self._writer is None:  # not before, so a run without a step leaves no file
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
"""Loggers by the names that ``train.loggers`` accepts."""


def loggers(config: RunConfig) -> list[Callback]:
    """The loggers that a config names.

    Raises:
        ConfigError: the package of a logger is not installed.
    """
    return [LOGGERS[name]() for name in config.train.loggers or ()]


class Callbacks(Callback):
    """Forwards every call to several callbacks."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._active = list(callbacks)

    def begun(self, about: About, folder: Path) -> None:
        """Forward the call to all callbacks."""
        self._call("begun", about, folder)

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Forward the call to all callbacks."""
        self._call("recorded", lines)

    def happened(self, event: str) -> None:
        """Forward the call to all callbacks."""
        self._call("happened", event)

    def ended(self) -> None:
        """Forward the call to all callbacks."""
        self._call("ended")

    def _call(self, what: str, *arguments: Any) -> None:
        for callback in tuple(self._active):
            try:
                getattr(callback, what)(*arguments)
            except Exception:
                self._active.remove(callback)
                _LOG.warning(
                    "%s.%s failed; the run continues without it", type(callback).__name__, what, exc_info=True
                )
