"""A run's timeline as it was measured, and as the simulator predicts it from the stages' measured costs.

Invariant: a measured timeline is the same kind of thing as a predicted one, a ``Simulation``, so that
whatever is known of the one (makespan, bubbles, memory, a picture) is worked out for the other by the same
code. Reading and drawing need no torch.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from counterflow.drawing import Chart, chart_of
from counterflow.drawing.units import bytes_text, compact, time_unit
from counterflow.errors import ConfigError, CounterflowError
from counterflow.schedule.formats import parse_op
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.simulation import ByteCosts, Cause, Costs, OpCosts, Piece, Simulation, Span, simulate
from counterflow.simulation.costs import MOST_COST
from counterflow.simulation.timed_schedule import Played, timed

if TYPE_CHECKING:
    from counterflow.measure.stage_costs import StageCost

WAITING = "dependency or message"  # how long messages took was not measured


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
class Steps(ABC):
    """Ops of a run that were timed, and the costs from which they are predicted.

    Attributes:
        FORMAT: what their file says that it is.
        WORDS: what they are, in errors.
        schedule: what was run.
        costs: of the stages, as measured before training.
        step: the last step that was measured, counted from 1.
        spans: its ops, on the workers of replica 0, in seconds.
        saved_bytes: most bytes each of these workers saved for backward at once, as counted.
    """

    FORMAT: ClassVar[str]
    WORDS: ClassVar[str]

    schedule: Schedule
    costs: Costs
    step: int
    spans: tuple[Span, ...]
    saved_bytes: tuple[int, ...]

    @abstractmethod
    def check(self) -> None:
        """Refuse ops that are not the schedule's.

        Raises:
            ConfigError: they are not.
        """

    @abstractmethod
    def predicted(self) -> Simulation:
        """What the simulator plays."""

    @abstractmethod
    def charts(self, *, memory: bool = False) -> list[Chart]:
        """What to draw: measured above predicted."""

    def ops(self) -> dict[str, Sequence[Span]]:
        """The lists of ops in the file, by name."""
        return {"measured": self.spans}

    def dumps(self) -> str:
        """JSON with a line for each of the ops; ``loads`` reads it back with the schedule."""
        head = {
            "format": self.FORMAT,
            "format_version": 1,
            "step": self.step,
            "saved_bytes": self.saved_bytes,
            "costs": dataclasses.asdict(self.costs),
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lines += [_rows(name, spans) for name, spans in self.ops().items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def loads(cls, text: str, schedule: Schedule, name: str) -> Self:
        """What ``dumps`` wrote.

        Args:
            text: what it wrote.
            schedule: the schedule it is of.
            name: what to call the text in errors.

        Raises:
            ConfigError: the text is something else, or does not fit the schedule.
        """
        try:
            data = json.loads(text)
            if data["format"] != cls.FORMAT:
                raise ValueError(f'"format" is {data["format"]!r}')
            costs = dict(data["costs"])
            costs["memory"] = ByteCosts(**costs["memory"])
            spans = tuple(
                Span(w, parse_op(op), _number(start), _number(end)) for w, op, start, end in data["measured"]
            )
            saved = tuple(map(_number, data["saved_bytes"]))
            found = cls(schedule, Costs(**costs), data["step"], spans, saved)
            found.check()
        except (ValueError, TypeError, KeyError, RecursionError, CounterflowError) as error:
            raise ConfigError(f"{name}: not {cls.WORDS} of a run, or damaged: {error}") from None
        return found


@dataclass(frozen=True, slots=True)
class Timeline(Steps):
    """The ops of one step, from the first one's start."""

    FORMAT = "counterflow-timeline"
    WORDS = "the timeline"

    def check(self) -> None:
        """All ops of the schedule are there, and no others."""
        self.measured()

    def measured(self) -> Simulation:
        """The step as it ran."""
        return played(self.schedule, self.costs, self.spans)

    def predicted(self) -> Simulation:
        """The step as the simulator plays it."""
        return simulate(self.schedule, self.costs)

    def as_ran(self) -> Simulation:
        """The step as the simulator plays it with ops as long as they were in the run."""
        own = self.costs.of_ops(self.schedule.stages)
        return simulate(self.schedule, dataclasses.replace(self.costs, ops=_AsRan.of(own, self.spans)))

    def charts(self, *, memory: bool = False) -> list[Chart]:
        """What to draw: measured above predicted."""
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

    def ops(self) -> dict[str, Sequence[Span]]:
        """As measured, and as predicted."""
        return {"measured": self.spans, "predicted": self.predicted().timeline}


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


def _rows(key: str, spans: Sequence[Span]) -> str:
    """Ops with their times, a line each, as a value of JSON with its key."""
    lines = [[s.worker, str(s.op), _rounded(s.start), _rounded(s.end)] for s in spans]
    return f"  {json.dumps(key)}: [\n" + ",\n".join(f"    {json.dumps(line)}" for line in lines) + "\n  ]"


def _rounded(seconds: float) -> float:
    """To the nanosecond: more digits say nothing.

    >>> _rounded(0.1 + 0.2)
    0.3
    """
    return round(seconds, 9)
