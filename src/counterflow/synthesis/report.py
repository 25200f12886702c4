"""A computed order as ``counterflow synthesize --json`` prints it. What it does not do: print."""

from __future__ import annotations

from typing import Annotated

from counterflow.schedule.report import Sized
from counterflow.shown import Count, said
from counterflow.simulation.report import TimeUnit


class Synthesized(Sized):
    """`counterflow synthesize`."""

    time_unit: TimeUnit
    objective: Annotated[str, said("the objective: `makespan` or `steady`")]
    makespan: Annotated[float, said("until the last op, sync and agreement have ended")]
    steady: Annotated[float, said("what a step adds when steps follow each other without a barrier")]
    lower_bound: Annotated[float, said("of the objective: no order within the limits takes less")]
    reason: Annotated[str, said("why the bound holds, for people", "bound.reason")]
    gap: Annotated[float, said("share of the objective that could be saved at most")]
    proved: Annotated[bool, said("whether no order is better")]
    method: Annotated[str, said("what found the order")]
    named: Annotated[
        str | None,
        said("the best published scheme of this workload within the limits; null: none", "named.0", "named"),
    ]
    named_value: Annotated[float | None, said("its objective", "named.1", "named")]
    gain: Annotated[float | None, said("share of it that was saved")]
    peak: Annotated[list[Count], said("by worker: most forwards stashed at once")]
    idle: Annotated[list[float], said("by worker: time it has no op to run")]
    stopped: Annotated[bool, said("whether it was interrupted")]
