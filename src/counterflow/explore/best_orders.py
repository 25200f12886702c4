"""The best order for what a schedule computes, by ``synthesize``; in the words of the page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from counterflow.drawing.time_units import time_unit
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import Costs
from counterflow.synthesis import synthesize

from .requests import OrderRequest, limits_of


def order(
    request: OrderRequest,
    text: str,
    report_progress: Callable[[dict[str, Any]], None],
    planned: Costs | None = None,
) -> dict[str, Any]:
    """Search for an order.

    Args:
        request: request.
        text: the schedule's file.
        report_progress: callback for progress.
        planned: a plan's costs for the schedule, used unless the request contains costs.

    Raises:
        ConfigError: no such order exists, or this kind of workload cannot be ordered.
    """
    schedule = loads(text, "the schedule")
    asked_costs = request.subject.costs
    costs = planned or Costs() if asked_costs is None else asked_costs.of_stages(schedule.placement)
    unit = time_unit(schedule.stages * 1.0, in_forwards=costs.in_forwards)

    began = time.monotonic()

    def report(best: float, bound: float, doing: str) -> None:
        if math.isfinite(best):
            values = {"best": unit.text(best), "bound": unit.text(bound)}
            share = (time.monotonic() - began) / (request.seconds or 1.0)
            report_progress(
                values | {"said": f"best {values['best']}, bound {values['bound']}: {doing}", "share": share}
            )

    result = synthesize(
        workload_of(schedule, request.split),
        costs,
        **limits_of(request.peak, request.memory, schedule),
        objective=request.objective,
        seconds=request.seconds,
        start=schedule if request.split is None else None,
        report=report,
    )
    return {
        "schedule": dumps(result.schedule),
        "facts": _facts(result, costs),
        "reason": result.bound.reason,
        "stopped": result.stopped,
    }


def workload_of(schedule: Schedule, split: bool | None) -> Workload:
    """Workload of a schedule; ``split`` splits all backwards, or none, unless it is None."""
    work = schedule.workload
    if split is None:
        return work
    pipes = [0] * work.total_micro_batches
    for passage in work.passes:
        for batch in passage.micro_batches:
            pipes[batch] = passage.pipe
    return plain(work.placement, work.micro_batches, pipe_of=pipes, split=split)


def _facts(result: Any, costs: Costs) -> list[list[str]]:
    unit = time_unit(result.makespan, in_forwards=costs.in_forwards)
    rows = [
        [str(result.objective), unit.text(result.value)],
        ["lower bound", unit.text(result.lower_bound)],
        ["gap", "none: no order is better" if result.proved else f"{100 * result.gap:.2f} % at most"],
        ["found by", result.method],
    ]
    if result.named is not None:
        name, value = result.named
        rows.append(["best scheme", f"{unit.text(value)}, {name}"])
    return rows
