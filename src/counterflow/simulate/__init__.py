"""When things run: costs in, timeline out. Time, memory and bubbles of a schedule."""

from __future__ import annotations

from counterflow.schedule.ir import Schedule

from .costs import ByteCosts, Costs
from .memory import MemoryUse
from .model import model_of
from .result import Simulation, Span, SyncSpan

__all__ = ["ByteCosts", "Costs", "MemoryUse", "Simulation", "Span", "SyncSpan", "simulate"]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Play a schedule: every worker runs its order, each op as soon as its inputs are there.

    Args:
        schedule: what to play.
        costs: seconds (and bytes); by default a forward costs 1, a backward 2, messages nothing.

    Raises:
        ScheduleError: an op's input is computed nowhere.
        DeadlockError: the workers wait for each other in a circle.
        ConfigError: costs that do not fit the schedule (another number of stages or workers).

    >>> from counterflow.schedule.schemes import chimera
    >>> result = simulate(chimera(stages=4, micro_batches=4))
    >>> result.makespan, result.idle, result.peak_activations
    (16.0, (4.0, 4.0, 4.0, 4.0), (3.0, 4.0, 4.0, 3.0))
    """
    costs = Costs() if costs is None else costs
    model = model_of(schedule)
    return Simulation(model, costs, *model.play(costs))
