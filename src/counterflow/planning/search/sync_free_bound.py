"""A lower bound of a schedule in any sync mode: its ops simulated once without syncs, then minimum syncs.

It is between a bound, which does not use the order, and a play in every sync mode: it decides most candidates
with a low bound at the cost of one play, or a part of one.

Invariant: no sync mode's step is shorter. A sync slows overlapping ops and delays none otherwise, so ops end
no earlier than without it. A worker sums the gradients of one stage after the other, none before all of its
copies are computed.
"""

from __future__ import annotations

import math

from counterflow.schedule.ir import Product
from counterflow.simulation import simulate_within

from ..play import Play, sync_seconds
from .order_free_bounds import all_summed


class SyncFreeBounds:
    """The bounds of one schedule; candidates whose ops and sums take the same time share one."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[float, float]] = {}
        """For ops that take the same time, the least seconds of an update, and those to which they were
        played: the least seconds are infinite if they exceed these.
        """

    def seconds(self, play: Play, limit: float, times_key: object) -> float:
        """``sync_free_seconds`` of a play; plays with equal ``times_key`` share ops and sums."""
        if not play.schedule.synchronous or not play.inputs.model.barrier:
            return 0.0
        key, most = (times_key, play.stages.cuts), play.update_limit(limit)
        seconds, played_to = self._known.get(key, (math.inf, -math.inf))
        if math.isinf(seconds) and most > played_to:
            seconds = _least_update(play, most)
            self._known[key] = seconds, most
        return play.step_seconds(seconds) if seconds < math.inf else math.inf


def sync_free_seconds(play: Play, limit: float = math.inf) -> float:
    """Minimum seconds of a step in every sync mode; 0 if steps may overlap.

    It is infinite if it exceeds the limit, also in seconds of a step; then no worker is played to its end.
    """
    return SyncFreeBounds().seconds(play, limit, None)


def _least_update(play: Play, limit: float) -> float:
    schedule = play.schedule
    copies = play.network.copies > 1
    tail = _last_syncs(play) if copies else ()
    simulation = simulate_within(schedule, play.costs_without_sums, limit, tail)
    if simulation is None:
        return math.inf
    seconds, gradients_ready = simulation.makespan, simulation.gradients_made
    if copies:
        seconds = max(seconds, all_summed(schedule.placement, play.stages, play.network, gradients_ready))
    return seconds


def _last_syncs(play: Play) -> list[float]:
    syncs = sync_seconds(play.stages, play.network)
    lasts = [order[-1] if order else None for order in play.schedule.orders]
    return [
        syncs[op.stage] if op is not None and Product.WEIGHT_GRADIENTS in op.kind.makes else 0.0
        for op in lasts
    ]
