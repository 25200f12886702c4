"""The loop of one worker: measure, predict, train, evaluate, save. Every worker runs the same code.

Invariant: collective operations (an evaluation, a timeline, a checkpoint, the end) depend on values that are
the same on every worker: the step's number, or the result of an agreement. Only rank 0 writes, except for
checkpoints, and nothing here prints.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from counterflow.checkpoints.exclusion import set_aside_after
from counterflow.checkpoints.index import CHECKPOINT, RUN, complete
from counterflow.checkpoints.memory_copies import MemoryCopies
from counterflow.checkpoints.saver import PATIENCE_SECONDS, Saver
from counterflow.errors import ConfigError, CounterflowError
from counterflow.measure.machine import reset_peak_bytes
from counterflow.measure.stages.timing import measure_stages
from counterflow.runtime.execution.step import Step
from counterflow.runtime.mini_batch.samples import cut
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.workers.world import current_transport

from .config import RunConfig
from .folder import METRICS, RunFolder
from .job import Job, prepare
from .live import Live
from .resuming import DATA, history, read
from .run_recorder import RunRecorder, Watch
from .sections.keys import AUTO
from .source import AVERAGED
from .stage_mesh import mesh_options, samples_of
from .step_memory import warn_of_memory
from .supervision.events import run_of
from .supervision.exclusive import Fence
from .supervision.restarts import CopyTurns
from .supervision.same_run import check_same_run
from .supervision.stopping import STOP, listen
from .timeline import costs_of
from .training_report import Summary
from .transport_choice import workers_here

_LOG = logging.getLogger(__name__)

EachStep = Callable[[int], None]
"""Called on every worker after each step, with the number of steps made."""

COUNTED_STEPS = 2
"""Number of first steps in which memory is counted, which slows them down."""

_REPEATS = 7
"""Number of measurements of each stage before training."""

_SAMPLED_PART = 24
"""Number of steps per sampled step; the samples that are kept lie in the last 9/24."""

_VALIDATION_SAMPLES = 256
"""Samples of an evaluation, unless a mini-batch has more."""

_LOOK_SECONDS = 0.5
"""Seconds between agreements on whether to end."""

_COPY_SECONDS = 10.0
"""Seconds that a worker waits at its end for a copy to memory that is being written."""


def work(
    config: RunConfig, cuts: Sequence[int], folder: Path, start: Path | None, attempt: int = 0
) -> Summary | None:
    """Run a worker that was launched; every worker calls it. Rank 0 returns the summary.

    Args:
        config: config of the run.
        cuts: cuts that were found before the launch.
        folder: folder that rank 0 writes.
        start: checkpoint that was found before the launch.
        attempt: number of times that the run was begun before.
    """
    listen()  # a batch system signals all processes; if another worker failed, waits end by themselves
    return Trainer(prepare(config, cuts, start), folder, attempt=attempt).run()


class Trainer:
    """One worker's part of a run.

    Args:
        job: what is trained.
        folder: folder that the run writes; rank 0's is used.
        watch: called with every line of the metrics, on rank 0.
        attempt: number of times that the run was begun before.
        fence: fence of this attempt; None: a new one.
        each_step: called on every worker after each step, with the number of steps made.
    """

    def __init__(
        self,
        job: Job,
        folder: Path | None,
        watch: Watch | None = None,
        *,
        attempt: int = 0,
        fence: Fence | None = None,
        each_step: EachStep | None = None,
    ) -> None:
        config = self.config = job.config
        self.each_step = each_step
        transport = current_transport(
            config.pipeline.transport, timeout_seconds=config.pipeline.timeout_seconds
        )
        check_same_run(config, job.bundle.digest, transport)
        assert folder is not None or transport.rank
        self.fence = fence or Fence(folder or Path())
        self.folder = RunFolder(folder, self.fence) if folder is not None and not transport.rank else None
        """The run's folder on rank 0; None on other ranks."""
        self.checkpoints = self._shared(transport) / CHECKPOINT
        self.memory: MemoryCopies | None = None
        """Memory in which weights are saved for a restart; None: none."""
        if config.copies_in_memory:
            name = run_of(self.folder.path) if self.folder is not None else ""
            self.memory = MemoryCopies(transport, str(transport.gather_objects(name)[0]), job.cuts)
        goes_on = attempt or config.train.resume == AUTO
        copies = self.memory.find() if self.memory is not None and goes_on else None
        planned = job.first_step
        job, point = job.from_newest_state(copies, transport, self.fence)
        self.job = job
        self.pipeline = Pipeline(
            job.bundle.model,
            job.bundle.loss,
            job.schedule,
            list_layers=job.bundle.list_layers,
            optimizer=job.optimizer,
            scheduler=job.scheduler,
            cuts=job.cuts,
            **mesh_options(config, job.schedule.workers, transport.device.type),
            transport=transport,
            seed=config.train.seed,
            execution=config.pipeline,
            count_memory_steps=job.first_step + COUNTED_STEPS,
        )
        if config.train.ema_decay is not None:
            self.pipeline.ema(config.train.ema_decay)
        if point is not None and self.memory is not None:
            self.memory.restore(point, self.pipeline)
        elif job.start is not None:
            read(job.start, self.pipeline, auto=config.train.resume == AUTO)
        self.recorder = RunRecorder(
            job, self.pipeline, self.folder, watch, keeps_recent=self.memory is not None
        )
        self.recorder.begin(point, attempt, tells=point is not None or job.first_step < planned)
        if not transport.rank:
            set_aside_after(self.checkpoints, job.first_step, verify=history)
        self.saver = Saver(
            self.pipeline,
            self.checkpoints,
            keep_last=config.train.keep_last,
            keep_best=config.train.keep_best,
            over=self.fence.over,
        )
        self.reads = not {0, job.schedule.stages - 1}.isdisjoint(self.pipeline.stages)
        self.validation: tuple[int, float] = (-1, 0.0)
        self.saved = -1
        """Step of the last checkpoint that was begun."""
        if job.start is not None and job.complete:
            self.saved = job.first_step
            loss = job.start.index.about.get("validation_loss")
            if isinstance(loss, float) and math.isfinite(loss):  # programs may store any
                self.validation = job.first_step, loss
        self.stopped = False
        """Whether all workers agreed to end the run early."""
        self.next_look = job.first_step
        self.turns = CopyTurns(config.train.memory_every, job.first_step)
        """Decides when state is copied to memory."""
        if point is not None and self.memory is not None:  # also on a machine that is new
            self.memory.keep(self.pipeline, point.records)

    def run(self) -> Summary | None:
        """Train; rank 0 returns the summary."""
        try:
            return self._trained()
        finally:
            if self.memory is not None:  # state that a restart resumes from
                self.memory.wait(_COPY_SECONDS)

    def _trained(self) -> Summary | None:
        batch = self._batch(self.job.first_step)
        stages = measure_stages(self.pipeline, *batch, repeats=_REPEATS)
        costs = costs_of(stages, self.config.pipeline.recompute, self.pipeline.replicas)
        warn_of_memory(self.pipeline, self.job.schedule, costs, workers_here(self.config.processes))
        self.live = Live(self.pipeline, self.job.schedule, costs, self.folder)
        reset_peak_bytes(self.pipeline.device)
        self.recorder.start()
        train, first = self.config.train, self.job.first_step
        sampled = self._sampled()
        for number in range(first, train.steps):
            step = self._step(number)
            STOP.step_done()
            done = number + 1
            if number in sampled:
                self._flush()
                self.recorder.sample(step)
            self.stopped = self._between_steps(done)
            if self.stopped:
                break
        self._flush()
        updates = self.pipeline.steps  # more ops are timed at the end
        if self.stopped:  # the request to stop may not allow for more time
            self.save_now()
        if not self.recorder.samples and self.job.schedule.synchronous and updates > first:  # stopped early
            self.recorder.sample(step)
        if self.validation[0] != self.pipeline.steps:
            self._evaluate()
        seconds = self.recorder.seconds
        self.save_now()
        self._export()
        if self.memory is not None:  # everything is on the disk
            self.fence.check()
            self.memory.forget()
        if not self.job.schedule.synchronous or updates == first:
            self._time_together(updates, COUNTED_STEPS if updates == first else 0)
        return self.recorder.finish(
            costs,
            updates=updates,
            stopped=self.stopped,
            seconds=seconds,
            validation_loss=self.validation[1],
        )

    def _export(self) -> None:
        if self.job.bundle.export is None:
            return
        self.fence.check()
        name, write = self.job.bundle.export
        write(self.pipeline, self.checkpoints.parent / name, ema=False)
        if self.config.train.ema_decay is not None:
            write(self.pipeline, self.checkpoints.parent / f"{name}{AVERAGED}", ema=True)

    def _shared(self, transport: Transport) -> Path:
        """Rank 0's folder, if all workers see it: not one of the same name on a local disk.

        All workers learn which attempt this is; failures are noted in the folder.

        Raises:
            ConfigError: a worker does not see the folder.
        """
        mark = self.folder.path.absolute() / f".{uuid.uuid4().hex}" if self.folder is not None else None
        if mark is not None:
            mark.touch()
        try:
            current_attempt = self.fence.current() if self.folder is not None else None
            answers = cast("list[Any]", transport.gather_objects((mark and str(mark), current_attempt)))
            probe = Path(str(answers[0][0]))
            self.fence.join(probe.parent, answers[0][1])
            rows = transport.gather([float(probe.exists())])
        finally:
            if mark is not None:
                mark.unlink()
        for rank, (sees,) in enumerate(rows):
            if not sees:
                raise ConfigError(
                    f"rank {rank} does not see {probe.parent}, where rank 0 writes metrics and all ranks "
                    "write checkpoints; set train.out to a folder that all machines share"
                )
        transport.record_folder = probe.parent
        return probe.parent

    def _sampled(self) -> frozenset[int]:
        """Steps of synchronous schemes whose ops are timed: none that learns shapes or counts memory."""
        if not self.job.schedule.synchronous:
            return frozenset()
        first, steps = self.job.first_step, self.config.train.steps
        interval = max(1, (steps - first) // _SAMPLED_PART)
        fair = range(min(max(first, self.pipeline.counted_steps), steps - 1), steps)
        return frozenset({fair[0], fair[-1]} | {number for number in fair if (number + 1) % interval == 0})

    def _time_together(self, updates: int, before: int = 0) -> None:
        """Time some more steps from an empty pipeline to an empty one, after the last checkpoint: in
        asynchronous schemes, and if no step was left to make.

        During the run of an asynchronous scheme these steps would empty the pipeline, which a run resumed
        from a checkpoint would not do.

        Args:
            updates: updates that the run made.
            before: further steps before those that are timed.
        """
        for number in range(updates, updates + before):
            self._train_step(number)
        self.pipeline.flush()
        updates += before
        with self.pipeline.traced():
            for number in range(updates, updates + self.job.schedule.periods):
                step = self._train_step(number)
            self.pipeline.flush()
            self.recorder.sample(step)

    def _between_steps(self, done: int) -> bool:
        train = self.config.train
        if train.evaluate_every and done % train.evaluate_every == 0:
            self._evaluate()
        if train.checkpoint_every and done % train.checkpoint_every == 0 and done < train.steps:
            self._save()
        if self.memory is not None and done < train.steps and self.turns.due(done):
            began = time.perf_counter()
            self.memory.keep(self.pipeline, self.recorder.recent)
            self.turns.copied(done, time.perf_counter() - began)
            self.recorder.recent = []
        self.live.show_if_timed(done)
        if self.each_step is not None:
            self.each_step(done)
        return done < train.steps and self._stops(done)

    def _batch(self, number: int) -> tuple[Any, Any]:
        data = self.pipeline.data
        batch = self.job.bundle.batches.batch(
            number, self.config.train.samples, replica=data.number, replicas=data.count
        )
        return samples_of(self.pipeline, batch)

    # -- one step

    def _train_step(self, number: int) -> Step:
        inputs, targets = self._batch(number) if self.reads else (None, None)
        return self.pipeline.step(inputs, targets)

    def _step(self, number: int) -> Step:
        step = self._train_step(number)
        self.live.went_on()
        if step.skipped:
            self.job.follow(self.pipeline.weights.schedulers.values())
        self.turns.stepped(number, step.seconds)
        self.recorder.report_call(number, step)
        return step

    def _flush(self) -> None:
        self.recorder.report(self.pipeline.flush())
        self.live.emptied()

    def _evaluate(self) -> None:
        self._flush()
        samples, data = self.config.train.samples, self.pipeline.data
        pieces = max(1, _VALIDATION_SAMPLES // (samples * data.count))
        validation = self.job.bundle.batches.validation(
            samples * pieces, replica=data.number, replicas=data.count
        )
        inputs, targets = samples_of(self.pipeline, validation)

        def loss() -> float:
            ranges = [slice(piece * samples, (piece + 1) * samples) for piece in range(pieces)]
            evaluations = [
                self.pipeline.start_evaluation(cut(inputs, rows), targets[rows]) for rows in ranges
            ]
            losses = [evaluation.result().loss for evaluation in evaluations]
            return self.recorder.finite("validation loss", statistics.fmean(losses))

        self.validation = self.pipeline.steps, loss()
        line = {"validation_loss": self.validation[1]}
        if self.config.train.ema_decay is not None:
            with self.pipeline.averaged():
                line["ema_validation_loss"] = loss()
        self.recorder.record(step=self.pipeline.steps, **line)

    def _stops(self, done: int) -> bool:
        """True if any worker was asked to end the run; checked now and then, by all workers at the same step.

        A timeline of the last step is written at the same time, for those who look at the run.
        """
        if done < self.next_look:
            return False
        self.saver.poll()
        if self.folder is not None:
            self.fence.check()
        mean = self.recorder.training_seconds / (done - self.job.first_step)
        rows = self.pipeline.transport.gather(
            [float(STOP.signal or 0), mean, float(self.live.due()), *self.turns.row()]
        )
        self.turns.agree([row[3:] for row in rows])
        self.next_look = done + max(1, int(_LOOK_SECONDS / max(row[1] for row in rows)))
        STOP.signal = int(max(row[0] for row in rows)) or STOP.signal
        evaluated = self.validation[0] == self.pipeline.steps  # whose ops are the last ones now
        if rows[0][2] and not evaluated:
            if self.job.schedule.synchronous:
                self._flush()
            self.live.show_soon(done)
        return any(row[0] for row in rows)

    # -- after

    def _save(self) -> None:
        self._flush()
        if self.saved == self.pipeline.steps:
            return
        self.saver.wait(PATIENCE_SECONDS)
        if self.saver.in_flight is not None:
            if self.folder is not None:
                _LOG.warning(
                    "no checkpoint of step %d is written: that of step %d is still being written",
                    self.pipeline.steps,
                    self.saver.in_flight,
                )
            return
        validated, loss = self.validation
        about: dict[str, Any] = {
            RUN: {
                "optimizer": self.config.optimizer.name,
                "samples": self.job.about.samples,
                "config": self.config.to_toml(),
                DATA: self.job.bundle.digest,
            }
        }
        if validated == self.pipeline.steps:
            about["validation_loss"] = loss
        extras = {METRICS: self.folder.history_until_now()} if self.folder is not None else {}
        self.saver.start(about, extras, overlap=True)
        self.saved = self.pipeline.steps

    def save_now(self) -> None:
        """Write a checkpoint of the last step, and wait until it is on the disk; all workers call it.

        Raises:
            CounterflowError: the checkpoint cannot be written.
        """
        self._flush()
        if self.saved != self.pipeline.steps:
            self.saver.wait()
            self._save()
        self.saver.wait()
        outcome = self.saver.last
        if outcome is not None and outcome.path is None:
            earlier = complete(self.checkpoints)
            place = f"earlier ones are whole, in {self.checkpoints}" if earlier else "there is no earlier one"
            raise CounterflowError(
                f"the checkpoint of step {outcome.step} is not written: {outcome.problem}; {place}"
            )
