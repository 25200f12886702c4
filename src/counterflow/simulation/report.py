"""A simulation as ``counterflow simulate --json`` prints it. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from counterflow.common.json_models import Count, Part, reads, said
from counterflow.schedule.report import OpShown, Sized

from .result import Bubbles, Simulation, SyncSpan

TimeUnit = Annotated[
    Literal["s", "F"],
    said("s: seconds; F: times of a forward, if no seconds were given", "simulation.costs.time_unit"),
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

    sender: Annotated[int, said("a worker")]
    receiver: Annotated[int, said("a worker")]
    start: float
    end: float
    maker: Annotated[OpShown, said("the op whose product it carries")]
    taker: Annotated[OpShown, said("the op that needs it")]


class FormulaShown(Part):
    """A formula of a paper beside the simulated value."""

    source: Annotated[str, said("paper, with the equation, table or section")]
    quantity: Annotated[str, said("what the value is, such as makespan or bubble ratio")]
    formula: Annotated[str, said("formula as published")]
    value: Annotated[float, said("value of the formula; times in `time_unit`")]
    simulated: Annotated[
        float | None, said("the same by the simulator; null: too few periods to determine it")
    ]
    difference: Annotated[
        float | None,
        said("value over simulated, minus 1; null: simulated is 0 or null, and the value is not"),
    ]
    unmet: Annotated[list[str], said("what the formula assumes and this schedule or its costs do not meet")]


class Simulated(Sized):
    """`counterflow simulate`."""

    model_config = reads("simulation", "simulation.schedule")

    costs: Annotated[
        dict[str, Any], said("forward, backward, p2p, and other costs that were given, by the flags' names")
    ]
    time_unit: TimeUnit
    makespan: Annotated[float, said("time until the last op, sync and agreement have ended")]
    steady_step: Annotated[
        float | None,
        said(
            "time that a step adds if steps follow each other without a barrier; null: too few periods to "
            "determine it"
        ),
    ]
    steady_step_clipped: Annotated[
        float | None, said("steady step if updates wait for the gradient norm of all stages")
    ]
    bubble_ratio: Annotated[float, said("idle time over makespan, mean of the workers")]
    busy: Annotated[list[float], said("by worker: compute time")]
    idle: Annotated[list[float], said("by worker: time without an op to run")]
    bubbles: Annotated[list[Bubbles], said("by worker: its idle time by cause, in `time_unit`")]
    spans: Annotated[list[float], said("by worker: first start to last end")]
    peak_activations: Annotated[list[Count], said("by worker: maximum forwards stashed at once")]
    weight_copies: Annotated[list[int], said("by worker: maximum stages held, versions counted")]
    steady_bubble_ratio: Annotated[
        float | None,
        said(
            "for asynchronous schemes: bubble ratio after the warm-up and before the drain; null: no such "
            "part"
        ),
    ]
    peak_bytes: Annotated[
        list[Count], said("by worker: maximum bytes; if bytes were given", "peak_bytes")
    ] = _NONE
    ops: Annotated[list[OpPlayed], said("with `--timeline`", "ops")] = _NONE
    gradient_syncs: Annotated[list[SyncSpan], said("with `--timeline`, in `time_unit`")] = _NONE
    messages: Annotated[list[MessagePlayed], said("with `--messages`", "messages")] = _NONE
    formulas: Annotated[list[FormulaShown], said("with `--formulas`; empty: none applies", "formulas")] = (
        _NONE
    )


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
