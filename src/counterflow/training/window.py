"""Two steps of an asynchronous run, one behind the other, as they ran and as the simulator predicts them.

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
from counterflow.errors import ConfigError
from counterflow.program.actions import Compute
from counterflow.program.segments import segments
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Simulation, Span, simulate

from .timeline import WAITING, Steps

STEPS = 2
"""Of a window."""

_AFTER = 2
"""Steps that are simulated behind it: workers still run ops of its mini-batches."""


@dataclass(frozen=True, slots=True)
class Window(Steps):
    """The ops of two steps; ``step`` is the second one."""

    FORMAT = "counterflow-window"
    WORDS = "two steps"

    def check(self) -> None:
        """Each worker's ops are two steps of the schedule."""
        self.times()

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
