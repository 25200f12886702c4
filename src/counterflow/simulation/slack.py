"""Slack of ops: seconds by which one could end later without delaying the last op. Reads a play backwards.

Invariant: waits are those of the play, so an op without slack is on a longest path of ops and messages.
Gradient syncs and the agreement after the ops of synchronous schemes are ignored.
"""

from __future__ import annotations

import numpy as np

from counterflow.program.lists import topological
from counterflow.program.player import Floats

from .costs import Costs
from .timed_schedule import Played, TimedSchedule
from .waits import waits_of

_ROUNDING = 1e-9
"""Share of the length of a play below which slack is rounding of sums of floats."""


def slack_of(model: TimedSchedule, costs: Costs, played: Played) -> Floats | None:
    """Slack of each op in seconds, worker by worker in order.

    None if ops wait for gradient syncs, as in asynchronous schemes, are on other lanes than compute, or run
    in pairs.
    """
    if model.lane_lists is not None or model.schedule.pairs:
        return None
    if not model.schedule.synchronous and model.synced(costs):
        return None
    ready = model.ready(costs, played.end - played.start)
    waits = waits_of(ready.lists, ready.lasting)
    ops, last = len(played.end), float(played.end.max(initial=0.0))
    rank = np.empty(len(waits.lasts), dtype=np.int64)  # nodes, each after all it waits for
    rank[topological(model.graph)] = 2 * np.arange(ops)
    rank[ops:] = rank[model.messages.makers][: len(rank) - ops] + 1
    latest, seconds = [last] * len(rank), waits.lasts.tolist()
    backwards = np.lexsort((waits.taker, rank[waits.taker]))[::-1]
    rows = (row[backwards].tolist() for row in (waits.source, waits.taker, waits.delay))
    for source, taker, delay in zip(*rows, strict=True):
        latest[source] = min(latest[source], latest[taker] - seconds[taker] - delay)
    slack = np.array(latest[:ops]) - played.end
    slack[slack < _ROUNDING * last] = 0.0
    result: Floats = slack
    return result
