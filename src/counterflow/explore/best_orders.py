"""The computed order of what a schedule computes, by ``synthesize``; in the words of the page."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from counterflow.drawing.chart import percent
from counterflow.drawing.time_units import time_unit
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import OpKind, Schedule
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import Costs
from counterflow.synthesis import Synthesis, synthesize

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

    workload = workload_of(schedule, request.split)
    result = synthesize(
        workload,
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
        "said": _sentence(result, costs),
        "command": None if planned is not None and asked_costs is None else command_of(request, workload),
        "reason": result.bound.reason,
        "stopped": result.stopped,
    }


def workload_of(schedule: Schedule, split: bool | None) -> Workload:
    """Workload of a schedule; ``split`` splits all backwards, or none, unless it is None."""
    work = schedule.workload
    if split is None:
        return work
    return plain(work.placement, work.micro_batches, pipe_of=_pipes_of(work), split=split)


def _pipes_of(work: Workload) -> list[int]:
    pipes = [0] * work.total_micro_batches
    for passage in work.passes:
        for batch in passage.micro_batches:
            pipes[batch] = passage.pipe
    return pipes


def command_of(request: OrderRequest, workload: Workload) -> str | None:
    """The command that computes the order in a terminal; None: none has this workload.

    >>> from counterflow.explore.requests import ScheduleReference
    >>> from counterflow.schedule.schemes import zb_v
    >>> request = OrderRequest(subject=ScheduleReference(scheme="zb-v"), peak="4", seconds=5)
    >>> command_of(request, zb_v(workers=2, micro_batches=4).workload)
    'counterflow synthesize --placement 0,1,1,0 --micro-batches 4 --peak 4 --seconds 5 --out order.json'
    """
    placement = workload.placement
    split = any(op.kind is OpKind.WEIGHT_GRADIENTS for op in workload.ops())
    count, pipes = workload.micro_batches, _pipes_of(workload)
    of_command = Counter(number % placement.pipes for number in range(count))  # micro-batches are alike
    if plain(placement, count, split=split, pipe_of=pipes) != workload or Counter(pipes) != of_command:
        return None
    table = "/".join(",".join(map(str, holders)) for holders in placement.pipes_stages)
    costs = {} if request.subject.costs is None else request.subject.costs.model_dump(exclude_none=True)
    flags = {
        "placement": table,
        "micro_batches": count,
        **costs,
        "peak": request.peak,
        "memory": request.memory,
        "objective": None if request.objective == "makespan" else request.objective,
        "seconds": f"{request.seconds:g}",
        "out": "order.json",
    }
    words = ["counterflow synthesize"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value not in (None, ""):
            words.append(f"--{flag} {shlex.quote(str(value))}")
        if name == "micro_batches" and not split:
            words.append("--no-split")
    return " ".join(words)


def _sentence(result: Synthesis, costs: Costs) -> str:
    unit = time_unit(result.makespan, in_forwards=costs.in_forwards)
    text = f"Computed order: {unit.text(result.value)}, "
    text += "and no order is better" if result.proved else f"at most {percent(result.gap)} from the best"
    if result.named is None:
        return f"{text}; no named scheme has these ops within the limits"
    name, value = result.named
    return f"{text}; the best named scheme, {name}: {unit.text(value)}"


def _facts(result: Synthesis, costs: Costs) -> list[list[str]]:
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
