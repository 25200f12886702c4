"""A run from its config to its summary: starts workers, or is one of those that torchrun or Slurm started.

Invariant: ``run`` returns or raises with no worker left behind, and with what was reached in the run's
folder. It prints nothing; whoever watches is told by the one process that all workers' numbers reach.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal, cast

import torch

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.launch import launch

from .config import RunConfig
from .folder import RunFolder
from .job import Job, prepare
from .loop import Trainer, work
from .report import Reporter, Summary
from .resuming import history
from .stopping import STOP, Children, block, listening

_POLL_SECONDS = 0.1
"""How often whoever watches is told what is new."""


def run(config: RunConfig, reporter: Reporter) -> tuple[Summary, Path] | None:
    """Train as a config says.

    Args:
        config: what to train.
        reporter: who watches.

    Returns:
        What came of it, and the run's folder; None on the workers of torchrun or Slurm but rank 0, where
        ``STOP`` tells whether it was ended early.

    Raises:
        ConfigError: the run cannot be started.
        WorkerError: a worker failed; what was reached is kept.
        KeyboardInterrupt: it was stopped at once, or before a single step was made.
    """
    STOP.signal = None
    placed = world.started_by()
    if placed is None:
        _check_gpus(config)
    else:
        _fit(config, placed)
    job = prepare(config)
    if placed is not None and world.rank():
        with listening():
            trainer = Trainer(job, None)
            trainer.run()
            if not trainer.stopped:
                STOP.signal = None
        return None
    start = job.start.path if job.start is not None else None
    folder = RunFolder.open(config, job.schedule, start, history(job.start))
    try:
        reporter.begun(job.about, folder.path)
        summary = _launched(job, folder, reporter) if placed is None else _placed(job, folder, reporter)
    except BaseException as error:
        steps = folder.steps()
        folder.remove_empty()
        kept = _kept(folder, steps) if steps else ""
        if isinstance(error, KeyboardInterrupt) or (STOP and not steps):
            raise KeyboardInterrupt(kept) from error
        if isinstance(error, WorkerError) and steps:
            raise _with_place(error, kept) from error
        raise
    finally:
        folder.close()
        reporter.ended()
    return summary, folder.path


def _check_gpus(config: RunConfig) -> None:
    """Refuse to start more workers than there are GPUs, where each needs one."""
    if config.pipeline.transport != "nccl":
        return
    workers = config.build_schedule().workers * config.pipeline.replicas
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < workers:
        raise ConfigError(
            f'pipeline.transport = "nccl": {workers} workers need a GPU each, and there are {gpus} here; '
            "choose gloo, or fewer workers"
        )


def _fit(config: RunConfig, placed: str) -> None:
    """Refuse what those who started this process did not start it for."""
    if config.pipeline.transport == "local":
        raise ConfigError(
            f'pipeline.transport = "local": runs in one process, but {placed} started several; '
            "choose gloo or nccl, or start it without"
        )
    config.expect_processes(world.world_size() or 1)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)


def _placed(job: Job, folder: RunFolder, reporter: Reporter) -> Summary:
    """As rank 0 of several."""
    with listening():
        summary = Trainer(job, folder.path, lambda line: reporter.recorded([line])).run()
    assert summary is not None
    return summary


def _launched(job: Job, folder: RunFolder, reporter: Reporter) -> Summary:
    """With workers of its own; they are looked after by a thread, so that this one is free for signals."""
    pipeline = job.config.pipeline

    def start() -> list[Summary | None]:
        return launch(
            work,
            job.config,
            job.cuts,
            folder.path,
            job.start.path if job.start is not None else None,
            workers=job.about.processes,
            transport=cast("Literal['local', 'gloo', 'nccl']", pipeline.transport),  # chosen by now
            timeout_seconds=pipeline.timeout_seconds,
            threads=job.config.train.threads,
        )

    children = Children()
    with (
        listening(second=children.kill),
        ThreadPoolExecutor(1, "counterflow launch", initializer=block) as pool,
    ):
        future = pool.submit(start)
        while not wait([future], _POLL_SECONDS).done:
            if STOP:
                children.stop()
            reporter.recorded(folder.new_records())
        reporter.recorded(folder.new_records())
        summary = future.result()[0]
    assert summary is not None
    return summary


def _kept(folder: RunFolder, steps: int) -> str:
    """What is left of a run that did not end well."""
    kept = f"the metrics of {steps} step{'s' if steps > 1 else ''} are in {folder.path}"
    return f"{kept}, and train.resume can go on from there" if folder.has_checkpoint else kept


def _with_place(error: WorkerError, place: str) -> WorkerError:
    told = WorkerError(f"{error}; {place}")
    told.consequence = error.consequence
    return told
