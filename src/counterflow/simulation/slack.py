"""How much later each op could end without the last op ending later. Reads a play backwards.

Invariant: what waits for what is what was played, so an op without slack lies on a longest path of ops and
messages. What follows the ops (gradient syncs with a flush, the agreement) is not looked at.
"""

from __future__ import annotations

import numpy as np

from .costs import Costs
from .kernel import Floats
from .timed_schedule import Played, TimedSchedule

_ROUNDING = 1e-9
"""Of the length of a play: less is no slack, since sums of floats round."""


def slack_of(model: TimedSchedule, costs: Costs, played: Played) -> Floats | None:
    """Seconds of each op, worker by worker in order.

    None where ops wait for gradient syncs, as they do without a flush.
    """
    if not model.schedule.synchronous and model.synced(costs):
        return None
    ready = model.ready(costs, played.end - played.start)
    edges, seconds = ready.edges, ready.lasts[ready.edges.order].tolist()
    last = float(played.end.max(initial=0.0))
    latest = [last] * len(seconds)
    first, sources, delay = edges.first.tolist(), edges.sources.tolist(), ready.delay.tolist()
    for place in range(len(seconds) - 1, -1, -1):
        begins = latest[place] - seconds[place]
        for edge in range(first[place], first[place + 1]):
            latest[sources[edge]] = min(latest[sources[edge]], begins - delay[edge])
    by_node = np.empty(len(latest))
    by_node[edges.order] = latest
    slack = by_node[: len(played.end)] - played.end
    slack[slack < _ROUNDING * last] = 0.0
    found: Floats = slack
    return found
