"""What a schedule cannot beat in any sync mode: its ops played once without syncs, then the syncs at least.

Between a bound, which knows nothing of the order, and a play in every sync mode: most candidates whose bound
is low are told apart here for the price of one play.

Invariant: no sync mode's step is shorter. A sync slows ops that run beside it and delays none otherwise, so
ops end no earlier than without. A worker sums the gradients of a stage after the other, none before all of
its copies are made.
"""

from __future__ import annotations

from dataclasses import replace

from counterflow.simulate import simulate

from .bounds import all_summed, owned_stages
from .predict import Play


def least_seconds(play: Play) -> float:
    """One step takes at least so long in every sync mode; 0 where steps may overlap."""
    schedule = play.schedule
    if not schedule.synchronous or not play.predictor.model.barrier:
        return 0.0
    alone = simulate(schedule, replace(play.costs, sync=0.0, sync_crossings=None))
    seconds = alone.makespan
    if play.network.copies > 1:
        owned = owned_stages(schedule.placement)
        seconds = max(seconds, all_summed(owned, play.stages, play.network, alone.gradients_made))
    return play.step_seconds(seconds)
