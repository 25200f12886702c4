"""A simulation as ``counterflow simulate --json`` prints it. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from counterflow.common.json_models import Count, Part, describe, reads
from counterflow.schedule.schedule_report import OpShown, Sized

from .result import Bubbles, Simulation, SyncSpan

TimeUnit = Annotated[
    Literal["s", "F"],
    describe("s: seconds; F: times of a forward, if it takes 1", "simulation.costs.time_unit"),
]


_NONE: Any = Field(default_factory=list)


class OpPlayed(OpShown):
    """An op as it ran, in `time_unit`."""

    model_config = reads("op")

    worker: int
    start: float
    end: float


class MessagePlayed(Part):
    """A message on its link, in `time_unit`."""

    sender: Annotated[int, describe("a worker")]
    receiver: Annotated[int, describe("a worker")]
    start: float
    end: float
    maker: Annotated[OpShown, describe("the op whose product it carries")]
    taker: Annotated[OpShown, describe("the op that needs it")]


class FormulaShown(Part):
    """A formula of a paper beside the simulated value."""

    source: Annotated[str, describe("paper, with the equation, table or section")]
    quantity: Annotated[str, describe("what the value is, such as makespan or bubble ratio")]
    formula: Annotated[str, describe("formula as published")]
    value: Annotated[float, describe("value of the formula; times in `time_unit`")]
    simulated: Annotated[
        float | None, describe("the same by the simulator; null: too few periods to determine it")
    ]
    difference: Annotated[
        float | None,
        describe("value over simulated, minus 1; null: simulated is 0 or null, and the value is not"),
    ]
    unmet: Annotated[
        list[str], describe("what the formula assumes and this schedule or its costs do not meet")
    ]


class Simulated(Sized):
    """`counterflow simulate`."""

    model_config = reads("simulation", "simulation.schedule")

    costs: Annotated[
        dict[str, Any],
        describe("forward, backward, p2p, and other costs that were given, by the flags' names"),
    ]
    time_unit: TimeUnit
    makespan: Annotated[float, describe("time until the last op, sync and agreement have ended")]
    steady_step: Annotated[
        float | None,
        describe(
            "time that a step adds if steps follow each other without a barrier; null: too few periods to "
            "determine it"
        ),
    ]
    steady_step_clipped: Annotated[
        float | None, describe("steady step if updates wait for the gradient norm of all stages")
    ]
    bubble_ratio: Annotated[float, describe("idle time over makespan, mean of the workers")]
    busy: Annotated[list[float], describe("by worker: compute time")]
    idle: Annotated[list[float], describe("by worker: time without an op to run")]
    bubbles: Annotated[list[Bubbles], describe("by worker: its idle time by cause, in `time_unit`")]
    spans: Annotated[list[float], describe("by worker: first start to last end")]
    peak_activations: Annotated[list[Count], describe("by worker: maximum forwards stashed at once")]
    weight_copies: Annotated[list[int], describe("by worker: maximum stages held, versions counted")]
    steady_bubble_ratio: Annotated[
        float | None,
        describe(
            "for asynchronous schemes: bubble ratio after the warm-up and before the drain; null: no such "
            "part"
        ),
    ]
    peak_bytes: Annotated[
        list[Count], describe("by worker: maximum bytes; if bytes were given", "peak_bytes")
    ] = _NONE
    ops: Annotated[list[OpPlayed], describe("with `--timeline`", "ops")] = _NONE
    gradient_syncs: Annotated[list[SyncSpan], describe("with `--timeline`, in `time_unit`")] = _NONE
    messages: Annotated[list[MessagePlayed], describe("with `--messages`", "messages")] = _NONE
    formulas: Annotated[
        list[FormulaShown], describe("with `--formulas`; empty: none applies", "formulas")
    ] = _NONE


def simulated(
    result: Simulation,
    costs: dict[str, Any],
    *,
    timeline: bool,
    messages: bool,
    formulas: Sequence[object] | None = None,
) -> Simulated:
    """The result of a simulation; ``costs`` are those to be shown, ``formulas`` what papers say of it."""
    more: dict[str, Any] = {}
    if result.memory is not None:
        more["peak_bytes"] = [use.peak for use in result.memory]
    if timeline:
        more["ops"] = result.timeline
        if result.syncs:
            more["gradient_syncs"] = result.syncs
    if messages:
        more["messages"] = result.messages
    if formulas is not None:
        more["formulas"] = list(formulas)
    return Simulated.of(simulation=result, costs=costs, **more)
