"""Checkpoints of a pipeline in one call: for programs of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterflow.errors import CounterflowError
from counterflow.runtime.pipeline import Pipeline

from .reader import Checkpoint
from .saver import Saver


def save_checkpoint(
    pipeline: Pipeline, folder: Path | str, *, keep_last: int | None = None, **about: Any
) -> Path:
    """Write a checkpoint of a pipeline, and wait until it is on the disk; all workers call it.

    Flushes first what is in flight. ``counterflow.checkpoints.Saver`` does not wait.

    Args:
        pipeline: what is saved.
        folder: of checkpoints, on storage that all workers share; this one is ``step-N`` in it.
        keep_last: so many checkpoints are kept there; None: all.
        about: texts and numbers to be kept with it.

    Returns:
        The folder of this checkpoint.

    Raises:
        CounterflowError: it cannot be written; there is no part of it, and those before are whole.
        WorkerError: the copies of a stage differ.
    """
    saver = Saver(pipeline, Path(folder), keep_last=keep_last)
    saver.start(about)
    outcome = saver.wait()
    assert outcome is not None
    if outcome.path is None:
        raise CounterflowError(f"cannot write a checkpoint of step {outcome.step}: {outcome.problem}")
    return outcome.path


def load_checkpoint(pipeline: Pipeline, path: Path | str, *, training: bool = True) -> int:
    """Put a pipeline where the training was that wrote a checkpoint; all workers call it.

    Scheme, depth, width, recomputation and sharding may be others; weights and what the optimiser keeps are
    converted to the pipeline's precision, and it is told.

    Args:
        pipeline: of the same model.
        path: the folder of a run or of checkpoints, of which the last complete one is read; or that of one.
        training: whether the optimiser and the learning rate's schedule go on too, and steps are counted from
            there; False: weights only.

    Returns:
        The updates that were made.

    Raises:
        ConfigError: there is none, it does not fit, or is damaged.
    """
    found = Checkpoint.load(Path(path), str(path))
    found.read_into(pipeline, training=training)
    return found.step
