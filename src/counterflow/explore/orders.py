"""The best order for what a schedule computes, by ``synthesize``; in the words of the page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from counterflow.drawing.units import time_unit
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import Costs
from counterflow.synthesis import synthesize

from .asked import Order, limits_of


def order(
    asked: Order, text: str, tell: Callable[[dict[str, Any]], None], planned: Costs | None = None
) -> dict[str, Any]:
    """Search for an order.

    Args:
        asked: request.
        text: the schedule's file.
        tell: callback for progress.
        planned: a plan's costs for the schedule, used unless the request contains costs.

    Raises:
        ConfigError: no such order exists, or this kind of workload cannot be ordered.
    """
    schedule = loads(text, "the schedule")
    asked_costs = asked.subject.costs
    costs = planned or Costs() if asked_costs is None else asked_costs.of_stages(schedule.placement)
    unit = time_unit(schedule.stages * 1.0, in_forwards=costs.in_forwards)

    began = time.monotonic()

    def report(best: float, bound: float, doing: str) -> None:
        if math.isfinite(best):
            told = {"best": unit.text(best), "bound": unit.text(bound)}
            share = (time.monotonic() - began) / (asked.seconds or 1.0)
            tell(told | {"said": f"best {told['best']}, bound {told['bound']}: {doing}", "share": share})

    found = synthesize(
        workload_of(schedule, asked.split),
        costs,
        **limits_of(asked.peak, asked.memory, schedule),
        objective=asked.objective,
        seconds=asked.seconds,
        start=schedule if asked.split is None else None,
        report=report,
    )
    return {
        "schedule": dumps(found.schedule),
        "facts": _facts(found, costs),
        "reason": found.bound.reason,
        "stopped": found.stopped,
    }


def workload_of(schedule: Schedule, split: bool | None) -> Workload:
    """What the schedule computes; with all backwards split or whole, if that is asked for."""
    work = schedule.workload
    if split is None:
        return work
    pipes = [0] * work.total_micro_batches
    for one in work.passes:
        for batch in one.micro_batches:
            pipes[batch] = one.pipe
    return plain(work.placement, work.micro_batches, pipe_of=pipes, split=split)


def _facts(found: Any, costs: Costs) -> list[list[str]]:
    unit = time_unit(found.makespan, in_forwards=costs.in_forwards)
    rows = [
        [str(found.objective), unit.text(found.value)],
        ["lower bound", unit.text(found.lower_bound)],
        ["gap", "none: no order is better" if found.proved else f"{100 * found.gap:.2f} % at most"],
        ["found by", found.method],
    ]
    if found.named is not None:
        name, value = found.named
        rows.append(["best scheme", f"{unit.text(value)}, {name}"])
    return rows
