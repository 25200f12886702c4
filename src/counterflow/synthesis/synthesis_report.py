"""A computed order as ``counterflow synthesize --json`` prints it. Nothing is printed here."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import Count, describe
from counterflow.schedule.schedule_report import Sized
from counterflow.simulation.report import TimeUnit


class Synthesized(Sized):
    """`counterflow synthesize`."""

    time_unit: TimeUnit
    objective: Annotated[str, describe("the objective: `makespan` or `steady`")]
    makespan: Annotated[float, describe("time until the last op, sync and agreement have ended")]
    steady: Annotated[float, describe("time that a step adds if steps follow each other without a barrier")]
    lower_bound: Annotated[float, describe("lower bound of the objective over all orders within the limits")]
    reason: Annotated[str, describe("why the bound holds, for people", "bound.reason")]
    gap: Annotated[float, describe("maximum share of the objective that could be saved")]
    proved: Annotated[bool, describe("whether no order is better")]
    method: Annotated[str, describe("method that found the order")]
    named: Annotated[
        str | None,
        describe(
            "the best published scheme of this workload within the limits; null: none", "named.0", "named"
        ),
    ]
    named_value: Annotated[float | None, describe("objective of that scheme", "named.1", "named")]
    gain: Annotated[float | None, describe("share of that objective that was saved")]
    peak: Annotated[list[Count], describe("by worker: maximum forwards stashed at once")]
    idle: Annotated[list[float], describe("by worker: time without an op to run")]
    stopped: Annotated[bool, describe("whether the search was interrupted")]
