"""Runs as jobs of submitit, on Slurm or on this machine: ``executor.submit(Task(config))``.

Under Slurm a task's place is in its environment. Tasks on one machine meet through a file in the job's
folder: rank 0 hosts the store at a port that the system chooses.

Invariant: the run decides whether a job is requeued: ended by a signal after a checkpoint (exit code 75), or
failed in a way that is tried again. How it is requeued is submitit's own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from counterflow.common.extras import imported
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.world import RankInfo, rank_info
from counterflow.training.callbacks import Callback
from counterflow.training.config import RunConfig
from counterflow.training.supervision.restarts import Restarts
from counterflow.training.supervision.stopping import RESUBMIT, STOP
from counterflow.training.training_report import Summary

from .worker import run_folder, trained_at

_HERE = "127.0.0.1"
"""Where tasks of one machine meet."""

_LOOK_SECONDS = 0.02
"""Pause between two looks for rank 0's file."""

_stores: list[TCPStore] = []
"""The store that this process hosts, for as long as it lives."""


class Task:
    """Function that each task of a job calls: it trains as a config says.

    A job that a signal ends (before its time is over, or preempted) makes a checkpoint after the current step
    and is requeued, as submitit does it: after its time at most ``max_num_timeout`` times. A job that lost a
    worker is requeued at most ``max_restarts`` times. It goes on in the run's folder.

    Args:
        config: config of the run, with ``train.out``, a folder that all machines share.
        callbacks: called on rank 0; they are pickled.
        max_restarts: maximum restarts after failures.

    Raises:
        ConfigError: the config names no folder, or submitit is not installed.
    """

    def __init__(self, config: RunConfig, *callbacks: Callback, max_restarts: int = 3) -> None:
        imported("submitit", "submitit")
        run_folder(config)
        self.config, self.callbacks, self.max_restarts = config, callbacks, max_restarts

    def __call__(self) -> Summary | None:
        """Train as this process's task; rank 0 returns the summary.

        Raises:
            ConfigError: the run cannot be started here.
            WorkerError: a worker failed, and the job is not requeued.
        """
        environment = imported("submitit", "submitit").JobEnvironment()
        preempted = getattr(signal, f"SIG{environment.USR_SIG}")
        before = signal.getsignal(preempted)

        def end_after_a_step(number: int, frame: FrameType | None) -> None:
            if callable(before) and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # nothing is begun
                before(number, frame)
            else:
                signal.raise_signal(signal.SIGUSR1)

        signal.signal(preempted, end_after_a_step)
        try:
            here = place_of(environment, self.config.pipeline.timeout_seconds, self.max_restarts)
            summary = trained_at(here, self.config, *self.callbacks, max_restarts=self.max_restarts)
        except KeyboardInterrupt:
            if STOP.exit_code != RESUBMIT:
                raise
            summary = None
        except WorkerError as error:
            if Restarts(run_folder(self.config).path, self.max_restarts).refusal() is not None:
                raise
            if not error.reported:
                print(f"requeued: {error}", file=sys.stderr, flush=True)  # noqa: T201 - a job's log
                environment._requeue(0)  # noqa: SLF001 - exit code or scontrol, as each executor has it
            raise SystemExit(RESUBMIT) from error
        finally:
            signal.signal(preempted, before)
        if STOP and STOP.exit_code == RESUBMIT:
            signal.raise_signal(preempted)  # submitit counts it, and requeues the job from rank 0
            raise SystemExit(RESUBMIT)
        return summary

    def checkpoint(self) -> Any:
        """Submission that requeues the job: the same task, as the run's folder has the rest."""
        return imported("submitit", "submitit").helpers.DelayedSubmission(self)


def join(timeout_seconds: float = 300.0) -> None:
    """Put this task at its place, for a function of one's own that makes a ``Pipeline``.

    Args:
        timeout_seconds: maximum time to wait for rank 0.

    Raises:
        ConfigError: this process is no task of submitit.
        WorkerError: rank 0 did not come within the timeout.
    """
    try:
        environment = imported("submitit", "submitit").JobEnvironment()
    except RuntimeError as error:
        raise ConfigError(
            f"join: no task of submitit ({error}); call it in a function that an executor runs"
        ) from None
    here = place_of(environment, timeout_seconds)
    if here is not None:
        world.join(here)


def place_of(environment: Any, timeout_seconds: float, most_restarts: int = 0) -> RankInfo | None:
    """The place of this task among the tasks of its job.

    Args:
        environment: submitit's record of the task.
        timeout_seconds: maximum time to wait for rank 0.
        most_restarts: maximum restarts after failures.

    Returns:
        The place; None if the environment has it (Slurm), or if the job has one task, which starts its own
        workers.

    Raises:
        ConfigError: the job has several machines, and they are not Slurm's.
        WorkerError: rank 0 did not come within the timeout.
    """
    if rank_info() is not None or environment.num_tasks == 1:
        return None
    if environment.num_nodes > 1:
        raise ConfigError(
            f"executor {environment.cluster} has {environment.num_nodes} machines; only Slurm's tasks know "
            "where to meet; use one machine, or submitit's slurm executor"
        )
    rank = environment.global_rank
    file = Path(environment.paths.folder) / f"{environment.job_id}_meeting.json"
    port, restarts = _hosted(file) if not rank else _rendezvous_of(file, timeout_seconds)
    return RankInfo(
        "submitit",
        rank,
        environment.num_tasks,
        environment.local_rank,
        _HERE,
        port,
        restarts=restarts,
        most_restarts=most_restarts,
    )


def _hosted(file: Path) -> tuple[int, int]:
    """As rank 0: host the store; its port, and how often the job was started before."""
    store = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    _stores.append(store)
    restarts = json.loads(file.read_text())["restarts"] + 1 if file.exists() else 0
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"process": os.getpid(), "port": store.port, "restarts": restarts}))
    draft.replace(file)
    return store.port, restarts


def _rendezvous_of(file: Path, timeout_seconds: float) -> tuple[int, int]:
    """As another rank: port and restarts that the running rank 0 wrote, not one of an earlier start."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if file.exists():
            rendezvous = json.loads(file.read_text())
            if Path(f"/proc/{rendezvous['process']}").exists():
                return rendezvous["port"], rendezvous["restarts"]
        time.sleep(_LOOK_SECONDS)
    raise WorkerError(
        f"rank 0 did not write {file} within {timeout_seconds:g} s; see its output in that folder"
    )
