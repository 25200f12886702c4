"""A run's timeline as measured, and as predicted by the simulator from the stages' measured costs.

For a whole step both are a ``Simulation``, so the same code computes makespan, bubbles, memory and pictures
of both. An asynchronous run in progress has no whole step: each worker has ops of older mini-batches in
flight. Its timeline covers two consecutive steps of each worker in the steady state, and a step lasts from
the beginning of one mini-batch to the beginning of the next.

Invariant: a timeline contains exactly the schedule's ops. Reading and drawing need no torch.
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

from counterflow.common.number_texts import byte_size, compact
from counterflow.drawing import Chart, chart_of
from counterflow.drawing.chart import Bubble
from counterflow.drawing.time_units import time_unit
from counterflow.errors import ConfigError, CounterflowError
from counterflow.program.actions import Compute
from counterflow.program.segments import segments
from counterflow.schedule.formats import parse_op
from counterflow.schedule.ir import Schedule, Workload
from counterflow.schedule.modes import Recompute
from counterflow.simulation import ByteCosts, Cause, Costs, OpCosts, Piece, Simulation, Span, simulate
from counterflow.simulation.op_costs import MOST_COST
from counterflow.simulation.timed_cache import timed
from counterflow.simulation.timed_schedule import Played

if TYPE_CHECKING:
    from counterflow.measure.stages.stage_record import StageCost

WAITING = "dependency or message"  # the duration of messages was not measured

STEPS = 2
"""Steps in the timeline of an asynchronous run in progress."""

_AFTER = 2
"""Steps that are simulated after them: workers still run ops of their mini-batches."""


class Side(NamedTuple):
    """A step as measured, or as predicted.

    Attributes:
        seconds: duration of the step.
        busy: seconds that each worker computed.
        parts: the mean worker's seconds, by purpose; they add up to the step's.
    """

    seconds: float
    busy: Sequence[float]
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class _AsRan:
    """Durations of ops in a run: the median over ops of one kind; their bytes are those of the costs."""

    op_costs: OpCosts
    took: dict[tuple[object, ...], float]

    @classmethod
    def of(cls, op_costs: OpCosts, spans: Sequence[Span], workload: Workload) -> Self:
        """The durations of the ops that were timed."""
        durations: dict[tuple[object, ...], list[float]] = {}
        for span in spans:
            key = cls._key(Piece.of(span.op, span.worker, workload))
            durations.setdefault(key, []).append(span.end - span.start)
        return cls(op_costs, {key: statistics.median(lengths) for key, lengths in durations.items()})

    @staticmethod
    def _key(piece: Piece) -> tuple[object, ...]:
        return piece.kind, piece.stage, piece.worker, piece.micro_batches, piece.parts, piece.part

    def seconds(self, piece: Piece) -> float:
        """Duration of such an op."""
        return self.took[self._key(piece)]

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """Bytes that the op adds to its worker's memory."""
        return self.op_costs.bytes(piece)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timed ops of a run, and the costs from which they are predicted.

    Attributes:
        schedule: schedule of the run.
        costs: costs of the stages, as measured before training.
        step: the last step that was measured, counted from 1.
        spans: ops of that step on the workers of replica 0, in seconds.
        saved_bytes: maximum bytes that each of these workers saved for backward at once, as counted.
        ongoing: whether these are ``STEPS`` steps of an asynchronous run in progress; otherwise they are all
            ops of the schedule.
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
        """The predicted schedule; while an asynchronous run is in progress, a short training that contains
        its two steps.
        """
        return simulate(_place(self.schedule)[0] if self.ongoing else self.schedule, self.costs)

    def predicted_rows(self) -> Rows:
        """For an asynchronous run in progress: the predicted ops of each worker in their order."""
        predicted = self.predicted().timeline
        return tuple(tuple(predicted[i] for i in place) for place in _place(self.schedule)[1])

    def rows(self) -> tuple[Rows, Rows]:
        """The ops as measured, and as predicted.

        Raises:
            ConfigError: the measured ops are not this number of steps of the schedule.
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
        """The simulated step if ops take as long as they did in the run."""
        op_costs = self.costs.of_ops(self.schedule.stages)
        return simulate(
            self.schedule,
            dataclasses.replace(self.costs, ops=_AsRan.of(op_costs, self.spans, self.schedule.workload)),
        )

    def charts(self, *, memory: bool = False) -> list[Chart]:
        """Charts of the measured step above the predicted one.

        Args:
            memory: whether to draw bytes over time; for a run in progress they are unknown.
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
        chart = chart_of(self.predicted())
        order = [i for place in _place(self.schedule)[1] for i in place]
        new = {old: at for at, old in enumerate(order)}
        names = f"measured, steps {self.step - 1} and {self.step}", "predicted, two steps"
        for name, rows in zip(names, self.rows(), strict=True):
            first = min(row[0].start for row in rows)
            boxes = tuple(
                dataclasses.replace(
                    chart.boxes[old],
                    start=span.start - first,
                    end=span.end - first,
                    needs=tuple(new[need] for need in chart.boxes[old].needs if need in new),
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
                chart,
                heading=f"{name}: {chart.heading}",
                summary=f"a step {time_unit(seconds).text(seconds)}, of which a worker computes {share} %",
                makespan=max(box.end for box in boxes),
                boxes=boxes,
                bubbles=bubbles,
                steady=None,
            )

    def dumps(self) -> str:
        """JSON with one line per op; ``loads`` reads it back with the schedule."""
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
        """A timeline from the text that ``dumps`` wrote.

        Args:
            text: text that ``dumps`` wrote.
            schedule: schedule of the timeline.
            name: name of the text in errors.
            ongoing: see the attribute.

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
            timeline = cls(schedule, Costs(**costs), data["step"], spans, saved, ongoing)
            timeline.rows() if ongoing else timeline.measured()
        except (ValueError, TypeError, KeyError, RecursionError, CounterflowError) as error:
            what = "two steps" if ongoing else "the timeline"
            raise ConfigError(f"{name}: not {what} of a run, or damaged: {error}") from None
        return timeline


Rows = tuple[tuple[Span, ...], ...]


def _format(*, ongoing: bool) -> str:
    return "counterflow-window" if ongoing else "counterflow-timeline"


_COMPUTING, _WAITED = "computing", "waiting for others' ops and messages"


def _of_whole(result: Simulation) -> Side:
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
    """The side of two steps: a step lasts from the beginning of one to that of the next, averaged over
    workers.
    """
    busy = tuple(sum(span.end - span.start for span in row[: len(row) // STEPS]) for row in rows)
    seconds = sum(row[len(row) // STEPS].start - row[0].start for row in rows) / len(rows)
    computing = sum(busy) / len(rows)
    return Side(seconds, busy, {_COMPUTING: computing, _WAITED: seconds - computing})


def _kind(span: Span) -> tuple[Any, ...]:
    return span.op.kind, span.op.stage, span.op.part, span.op.parts


@lru_cache(maxsize=4)
def _place(schedule: Schedule) -> tuple[Schedule, tuple[range, ...]]:
    """A training with steps in the steady state, and for each worker their range among all its ops."""
    cut = segments(schedule)
    first = cut.last + 1
    training = cut.program(first + STEPS + _AFTER).schedule
    edges = accumulate(map(len, training.orders), initial=0)
    ranges = []
    for worker, edge in zip(range(training.workers), edges, strict=False):
        counts = [sum(isinstance(a, Compute) for a in program.actions[worker]) for program in cut.steady]
        begin = edge + sum(counts)
        ranges.append(range(begin, begin + STEPS * counts[-1]))
    return training, tuple(ranges)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST_COST:
        raise ValueError(f"{str(value)[:60]!r} is not a number of a timeline")
    return value


def costs_of(stages: Sequence[StageCost], recompute: Recompute, replicas: int) -> Costs:
    """The simulator's costs from those measured for each stage.

    Messages and gradient syncs cost nothing here, as both overlap with the ops. Bytes are those saved for
    backward alone, which the engine counts; weights, gradients and optimiser state are not included.
    """
    recomputes = recompute is Recompute.LAYER
    parts = [_OpSeconds.of(stage, recomputes=recomputes) for stage in stages]
    return Costs(
        forward=[part.forward for part in parts],
        backward=[part.backward for part in parts],
        input_gradient=[part.input_gradient for part in parts],
        weight_gradients=[part.weight_gradients for part in parts],
        attention=[part.attention for part in parts],
        overhead=[part.overhead for part in parts],
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
            state=[stage.profile.state_bytes for stage in stages],
            slice_state=[stage.profile.slice_state_bytes for stage in stages],
            state_gradients=0.0,
        ),
    )


class _OpSeconds(NamedTuple):
    """Seconds of a stage's ops without what each takes however short its slice is, and that overhead.

    ``attention`` is a share of the former. Without slices there is no overhead.
    """

    forward: float
    backward: float
    input_gradient: float
    weight_gradients: float
    attention: float
    overhead: float

    @classmethod
    def of(cls, stage: StageCost, *, recomputes: bool) -> _OpSeconds:
        """The parts of measured seconds; ``recomputes``: a forward is computed again in each backward.

        One overhead is that of a whole op, so that a whole micro-batch takes what was measured.
        """
        both = stage.forward_seconds + stage.backward_seconds
        overhead = stage.profile.fixed_share * min(stage.forward_seconds, stage.backward_seconds)
        less = 0.0 if recomputes else overhead  # the overhead of the forward's second run is the backward's
        forward, backward = stage.forward_seconds - overhead, stage.backward_seconds - less
        rest = forward + backward
        return cls(
            forward=forward,
            backward=backward,
            input_gradient=max(0.0, stage.input_gradient_seconds - less),
            weight_gradients=max(0.0, stage.weight_gradients_seconds - overhead),
            attention=min(1.0, stage.profile.attention_share * both / rest) if rest else 0.0,
            overhead=overhead,
        )


def played(schedule: Schedule, costs: Costs, spans: Sequence[Span]) -> Simulation:
    """The simulation of a schedule whose ops took the measured times.

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
    sent = end[model.messages.sent_after]  # the duration of messages was not measured
    return Simulation(model, costs, Played(start, end, end, np.empty((0, 4)), sent, sent), measured=True)


def _chart(result: Simulation, how: str, peak: float, memory: bool) -> Chart:
    chart = chart_of(result, memory=memory)
    span = time_unit(result.makespan).text(result.makespan)
    bubbles = compact(100 * result.bubble_ratio, 3)
    return dataclasses.replace(
        chart,
        heading=f"{how}: {chart.heading}",
        summary=f"makespan {span}, bubble ratio {bubbles} %, saved for backward {byte_size(peak)}",
    )
