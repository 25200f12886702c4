"""Checkpoints of a pipeline in one call, for users' own programs."""

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

    Mini-batches in flight are flushed first. Checkpoints of later steps are renamed to ``abandoned-step-N``,
    with a warning. ``counterflow.checkpoints.Saver`` does not wait.

    Args:
        pipeline: pipeline to save.
        folder: folder of checkpoints on storage that all workers share; this one is ``step-N`` in it.
        keep_last: number of last checkpoints that are kept there; None: all.
        about: texts and numbers to store with it.

    Returns:
        The folder of this checkpoint.

    Raises:
        ConfigError: ``keep_last`` is less than 1, or an entry cannot be stored.
        CounterflowError: the checkpoint cannot be written; nothing of it is left, and earlier ones are whole.
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
    """Load a checkpoint into a pipeline; all workers call it.

    Scheme, depth, width, recomputation and sharding may differ from the writer's; weights and the optimiser's
    state are converted to the pipeline's precision, which is logged.

    Args:
        pipeline: a pipeline of the same model.
        path: folder of a run or of checkpoints, of which the last complete one is read; or folder of a
            checkpoint.
        training: whether to resume the optimiser, the learning rate's schedule and the count of steps too;
            False: weights only.

    Returns:
        The number of updates made.

    Raises:
        ConfigError: the checkpoint does not exist, does not fit, or is damaged.
    """
    checkpoint = Checkpoint.load(Path(path), str(path))
    checkpoint.read_into(pipeline, training=training)
    return checkpoint.step
