"""Timelines of schedules from costs: time, memory and bubbles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from counterflow.program import lowering
from counterflow.program.actions import Matching, Program
from counterflow.program.pairs import with_pairs
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.recompute_ops import as_recomputed, recomputed_ahead
from counterflow.schedule.scheme_keywords import Sizes

from .costs import ByteCosts, Costs, Link
from .memory import MemoryUse, peaks_of
from .op_costs import OpCosts, Piece
from .program_times import play_program
from .result import Bubbles, Cause, Gap, MessageSpan, Simulation, Span, SyncSpan
from .slice_lengths import balanced_slices
from .timed_cache import timed

__all__ = [
    "Bubbles",
    "ByteCosts",
    "Cause",
    "Costs",
    "Gap",
    "Link",
    "MemoryUse",
    "MessageSpan",
    "OpCosts",
    "Piece",
    "Simulation",
    "Span",
    "SyncSpan",
    "balanced_slices",
    "lower",
    "peak_bytes",
    "simulate",
    "simulate_within",
]


def simulate(
    schedule: Schedule | Program | str, costs: Costs | None = None, **sizes: Unpack[Sizes]
) -> Simulation:
    """Simulate a schedule: every worker runs its order, each op as soon as its inputs exist.

    With ``recompute="stage"`` a schedule has a recomputation before each backward, which runs while its
    worker waits for the gradient; a schedule that has some is simulated so in any case.

    A program is played action by action, as its workers would run it, with the sums, gathers and waits in its
    lists. A schedule and its lowered program (``lower``) have the same times.

    Args:
        schedule: a schedule, a program, or the name of a scheme.
        costs: seconds (and bytes); default: a forward costs 1, a backward 2, messages nothing.
        sizes: options of the named scheme.

    Raises:
        ScheduleError: an op's input is computed nowhere.
        DeadlockError: the workers wait for each other in a circle.
        ConfigError: the costs do not fit the schedule (another number of stages or workers), or the scheme
            has no such schedule.

    >>> result = simulate("chimera", workers=4, micro_batches=4)
    >>> result.makespan, result.idle, result.peak_activations
    (16.0, (4.0, 4.0, 4.0, 4.0), (3.0, 4.0, 4.0, 3.0))
    """
    costs = Costs() if costs is None else costs
    if isinstance(schedule, Program):
        model = timed(schedule.schedule)
        costs = _as_recomputed(schedule.schedule, costs)
        played, makespan = play_program(model, schedule, costs)
        return Simulation(model, costs, played, makespan=makespan)
    simulation = simulate_within(registry.schedule_of(schedule, sizes), costs, math.inf)
    assert simulation is not None
    return simulation


def simulate_within(
    schedule: Schedule, costs: Costs, limit: float, tail: Sequence[float] = ()
) -> Simulation | None:
    """``simulate`` for a search that plays many synchronous schedules and keeps few: late ones are abandoned.

    Args:
        schedule: the schedule to play.
        costs: seconds (and bytes).
        limit: time by which each worker's ops and its tail have to end, in seconds.
        tail: by worker, the seconds that follow its last op; empty: none.

    Returns:
        None: a worker exceeds the limit, even if it never waited again.
    """
    schedule, costs = _recomputed(schedule, costs)
    model = timed(schedule)
    played = model.play(costs, limit, tail)
    return None if played is None else Simulation(model, costs, played)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Maximum memory of each worker in bytes: ``Simulation.peak_bytes`` without a play.

    Args:
        schedule: the schedule; its order decides.
        costs: costs with ``memory``; all others are ignored.
    """
    schedule, costs = _recomputed(schedule, costs)
    model = timed(schedule)
    return peaks_of(model.first, model.changes(costs))


def _recomputed(schedule: Schedule, costs: Costs) -> tuple[Schedule, Costs]:
    paired = bool(schedule.pairs)
    schedule = recomputed_ahead(schedule, Recompute(costs.recompute), ahead=costs.recompute_ahead)
    if paired:
        schedule = with_pairs(schedule)
    return schedule, _as_recomputed(schedule, costs)


def _as_recomputed(schedule: Schedule, costs: Costs) -> Costs:
    if not schedule.workload.recomputes or costs.recompute is Recompute.STAGE:
        return costs
    if costs.recompute is Recompute.LAYER:
        as_recomputed(schedule, Recompute.LAYER)
    return replace(costs, recompute=Recompute.STAGE)


def lower(
    schedule: Schedule | str,
    costs: Costs | None = None,
    *,
    matching: Matching = Matching.ORDER,
    shared: lowering.Shared = lowering.NOTHING_SHARED,
    **sizes: Unpack[Sizes],
) -> Program:
    """The action lists of a schedule, with gradient syncs where these costs place them.

    This is the program that ``simulate`` times with the same costs: ``eager-opt`` starts a sync early if the
    worker is idle then with these costs.

    Args:
        schedule: a schedule that the checker accepts, or the name of a scheme.
        costs: seconds, replicas and sync mode; default: a forward costs 1, a backward 2, messages nothing.
        matching: how the transport matches messages.
        shared: values that are summed in addition to the gradients of a stage's copies.
        sizes: options of the named scheme.

    Raises:
        ScheduleError: an op's input is computed nowhere.
        DeadlockError: the workers wait for each other in a circle.
        ConfigError: the costs do not fit the schedule.
    """
    costs = Costs() if costs is None else costs
    schedule, costs = _recomputed(registry.schedule_of(schedule, sizes), costs)
    return lowering.lower(
        schedule,
        replicas=costs.replicas,
        sync=costs.sync_mode,
        times=simulate(schedule, costs).op_times,
        matching=matching,
        shared=shared,
    )
