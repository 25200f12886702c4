"""Two steps of a run without a flush, one behind the other, as they ran and as the simulator predicts them.

Such a run is never whole: each worker goes on with ops of older mini-batches. A window is what each worker
runs from where it begins one mini-batch to where it begins the next but one, in the part that repeats. From
one beginning to the next is what a step takes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from counterflow.drawing import Chart, chart_of
from counterflow.drawing.chart import Bubble
from counterflow.drawing.units import compact, time_unit
from counterflow.errors import ConfigError, CounterflowError
from counterflow.program.actions import Compute
from counterflow.program.segments import segments
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, Simulation, Span, simulate

from .timeline import WAITING, read, written

FORMAT = "counterflow-window"
STEPS = 2
"""Of a window."""

_AFTER = 2
"""Steps that are simulated behind it: workers still run ops of its mini-batches."""


@dataclass(frozen=True, slots=True)
class Window:
    """The ops of two steps.

    Attributes:
        schedule: what was run.
        costs: of the stages, as measured before training.
        step: the second step, counted from 1.
        spans: its ops and those of the step before, on the workers of replica 0, in seconds.
        saved_bytes: most bytes each of these workers saved for backward at once, as counted.
    """

    schedule: Schedule
    costs: Costs
    step: int
    spans: tuple[Span, ...]
    saved_bytes: tuple[int, ...]

    def predicted(self) -> Simulation:
        """A training of as few steps as have such two, as the simulator plays it."""
        return simulate(_place(self.schedule)[0], self.costs)

    def predicted_times(self) -> Times:
        """The two steps in it."""
        predicted = self.predicted().timeline
        return Times(tuple(tuple(predicted[i] for i in place) for place in _place(self.schedule)[1]))

    def times(self) -> tuple[Times, Times]:
        """As measured, and as predicted.

        Raises:
            ConfigError: what was measured is not two steps of the schedule.
        """
        should = self.predicted_times()
        workers = range(len(should.rows))
        was = tuple(tuple(span for span in self.spans if span.worker == worker) for worker in workers)
        for worker, (ran, known) in enumerate(zip(was, should.rows, strict=True)):
            if list(map(_kind, ran)) != list(map(_kind, known)):
                raise ConfigError(
                    f"worker {worker}: its {len(ran)} ops are not {STEPS} steps of the schedule"
                )
        if sum(map(len, was)) != len(self.spans):
            raise ConfigError(f"ops of more than the {len(workers)} workers")
        return Times(was), should

    def charts(self, *, memory: bool = False) -> list[Chart]:  # noqa: ARG002 - not known of a part
        """What to draw: measured above predicted; micro-batches are counted as in the prediction."""
        whole = chart_of(self.predicted())
        order = [i for place in _place(self.schedule)[1] for i in place]
        new = {old: at for at, old in enumerate(order)}
        charts = []
        names = f"measured, steps {self.step - 1} and {self.step}", "predicted, two steps"
        for name, times in zip(names, self.times(), strict=True):
            first = min(row[0].start for row in times.rows)
            spans = [span for row in times.rows for span in row]
            boxes = tuple(
                dataclasses.replace(
                    whole.boxes[old],
                    start=span.start - first,
                    end=span.end - first,
                    needs=tuple(new[need] for need in whole.boxes[old].needs if need in new),
                )
                for old, span in zip(order, spans, strict=True)
            )
            bubbles = (
                Bubble(worker, a.end - first, b.start - first, WAITING)
                for worker, row in enumerate(times.rows)
                for a, b in pairwise(row)
                if b.start > a.end
            )
            step = time_unit(times.step).text(times.step)
            charts.append(
                dataclasses.replace(
                    whole,
                    heading=f"{name}: {whole.heading}",
                    summary=f"a step {step}, of which a worker computes "
                    f"{compact(100 * times.computing / (times.step or 1.0), 3)} %",
                    makespan=max(box.end for box in boxes),
                    boxes=boxes,
                    bubbles=tuple(bubbles),
                    steady=None,
                )
            )
        return charts

    def dumps(self) -> str:
        """The window as JSON; ``window_from`` reads it back with the schedule."""
        return written(FORMAT, self.step, self.saved_bytes, self.costs, measured=self.spans)


@dataclass(frozen=True, slots=True)
class Times:
    """By worker the ops of two steps in their order, with their times."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each worker computes in the first step."""
        return tuple(sum(span.end - span.start for span in row[: len(row) // STEPS]) for row in self.rows)

    @property
    def computing(self) -> float:
        """The mean of that."""
        return sum(self.busy) / len(self.rows)

    @property
    def step(self) -> float:
        """Seconds from where a worker begins a step to where it begins the next: the mean of all."""
        each = (row[len(row) // STEPS].start - row[0].start for row in self.rows)
        return sum(each) / len(self.rows)


def window_from(text: str, schedule: Schedule, name: str) -> Window:
    """The window that ``Window.dumps`` wrote.

    Args:
        text: what it wrote.
        schedule: the schedule it is of.
        name: what to call the text in errors.

    Raises:
        ConfigError: the text is something else, or does not fit the schedule.
    """
    try:
        window = Window(schedule, *read(text, FORMAT))
        window.times()
    except (ValueError, TypeError, KeyError, RecursionError, CounterflowError) as error:
        raise ConfigError(f"{name}: not two steps of a run, or damaged: {error}") from None
    return window


def _kind(span: Span) -> tuple[Any, ...]:
    return span.op.kind, span.op.stage, span.op.part, span.op.parts


@lru_cache(maxsize=4)
def _place(schedule: Schedule) -> tuple[Schedule, tuple[range, ...]]:
    """A training with two steps in the part that repeats, and by worker where they are among all its ops."""
    cut = segments(schedule)
    first = cut.last + 1
    whole = cut.program(first + STEPS + _AFTER).schedule
    edges = accumulate(map(len, whole.orders), initial=0)
    found = []
    for worker, edge in zip(range(whole.workers), edges, strict=False):
        counts = [sum(isinstance(a, Compute) for a in program.actions[worker]) for program in cut.steady]
        begin = edge + sum(counts)
        found.append(range(begin, begin + STEPS * counts[-1]))
    return whole, tuple(found)
