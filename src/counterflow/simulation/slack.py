"""How much later each op could end without the last op ending later. Reads a play backwards.

Invariant: what waits for what is what was played, so an op without slack lies on a longest path of ops and
messages. What follows the ops (gradient syncs in synchronous schemes, the agreement) is not looked at.
"""

from __future__ import annotations

import numpy as np

from counterflow.program.lists import topological
from counterflow.program.player import Floats

from .costs import Costs
from .timed_schedule import Played, TimedSchedule
from .waits import waits_of

_ROUNDING = 1e-9
"""Of the length of a play: less is no slack, since sums of floats round."""


def slack_of(model: TimedSchedule, costs: Costs, played: Played) -> Floats | None:
    """Seconds of each op, worker by worker in order.

    None where ops wait for gradient syncs, as they do in asynchronous schemes.
    """
    if not model.schedule.synchronous and model.synced(costs):
        return None
    ready = model.ready(costs, played.end - played.start)
    waits = waits_of(ready.lists, ready.lasting)
    ops, last = len(played.end), float(played.end.max(initial=0.0))
    rank = np.empty(len(waits.lasts), dtype=np.int64)  # of nodes, each behind all it waits for
    rank[topological(model.graph)] = 2 * np.arange(ops)
    rank[ops:] = rank[model.messages.makers][: len(rank) - ops] + 1
    latest, seconds = [last] * len(rank), waits.lasts.tolist()
    backwards = np.lexsort((waits.taker, rank[waits.taker]))[::-1]
    rows = (row[backwards].tolist() for row in (waits.source, waits.taker, waits.delay))
    for source, taker, delay in zip(*rows, strict=True):
        latest[source] = min(latest[source], latest[taker] - seconds[taker] - delay)
    slack = np.array(latest[:ops]) - played.end
    slack[slack < _ROUNDING * last] = 0.0
    found: Floats = slack
    return found
