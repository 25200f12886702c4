"""Record of a run: metrics with one line per step, some timelines, and a summary at the end.

Invariant: all workers count alike, and rank 0 alone writes; a non-finite number ends the run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from counterflow.checkpoints.memory_copies import ResumePoint
from counterflow.errors import WorkerError
from counterflow.measure.machine import beside_torch_bytes, peak_bytes
from counterflow.runtime.execution.step import Step
from counterflow.runtime.pipeline import Pipeline
from counterflow.simulation import Costs, Simulation, Span

from .folder import RunFolder, read_metrics
from .job import Job
from .live import spans_of
from .metrics import with_records
from .resuming import history
from .supervision.events import RESTARTED, Event, note
from .timeline import Timeline
from .training_report import Numbers, Pair, Summary

_SAMPLES = 9
"""Number of timelines that are kept: the last ones, spread over the last part of the run."""

_LAST = 10
"""Number of steps whose mean is the final training loss."""

Watch = Callable[[Numbers], None]


class RunRecorder:
    """Gathers one worker's results of a run; rank 0 writes them.

    Args:
        job: the job that is trained.
        pipeline: the pipeline that trains it.
        folder: folder that rank 0 writes; None on other ranks.
        watch: called with every line of the metrics, on rank 0.
        keeps_recent: whether lines are kept for the next copy to memory.
    """

    def __init__(
        self,
        job: Job,
        pipeline: Pipeline,
        folder: RunFolder | None,
        watch: Watch | None,
        *,
        keeps_recent: bool,
    ) -> None:
        self.job, self.pipeline, self.folder, self.watch = job, pipeline, folder, watch
        self.keeps_recent = keeps_recent
        self.recent: list[Numbers] = []
        """Lines of the metrics since the last copy to memory."""
        self.event: Event | None = None
        """The event of a restart on rank 0: where the run resumes."""
        self.losses: deque[float] = deque(maxlen=_LAST)
        self.samples: deque[tuple[Step, tuple[Span, ...]]] = deque(maxlen=_SAMPLES)
        self.training_seconds = 0.0
        self._took_seconds: dict[int, float] = {}
        """Seconds of steps that were made but not yet reported."""
        self._unreported_seconds = 0.0
        """Seconds of calls since one reported a step."""
        self._began = self._before = 0.0

    def start(self) -> None:
        """Note that training begins now."""
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since training began."""
        return time.perf_counter() - self._began

    def begin(self, point: ResumePoint | None, attempt: int, *, tells: bool) -> None:
        """Cut the metrics at the step where the run resumes, note that step, and continue them.

        Args:
            point: state in memory from which the run resumes; None: it resumes from the job's checkpoint.
            attempt: number of times that the run was begun before.
            tells: whether the step is noted also if the run was not begun before.
        """
        if self.folder is None:
            return
        if point is None:
            self.folder.rewind(history(self.job.start))
        else:
            self.folder.rewind(with_records(self.folder.history, point.step, point.records))
        source = "memory" if point is not None else "beginning" if self.job.start is None else "checkpoint"
        if attempt or tells:
            self.event = note(
                self.folder.path, RESTARTED, attempt=attempt, step=self.job.first_step, source=source
            )
        for line in read_metrics(self.folder.path) if self.job.first_step else ():
            self._before = float(line["seconds"])
            if "loss" in line:
                self.losses.append(line["loss"])

    def report_call(self, number: int, step: Step) -> None:
        """Note a call of ``Pipeline.step``, and the step that it reports."""
        self._took_seconds[number] = step.seconds
        self.report([step])

    def report(self, steps: Sequence[Step]) -> None:
        """Note the results of one call; without a barrier or if asynchronous, a later call reports a step."""
        seconds = sum(step.seconds for step in steps)
        self.training_seconds += seconds
        self._unreported_seconds += seconds
        reported = {step.reports_step: step for step in steps if step.reports_step is not None}
        if not reported:
            return
        share, self._unreported_seconds = self._unreported_seconds / len(reported), 0.0
        for number, step in reported.items():
            # A synchronous step lasts as long as its own call; otherwise a call works on other steps as well.
            took = self._took_seconds.pop(number)
            self._report_step(number, step, took if self.job.schedule.synchronous else share)

    def _report_step(self, number: int, step: Step, seconds: float) -> None:
        values = {"loss": step.loss, "grad_norm": step.grad_norm}
        if step.skipped:
            values = {name: number for name, number in values.items() if math.isfinite(number)} | {
                "skipped": 1
            }
        else:
            self.finite("gradient norm", step.grad_norm)
        if step.loss_scale is not None:
            values["loss_scale"] = step.loss_scale
        if "loss" in values:
            self.losses.append(step.loss)
        self.record(
            step=number + 1,
            **values,
            learning_rate=self.job.learning_rate(number),
            samples_per_second=step.samples / seconds,
        )

    def finite(self, name: str, value: float) -> float:
        """A number of the run.

        Raises:
            WorkerError: the number is non-finite.
        """
        if math.isfinite(value):
            return value
        updates = f"{self.pipeline.steps} update{'s' if self.pipeline.steps > 1 else ''}"
        raise WorkerError(f"the {name} is {value:g} after {updates}; try a lower learning rate")

    def record(self, **line: float) -> None:
        """Write a line of the metrics."""
        if self.keeps_recent:
            self.recent.append(line)
        line["seconds"] = self._before + self.seconds
        if self.folder is not None:
            self.folder.record(line)
            if self.watch is not None:
                self.watch(line)

    def sample(self, step: Step) -> None:
        """Record the ops of the step that was just made; all workers call it."""
        self.samples.append((step, spans_of(self.pipeline.timeline())))

    def finish(
        self, costs: Costs, *, updates: int, stopped: bool, seconds: float, validation_loss: float
    ) -> Summary | None:
        """The summary of the run, which rank 0 writes and returns. All workers call it.

        Args:
            costs: costs of the stages, from which timelines are predicted.
            updates: updates that the run made.
            stopped: whether the run was ended early.
            seconds: duration of the run.
            validation_loss: validation loss after the last update.
        """
        job, pipeline = self.job, self.pipeline
        numbers = (
            pipeline.peak_saved_bytes,
            sum(pipeline.peak_versions.values()),
            peak_bytes(pipeline.device),
            pipeline.weights.held_bytes(),
            beside_torch_bytes(pipeline.device),
        )
        gathered = pipeline.transport.gather([*map(float, numbers)])
        if self.folder is None:
            return None
        saved, copies, used, weights, outside = zip(
            *(gathered[rank] for rank in pipeline.ranks[0]), strict=True
        )
        timelines = [
            Timeline(job.schedule, costs, step.number + 1, spans, tuple(map(int, saved)))
            for step, spans in self.samples
        ]
        ops = [timeline.measured() for timeline in timelines]
        by_length = sorted(range(len(ops)), key=lambda index: ops[index].makespan)
        ran = by_length[len(by_length) // 2]
        middle = timelines[ran]
        predicted = middle.predicted()
        peaks = [use.peak for use in predicted.memory or ()]
        summary = Summary(
            about=job.about,
            steps=updates,
            stopped=stopped,
            seconds=seconds,
            samples_per_second=self._samples_per_second(updates),
            planned_samples_per_second=job.config.plan.samples_per_second
            if job.config.plan.mini_batch == job.about.samples  # otherwise the run differs from the plan
            else None,
            training_loss=self.finite("training loss", statistics.fmean(self.losses or [math.nan])),
            training_steps=len(self.losses),
            validation_loss=validation_loss,
            timed_together=job.schedule.periods,
            sampled_steps=tuple(step.number + 1 for step, _ in self.samples),
            step_seconds=statistics.median(step.seconds for step, _ in self.samples),
            ops_seconds=Pair(statistics.median(o.makespan for o in ops), predicted.makespan),
            bubble_ratio=Pair(statistics.median(map(_bubbles, ops)), _bubbles(predicted)),
            saved_bytes=tuple(Pair(*pair) for pair in zip(saved, peaks, strict=True)),
            stages_held=tuple(
                Pair(count, float(predicted_count))
                for count, predicted_count in zip(copies, predicted.weight_copies, strict=True)
            ),
            memory_bytes=tuple(
                Pair(most, weight + peak) for most, weight, peak in zip(used, weights, peaks, strict=True)
            ),
            slowdown=sum(ops[ran].busy) / (sum(predicted.busy) or math.inf),
            as_ran_seconds=middle.as_ran().makespan,
            beside_torch_bytes=() if job.about.on_cpu else outside,
        )
        self.folder.settle()
        self.folder.put_timeline(middle)
        self.folder.put_summary(summary)
        return summary

    def _samples_per_second(self, updates: int) -> float:
        samples, steps = self.job.about.samples, updates - self.job.first_step
        if steps:
            return steps * samples / self.training_seconds
        return samples / statistics.median(step.seconds for step, _ in self.samples)


def _bubbles(timeline: Simulation) -> float:
    steady = timeline.steady_bubble_ratio
    return timeline.bubble_ratio if steady is None else steady
