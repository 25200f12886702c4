"""A run's timeline while the run is in progress, written now and then into its folder.

In synchronous schemes it shows the step just made. In asynchronous schemes, where all steps are alike, it
shows two later steps: workers agree at some step to time them, and the agreement disturbs only the two steps
in between.

Invariant: all workers take part at the same step, and rank 0 alone decides; timelines cost at most one
percent of the time, however long it takes to gather and write one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule.ir import Op, Schedule
from counterflow.simulation import Costs, Span
from counterflow.simulation.periods import period_ops

from .folder import RunFolder
from .timeline import STEPS, Timeline

Rows = Sequence[Sequence[tuple[Op, float, float]]]
"""The ops of each worker in their order, with start and end in seconds."""

EVERY_SECONDS = 1.0
"""Minimum seconds between timelines."""

_SHARE = 0.01
"""Maximum share of a run's time."""

_SETTLING = 2
"""Steps of asynchronous schemes between the one at which workers agree and the steps that are shown."""


class Live:
    """Decides when the next timeline is due, and writes it. Every worker has one; rank 0's decides.

    Args:
        pipeline: pipeline that runs the schedule.
        schedule: schedule that is run.
        costs: costs of its stages, from which a timeline is predicted.
        folder: folder that rank 0 writes; None on other ranks.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, costs: Costs, folder: RunFolder | None
    ) -> None:
        self._pipeline = pipeline
        self._schedule = schedule
        self._costs = costs
        self._folder = folder
        self._due = 0.0
        self._in_a_row = 0
        """Steps since the pipeline was last empty."""
        self._timed_until = 0
        """Number of the second step that is shown, in asynchronous schemes; 0: none is timed."""
        self._tracing = ExitStack()

    def due(self) -> bool:
        """True if a timeline is due."""
        return time.perf_counter() >= self._due

    def went_on(self) -> None:
        """Count one more step."""
        self._in_a_row += 1

    def emptied(self) -> None:
        """Note that nothing is in flight: the next steps are not alike."""
        self._in_a_row = 0
        self._end_timing()

    def show_soon(self, done: int) -> None:
        """Write the timeline of the step just made, or begin to time the next steps. All workers call it.

        Args:
            done: number of steps made.
        """
        if self._schedule.synchronous:
            self._show()
        elif not self._timed_until and self._in_a_row > self._pipeline.warm_up_steps:
            self._timed_until = done + _SETTLING + STEPS
            self._tracing.enter_context(self._pipeline.traced())

    def show_if_timed(self, done: int) -> None:
        """Write the timed steps if the last one has just been made; all workers call it."""
        if done == self._timed_until:
            # The timed part begins before the part that is shown.
            self._show([STEPS * period_ops(self._schedule, w) for w in range(self._schedule.workers)])
            self._end_timing()

    def _end_timing(self) -> None:
        self._timed_until = 0
        self._tracing.close()

    def _show(self, counts: Sequence[int] = ()) -> None:
        began = time.perf_counter()
        pipeline = self._pipeline
        rows = pipeline.timeline()
        peaks = pipeline.transport.gather([float(pipeline.peak_saved_bytes)])
        if self._folder is not None:
            saved = tuple(int(peaks[rank][0]) for rank in pipeline.ranks[0])
            if counts:
                rows = [row[-count:] for row, count in zip(rows, counts, strict=True)]
            about = self._schedule, self._costs, pipeline.steps, spans_of(rows), saved
            self._folder.put_live(Timeline(*about, ongoing=not self._schedule.synchronous))
        now = time.perf_counter()
        self._due = now + max(EVERY_SECONDS, (now - began) / _SHARE)


def spans_of(rows: Rows) -> tuple[Span, ...]:
    """Ops as they ran, by worker of a replica."""
    return tuple(Span(worker, *ran) for worker, row in enumerate(rows) for ran in row)
