"""A run's timeline while it goes on, written now and then where whoever looks finds it.

In synchronous schemes it is that of the step just made; in others that of the next two, where all steps are
alike: workers agree on it at some step, and what that changes is over after the two that follow.

Invariant: all workers are asked at the same step, and rank 0 alone decides; what is shown costs no more than
one part in a hundred of the time, whatever a timeline takes to be gathered and written.
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
"""By worker its ops in their order, with start and end in seconds."""

EVERY_SECONDS = 1.0
"""How often at most."""

_SHARE = 0.01
"""Of a run's time, at most."""

_SETTLING = 2
"""Steps of asynchronous schemes between the one at which workers agree and those that are shown."""


class Live:
    """When the next timeline is due, and writing it; made on every worker, rank 0's decides.

    Args:
        pipeline: what runs it.
        schedule: what is run.
        costs: of its stages, from which a timeline is predicted.
        folder: where rank 0 writes; None elsewhere.
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
        """Steps since the pipeline was empty."""
        self._timed_until = 0
        """In asynchronous schemes the second step that is shown; 0: none is timed."""
        self._tracing = ExitStack()

    def due(self) -> bool:
        """Whether it is time for one."""
        return time.perf_counter() >= self._due

    def went_on(self) -> None:
        """A step more is made."""
        self._in_a_row += 1

    def emptied(self) -> None:
        """Nothing is in flight: steps are not alike for a while."""
        self._in_a_row = 0
        self._end_timing()

    def show_soon(self, done: int) -> None:
        """Write the timeline of the step just made; or begin to time the next ones. All workers call it.

        Args:
            done: steps of the run.
        """
        if self._schedule.synchronous:
            self._show()
        elif not self._timed_until and self._in_a_row > self._pipeline.warm_up_steps:
            self._timed_until = done + _SETTLING + STEPS
            self._tracing.enter_context(self._pipeline.traced())

    def show_if_timed(self, done: int) -> None:
        """Write what was timed, if this was the last step of it; all workers call it."""
        if done == self._timed_until:
            # What was timed begins before what is shown.
            self._show([STEPS * period_ops(self._schedule, w) for w in range(self._schedule.workers)])
            self._end_timing()

    def _end_timing(self) -> None:
        self._timed_until = 0
        self._tracing.close()

    def _show(self, counts: Sequence[int] = ()) -> None:
        """Write the ops that were timed, or by worker the last ones, so many."""
        began = time.perf_counter()
        pipeline = self._pipeline
        rows = pipeline.timeline()
        found = pipeline.transport.gather([float(pipeline.peak_saved_bytes)])
        if self._folder is not None:
            saved = tuple(int(found[rank][0]) for rank in pipeline.ranks[0])
            if counts:
                rows = [row[-count:] for row, count in zip(rows, counts, strict=True)]
            about = self._schedule, self._costs, pipeline.steps, spans_of(rows), saved
            self._folder.put_live(Timeline(*about, ongoing=not self._schedule.synchronous))
        now = time.perf_counter()
        self._due = now + max(EVERY_SECONDS, (now - began) / _SHARE)


def spans_of(rows: Rows) -> tuple[Span, ...]:
    """Ops as they ran, by worker of a replica."""
    return tuple(Span(worker, *ran) for worker, row in enumerate(rows) for ran in row)
