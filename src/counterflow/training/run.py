"""A run from its config to its summary: starts workers, or is one of those that a launcher started.

Invariant: ``run`` returns or raises with no worker left behind, and with what was reached in the run's
folder. It prints nothing; callbacks are called in the one process that receives all workers' numbers.
"""

from __future__ import annotations

import itertools
import logging
import signal
import tomllib
from pathlib import Path
from typing import Literal, cast

import torch

from counterflow.checkpoints.index import DamagedError
from counterflow.checkpoints.memory_copies import forget
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError, WorkerError
from counterflow.measure.storage import ADVICE, storage_of
from counterflow.runtime.workers import world
from counterflow.runtime.workers.launch import SendSignal, launch_watched

from .auto_config import with_plan
from .callbacks import Callback, Callbacks, loggers
from .config import RunConfig
from .folder import RunFolder, folder_of
from .job import Job, prepare
from .loop import EachStep, Trainer, work
from .resuming import history
from .sections.keys import AUTO
from .supervision.events import (
    FEWER,
    GAVE_UP,
    RESTARTED,
    STARTED,
    STOPPED,
    Event,
    in_words,
    note,
    read,
    run_of,
)
from .supervision.fewer import Absence, leave_out, wait_for_others, with_fewer
from .supervision.restarts import Restarts, note_failure, reporting_failures, with_memory
from .supervision.stopping import STOP, Phase, listening
from .training_report import Summary
from .transport_choice import named_transport

_LOG = logging.getLogger(__name__)


def run(
    config: RunConfig, *callbacks: Callback, max_restarts: int = 0, each_step: EachStep | None = None
) -> tuple[Summary, Path] | None:
    """Train as a config says.

    Args:
        config: config of the run.
        callbacks: called during the run, in addition to the config's loggers.
        max_restarts: maximum restarts of the workers after failures; torchrun has its own number.
        each_step: called on every worker of a launcher after each step, with the number of steps made.

    Returns:
        The summary and the run's folder; None on workers of a launcher other than rank 0, where
        ``STOP`` knows whether the run was ended early, and if the run was complete before.

    Raises:
        ConfigError: the run cannot be started.
        WorkerError: a worker failed; the folder contains what was reached.
        KeyboardInterrupt: the run was stopped at once, or before the first step after a start or restart.
    """
    STOP.forget()
    config = with_plan(config)
    launcher, attempt = world.started_by(), 0
    if launcher is None:
        _check_gpus(config)
    else:
        _fit(config, launcher, max_restarts)
        attempt, max_restarts = world.attempt(config.pipeline.timeout_seconds), world.most_restarts()
    folder = RunFolder(folder_of(config))
    _check_storage(folder.path, max_restarts)
    if (attempt or config.train.resume == AUTO) and folder.finished(config.train.steps):
        if not world.rank():
            Callbacks(callbacks).happened(f"{folder.path}: all {config.train.steps:,} steps were made before")
        STOP.ended = True
        return None
    if attempt:
        refusal = Restarts(folder.path, max_restarts).refusal()
        if refusal is not None:
            raise WorkerError(refusal)
        config = going_on(config, folder)
    shared_config = (
        config  # the config that is written is for all workers, because the same command may resume with them
    )
    if launcher is not None:
        config = _config_for_available_workers(config, folder.path)
    config = with_memory(config, max_restarts)
    job = prepare(config)
    with listening(), STOP.during(Phase.NOTE):
        if launcher is None or not world.rank():
            reporter = Callbacks([*callbacks, *loggers(config)])
            return _in_folder(shared_config, job, reporter, attempt, max_restarts, each_step)
        trainer, _ = _trained(job, folder, attempt, each_step=each_step)
    if not trainer.stopped:
        STOP.forget()
    STOP.ended = True
    return None


def _trained(
    job: Job,
    folder: RunFolder,
    attempt: int,
    reporter: Callback | None = None,
    each_step: EachStep | None = None,
) -> tuple[Trainer, Summary | None]:
    """Run as a worker of a launcher; rank 0 calls the callbacks. Until its first step a signal ends it."""
    with STOP.during(Phase.UNWIND, then=Phase.NOTE):
        try:
            with reporting_failures(attempt, folder.fence):
                watch = (lambda line: reporter.recorded([line])) if reporter is not None else None
                path = folder.path if reporter is not None else None
                trainer = Trainer(job, path, watch, attempt=attempt, fence=folder.fence, each_step=each_step)
                if reporter is not None and trainer.recorder.event is not None:
                    reporter.happened(in_words(trainer.recorder.event))
                return trainer, trainer.run()
        except WorkerError as error:
            if STOP and STOP.phase is Phase.UNWIND:  # another worker ended at the same signal
                raise KeyboardInterrupt from error
            raise


def _config_for_available_workers(config: RunConfig, folder: Path) -> RunConfig:
    processes, after = world.world_size() or 1, config.train.fewer_after
    if after is None or processes >= config.processes:
        return config
    wait_for_others(folder, after)

    def plan() -> str:
        return with_fewer(config, processes).to_toml()

    limit = config.pipeline.timeout_seconds
    planned = RunConfig.model_validate(tomllib.loads(world.text_from_first(plan, limit)))
    if not world.rank():
        event = _fewer_event(planned, processes)
        _LOG.warning("%s", in_words(event))
        if folder.is_dir():
            note(folder, **event)
    return planned


def _in_folder(  # noqa: PLR0917
    config: RunConfig,
    job: Job,
    reporter: Callback,
    attempt: int,
    max_restarts: int,
    each_step: EachStep | None,
) -> tuple[Summary, Path]:
    launcher = world.started_by()
    start = job.start.path if job.start is not None else None
    folder = RunFolder.open(config, job.schedule, start, history(job.start), restart=bool(attempt))
    if max_restarts and not attempt:
        note(folder.path, STARTED, restarts=max_restarts)
    copies = run_of(folder.path) if launcher is None and job.config.copies_in_memory else None
    try:
        reporter.begun(job.about, folder.path)
        if launcher is not None:
            folder.fence.begin()
            _, result = _trained(job, folder, attempt, reporter, each_step)
            assert result is not None
            summary = result
        else:
            with STOP.during(Phase.UNWIND):
                summary = _supervised(job, folder, reporter, Restarts(folder.path, max_restarts))
        if summary.stopped:
            note(folder.path, STOPPED, signal=STOP.name, step=summary.steps)
        folder.fence.end()
        STOP.ended = True
    except BaseException as error:
        steps = folder.steps()
        if launcher is None:  # other workers may still note what failed
            folder.fence.end()
            if copies is not None and not (STOP.early and steps):  # else newer than the last checkpoint
                forget(copies)
        folder.remove_empty()
        place = f"the metrics of {steps} step{'s' if steps > 1 else ''} are in {folder.path}" if steps else ""
        place += ", from which train.resume can continue" if steps and folder.has_checkpoint else ""
        if isinstance(error, KeyboardInterrupt) or (STOP and not steps):
            if steps:
                note(folder.path, STOPPED, signal=STOP.name, step=steps)
            raise KeyboardInterrupt(place) from error
        if isinstance(error, WorkerError) and steps:
            raise _with_place(error, place) from error
        raise
    finally:
        folder.close()
        reporter.ended()
    return summary, folder.path


def _supervised(job: Job, folder: RunFolder, reporter: Callback, restarts: Restarts) -> Summary:
    absence = Absence(folder.path, job.config.train.fewer_after)
    for attempt in itertools.count():
        try:
            return _launched(job, folder, reporter, attempt)
        except (WorkerError, DamagedError) as error:
            step = folder.steps() + 1
            failed = note_failure(folder.path, error, attempt, step)
            if STOP or not restarts.most or not folder.path.is_dir():
                raise
            refusal = restarts.refusal()
            if refusal is not None:
                note(folder.path, GAVE_UP, message=refusal)
                if isinstance(error, WorkerError):
                    raise _with_place(error, refusal) from error
                raise
            reporter.happened(in_words(failed))
        config = job.config
        if job.about.processes > 1 and absence.over(failed):
            config = _without(failed["worker"], job, folder, reporter)
        try:
            job = prepare(going_on(config, folder))
        except ConfigError as error:
            note(folder.path, GAVE_UP, message=str(error))
            raise
    raise AssertionError  # a count that never ends


def _without(worker: int | None, job: Job, folder: RunFolder, reporter: Callback) -> RunConfig:
    remaining = job.about.processes - 1
    kind = named_transport(job.config)
    if kind is not None and kind.gpu_each:
        remaining = min(remaining, torch.cuda.device_count())
        leave_out(worker, remaining)
    config = with_fewer(job.config, remaining)
    folder.put_schedule(config.build_schedule())
    reporter.happened(in_words(note(folder.path, **_fewer_event(config, remaining))))
    return config


def _fewer_event(config: RunConfig, workers: int) -> Event:
    replicas = f", {config.pipeline.replicas} replicas" if config.pipeline.replicas > 1 else ""
    return {"event": FEWER, "workers": workers, "runs": f"{config.build_schedule()}{replicas}"}


def going_on(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The config of a restart: from the run's own last checkpoint, if it has written one."""
    if not folder.has_checkpoint and config.train.resume is not None:
        return config
    return config.but(train={"resume": AUTO, "out": folder.path})


def _check_gpus(config: RunConfig) -> None:
    kind = named_transport(config)
    if kind is None or not kind.gpu_each:
        return
    workers = config.processes
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < workers:
        raise ConfigError(
            f'pipeline.transport = "{kind}": {plural(workers, "worker")} '
            f"{'needs' if workers == 1 else 'need'} a GPU each, but this machine has {gpus}; "
            "choose gloo, or fewer workers"
        )


def _check_storage(folder: Path, max_restarts: int) -> None:
    storage = storage_of(folder)
    if max_restarts and storage.renames is False:
        raise ConfigError(
            f"--max-restarts {max_restarts}: {folder} is on {storage.kind}, {storage.why}; {ADVICE}"
        )
    if storage.why and not world.rank():
        _LOG.warning("%s is on %s, %s; %s", folder, storage.kind, storage.why, ADVICE)


def _fit(config: RunConfig, launcher: str, max_restarts: int) -> None:
    if max_restarts:
        raise ConfigError(
            f"--max-restarts {max_restarts}: {launcher} started these workers, and only it can restart "
            "them; give the option to torchrun, or resubmit the job"
        )
    if world.most_restarts() and config.train.out is None:
        raise ConfigError(
            "torchrun --max-restarts: restarted workers have to find their run; give its folder as --out"
        )
    kind = named_transport(config)
    if kind is not None and kind.threads:
        raise ConfigError(
            f'pipeline.transport = "{kind}": runs in one process, but {launcher} started several; '
            f"choose gloo or nccl, or start without {launcher}"
        )
    processes, after = world.world_size() or 1, config.train.fewer_after
    if after is None or processes >= config.processes:
        config.expect_processes(processes)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)


def _launched(job: Job, folder: RunFolder, reporter: Callback, attempt: int) -> Summary:
    """Run with workers of its own. A signal ends them at once until they train, and then after a step."""
    pipeline, first = job.config.pipeline, None if attempt else job.first_step
    folder.fence.begin()
    known = len(read(folder.path))

    def look(send_signal: SendSignal) -> None:
        nonlocal known, first
        events = read(folder.path)[known:] if attempt or job.config.train.resume == AUTO else []
        known += len(events)
        for event in events:
            if attempt:
                reporter.happened(in_words(event))
            if event["event"] == RESTARTED:  # the metrics were cut before
                first = event["step"]
        reporter.recorded(folder.new_records())
        if first is not None and folder.latest > first:
            STOP.step_done()
        if STOP:
            send_signal(signal.SIGINT)

    def trains() -> bool:
        return first is not None and folder.steps() > first

    with STOP.during(Phase.UNWIND, then=Phase.FINISH, trains=trains):
        summaries = launch_watched(
            look,
            work,
            job.config,
            job.cuts,
            folder.path,
            job.start.path if job.start is not None else None,
            attempt,
            workers=job.about.processes,
            transport=cast(
                "Literal['local', 'gloo', 'nccl']", pipeline.transport
            ),  # the transport is chosen by now
            timeout_seconds=pipeline.timeout_seconds,
            threads=job.config.train.threads,
        )
        reporter.recorded(folder.new_records())
    assert summaries[0] is not None
    return summaries[0]


def _with_place(error: WorkerError, place: str) -> WorkerError:
    extended = WorkerError(f"{error}; {place}")
    vars(extended).update(vars(error))
    return extended
