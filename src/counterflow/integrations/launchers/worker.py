"""Work of a worker of any launcher: it takes its place and trains in the run's folder.

Invariant: a run that has begun in its folder goes on there, from its last checkpoint or the workers' memory;
no launcher has to know of checkpoints.
"""

from __future__ import annotations

from counterflow.errors import ConfigError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.world import RankInfo
from counterflow.training.callbacks import Callback
from counterflow.training.config import RunConfig
from counterflow.training.folder import RunFolder
from counterflow.training.loop import EachStep
from counterflow.training.run import going_on, run
from counterflow.training.training_report import Summary


def run_folder(config: RunConfig) -> RunFolder:
    """The folder of a run that a launcher's workers find again.

    Raises:
        ConfigError: the config names no folder.
    """
    if config.train.out is None:
        raise ConfigError(
            "train.out is missing: workers that a launcher starts again have to find their run; name a "
            "folder that all machines share"
        )
    return RunFolder(config.train.out)


def trained_at(
    here: RankInfo | None,
    config: RunConfig,
    *callbacks: Callback,
    max_restarts: int = 0,
    each_step: EachStep | None = None,
) -> Summary | None:
    """Train as the worker at a place.

    Args:
        here: the place; None: the environment has it, or this process is the only one and starts the workers.
        config: config of the run.
        callbacks: called on rank 0.
        max_restarts: maximum restarts of workers that this process starts.
        each_step: called on every worker after each step, with the number of steps made.

    Returns:
        The summary on rank 0, else None; None also if all steps were made before.

    Raises:
        ConfigError: the run cannot be started here.
        WorkerError: a worker failed.
        KeyboardInterrupt: a signal ended the run before its first step.
    """
    if here is not None:
        world.join(here)
    alone = world.started_by() is None
    done = run(
        going_on(config, run_folder(config)),
        *callbacks,
        max_restarts=max_restarts if alone else 0,
        each_step=each_step,
    )
    return None if done is None else done[0]
