"""A run's timeline as it was measured, and as the simulator predicts it from the stages' measured costs.

Of a whole step both are of one kind, a ``Simulation``, so whatever is known of the one (makespan, bubbles,
memory, a picture) is worked out for the other by the same code. An asynchronous run is never whole while it
goes on: each worker has ops of older mini-batches. There a timeline is what each worker runs from where it
begins one mini-batch to where it begins the next but one, in the part that repeats; from one beginning to
the next is what a step takes.

Invariant: ops that are not the schedule's make no timeline. Reading and drawing need no torch.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from counterflow.drawing import Chart, chart_of
from counterflow.drawing.chart import Bubble
from counterflow.drawing.units import bytes_text, compact, time_unit
from counterflow.errors import ConfigError, CounterflowError
from counterflow.program.actions import Compute
from counterflow.program.segments import segments
from counterflow.schedule.formats import parse_op
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.simulation import ByteCosts, Cause, Costs, OpCosts, Piece, Simulation, Span, simulate
from counterflow.simulation.op_costs import MOST_COST
from counterflow.simulation.timed_schedule import Played, timed

if TYPE_CHECKING:
    from counterflow.measure.stage_costs import StageCost

WAITING = "dependency or message"  # how long messages took was not measured

STEPS = 2
"""Of the timeline of an asynchronous run that goes on."""

_AFTER = 2
"""Steps that are simulated behind them: workers still run ops of their mini-batches."""


class Side(NamedTuple):
    """A step as it was measured, or as it is predicted.

    Attributes:
        seconds: that it took.
        busy: seconds that each worker computed in it.
        parts: the mean worker's seconds, by what they were for; they add up to the step's.
    """

    seconds: float
    busy: Sequence[float]
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class _AsRan:
    """What ops took in a run: the median of those that are alike; their bytes are the costs' own."""

    own: OpCosts
    took: dict[tuple[object, ...], float]

    @classmethod
    def of(cls, own: OpCosts, spans: Sequence[Span]) -> Self:
        """Those of the ops that were timed."""
        found: dict[tuple[object, ...], list[float]] = {}
        for span in spans:
            op = span.op
            key = op.kind, op.stage, span.worker, len(op.micro_batches), op.parts
            found.setdefault(key, []).append(span.end - span.start)
        return cls(own, {key: statistics.median(lengths) for key, lengths in found.items()})

    def seconds(self, piece: Piece) -> float:
        """How long such an op took."""
        return self.took[piece.kind, piece.stage, piece.worker, piece.micro_batches, piece.parts]

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """What it adds to its worker's memory."""
        return self.own.bytes(piece)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Ops of a run that were timed, and the costs from which they are predicted.

    Attributes:
        schedule: what was run.
        costs: of the stages, as measured before training.
        step: the last step that was measured, counted from 1.
        spans: its ops, on the workers of replica 0, in seconds.
        saved_bytes: most bytes each of these workers saved for backward at once, as counted.
        ongoing: whether these are ``STEPS`` steps of an asynchronous run that goes on; else they are all ops
            of the schedule.
    """

    schedule: Schedule
    costs: Costs
    step: int
    spans: tuple[Span, ...]
    saved_bytes: tuple[int, ...]
    ongoing: bool = False

    def measured(self) -> Simulation:
        """The whole schedule as it ran.

        Raises:
            ConfigError: the ops are not those of the schedule.
        """
        return played(self.schedule, self.costs, self.spans)

    def predicted(self) -> Simulation:
        """As the simulator plays it: the schedule, or a training of as few steps as have such two."""
        return simulate(_place(self.schedule)[0] if self.ongoing else self.schedule, self.costs)

    def predicted_rows(self) -> Rows:
        """Of a run that goes on: by worker its ops in their order, as predicted."""
        predicted = self.predicted().timeline
        return tuple(tuple(predicted[i] for i in place) for place in _place(self.schedule)[1])

    def rows(self) -> tuple[Rows, Rows]:
        """The same as measured, and as predicted.

        Raises:
            ConfigError: what was measured is not so many steps of the schedule.
        """
        should = self.predicted_rows()
        was = tuple(tuple(s for s in self.spans if s.worker == worker) for worker in range(len(should)))
        for worker, (ran, known) in enumerate(zip(was, should, strict=True)):
            if list(map(_kind, ran)) != list(map(_kind, known)):
                raise ConfigError(
                    f"worker {worker}: its {len(ran)} ops are not {STEPS} steps of the schedule"
                )
        if sum(map(len, was)) != len(self.spans):
            raise ConfigError(f"ops of more than the {len(should)} workers")
        return was, should

    def sides(self) -> tuple[Side, Side]:
        """A step as measured, and as predicted."""
        if self.ongoing:
            was, should = self.rows()
            return _of_rows(was), _of_rows(should)
        return _of_whole(self.measured()), _of_whole(self.predicted())

    def as_ran(self) -> Simulation:
        """The step as the simulator plays it with ops as long as they were in the run."""
        own = self.costs.of_ops(self.schedule.stages)
        return simulate(self.schedule, dataclasses.replace(self.costs, ops=_AsRan.of(own, self.spans)))

    def charts(self, *, memory: bool = False) -> list[Chart]:
        """What to draw: measured above predicted.

        Args:
            memory: whether with the bytes over time; of a run that goes on they are not known.
        """
        if self.ongoing:
            return list(self._ongoing_charts())
        measured = _chart(self.measured(), f"measured, step {self.step}", max(self.saved_bytes), memory)
        bubbles = (
            dataclasses.replace(bubble, cause=WAITING) if bubble.cause == Cause.DEPENDENCY.value else bubble
            for bubble in measured.bubbles
        )
        predicted = self.predicted()
        peaks = [use.peak for use in predicted.memory or ()]
        return [
            dataclasses.replace(measured, bubbles=tuple(bubbles)),
            _chart(predicted, "predicted", max(peaks), memory),
        ]

    def _ongoing_charts(self) -> Iterator[Chart]:
        """Micro-batches are counted as in the prediction."""
        whole = chart_of(self.predicted())
        order = [i for place in _place(self.schedule)[1] for i in place]
        new = {old: at for at, old in enumerate(order)}
        names = f"measured, steps {self.step - 1} and {self.step}", "predicted, two steps"
        for name, rows in zip(names, self.rows(), strict=True):
            first = min(row[0].start for row in rows)
            boxes = tuple(
                dataclasses.replace(
                    whole.boxes[old],
                    start=span.start - first,
                    end=span.end - first,
                    needs=tuple(new[need] for need in whole.boxes[old].needs if need in new),
                )
                for old, span in zip(order, (span for row in rows for span in row), strict=True)
            )
            bubbles = tuple(
                Bubble(worker, a.end - first, b.start - first, WAITING)
                for worker, row in enumerate(rows)
                for a, b in pairwise(row)
                if b.start > a.end
            )
            seconds, _, parts = _of_rows(rows)
            share = compact(100 * parts[_COMPUTING] / (seconds or 1.0), 3)
            yield dataclasses.replace(
                whole,
                heading=f"{name}: {whole.heading}",
                summary=f"a step {time_unit(seconds).text(seconds)}, of which a worker computes {share} %",
                makespan=max(box.end for box in boxes),
                boxes=boxes,
                bubbles=bubbles,
                steady=None,
            )

    def dumps(self) -> str:
        """JSON with a line for each of the ops; ``loads`` reads it back with the schedule."""
        head = {
            "format": _format(ongoing=self.ongoing),
            "format_version": 1,
            "step": self.step,
            "saved_bytes": self.saved_bytes,
            "costs": dataclasses.asdict(self.costs),
        }
        ops = {"measured": self.spans} | ({} if self.ongoing else {"predicted": self.predicted().timeline})
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for name, spans in ops.items():  # to the nanosecond: more digits say nothing
            rows = ([s.worker, str(s.op), round(s.start, 9), round(s.end, 9)] for s in spans)
            lines.append(f"  {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, rows)) + "\n  ]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def loads(cls, text: str, schedule: Schedule, name: str, *, ongoing: bool = False) -> Timeline:
        """What ``dumps`` wrote.

        Args:
            text: what it wrote.
            schedule: the schedule it is of.
            name: what to call the text in errors.
            ongoing: as the attribute.

        Raises:
            ConfigError: the text is something else, or does not fit the schedule.
        """
        try:
            data = json.loads(text)
            if data["format"] != _format(ongoing=ongoing):
                raise ValueError(f'"format" is {data["format"]!r}')
            costs = dict(data["costs"])
            costs["memory"] = ByteCosts(**costs["memory"])
            spans = tuple(
                Span(w, parse_op(op), _number(start), _number(end)) for w, op, start, end in data["measured"]
            )
            saved = tuple(map(_number, data["saved_bytes"]))
            found = cls(schedule, Costs(**costs), data["step"], spans, saved, ongoing)
            found.rows() if ongoing else found.measured()
        except (ValueError, TypeError, KeyError, RecursionError, CounterflowError) as error:
            what = "two steps" if ongoing else "the timeline"
            raise ConfigError(f"{name}: not {what} of a run, or damaged: {error}") from None
        return found


Rows = tuple[tuple[Span, ...], ...]


def _format(*, ongoing: bool) -> str:
    return "counterflow-window" if ongoing else "counterflow-timeline"


_COMPUTING, _WAITED = "computing", "waiting for others' ops and messages"


def _of_whole(result: Simulation) -> Side:
    """How long messages took was not measured."""
    workers = result.schedule.workers
    idle = {cause: sum(g.end - g.start for g in result.gaps if g.cause is cause) / workers for cause in Cause}
    parts = {
        _COMPUTING: sum(result.busy) / workers,
        "warm-up": idle[Cause.WARM_UP],
        _WAITED: idle[Cause.DEPENDENCY] + idle[Cause.MESSAGE],
        "drain": idle[Cause.DRAIN],
    }
    return Side(result.makespan, result.busy, parts)


def _of_rows(rows: Rows) -> Side:
    """A step is from where a worker begins one to where it begins the next: the mean of all."""
    busy = tuple(sum(span.end - span.start for span in row[: len(row) // STEPS]) for row in rows)
    seconds = sum(row[len(row) // STEPS].start - row[0].start for row in rows) / len(rows)
    computing = sum(busy) / len(rows)
    return Side(seconds, busy, {_COMPUTING: computing, _WAITED: seconds - computing})


def _kind(span: Span) -> tuple[Any, ...]:
    return span.op.kind, span.op.stage, span.op.part, span.op.parts


@lru_cache(maxsize=4)
def _place(schedule: Schedule) -> tuple[Schedule, tuple[range, ...]]:
    """A training with steps in the part that repeats, and by worker where they are among all its ops."""
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


def _number(value: Any) -> Any:
    """``value``, which a file says, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST_COST:
        raise ValueError(f"{str(value)[:60]!r} is no number of a timeline")
    return value


def costs_of(stages: Sequence[StageCost], recompute: Recompute, replicas: int) -> Costs:
    """The simulator's costs from those measured for each stage.

    Messages and gradient syncs cost nothing here: both go on beside the ops. Bytes are those saved for
    backward alone, which are what the engine counts; weights, gradients and optimiser state are not.
    """
    return Costs(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        input_gradient=[stage.input_gradient_seconds for stage in stages],
        weight_gradients=[stage.weight_gradients_seconds for stage in stages],
        recompute=recompute,
        replicas=replicas,
        memory=ByteCosts(
            activations=[stage.activation_bytes for stage in stages],
            kept_for_weights=[stage.kept_bytes for stage in stages],
            inputs=[stage.input_bytes for stage in stages],
            beyond_inputs=[stage.beyond_input_bytes for stage in stages],
            layers=[stage.layers for stage in stages],
            layer_inputs=[stage.layer_input_bytes for stage in stages],
            largest_layer=[stage.largest_layer_bytes for stage in stages],
        ),
    )


def played(schedule: Schedule, costs: Costs, spans: Sequence[Span]) -> Simulation:
    """A schedule whose ops took the times that were measured.

    Raises:
        ConfigError: the ops are not those of the schedule.
    """
    times = {(span.worker, span.op): (span.start, span.end) for span in spans}
    wanted = [(worker, op) for worker, order in enumerate(schedule.orders) for op in order]
    if times.keys() != set(wanted):
        raise ConfigError(f"{len(times)} measured ops are not the {len(wanted)} of {schedule}")
    first = min((span.start for span in spans), default=0.0)
    start, end = (np.array([times[key][side] - first for key in wanted]) for side in (0, 1))
    model = timed(schedule)
    sent = end[model.messages.makers]  # how long messages took was not measured
    return Simulation(model, costs, Played(start, end, end, np.empty((0, 4)), sent, sent), measured=True)


def _chart(result: Simulation, how: str, peak: float, memory: bool) -> Chart:
    chart = chart_of(result, memory=memory)
    span = time_unit(result.makespan).text(result.makespan)
    bubbles = compact(100 * result.bubble_ratio, 3)
    return dataclasses.replace(
        chart,
        heading=f"{how}: {chart.heading}",
        summary=f"makespan {span}, bubble ratio {bubbles} %, saved for backward {bytes_text(peak)}",
    )
