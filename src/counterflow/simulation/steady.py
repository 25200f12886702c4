"""The time that a step of a synchronous scheme adds if steps follow each other without a barrier.

A synchronous schedule is played repeatedly: in each step a worker begins where it ended the one before, after
its own stages are summed over their copies and updated, and a link is free after its last message. The
offsets between workers at the border of two steps repeat after some steps; from then on the time between
borders is the steady step.

Invariant: a play whose workers all begin at once is the schedule's simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from counterflow.errors import ConfigError
from counterflow.program.player import Floats
from counterflow.program.sync import PlannedSync, needs_sync, plan_syncs
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync

from .op_costs import per_stage
from .sync_times import sync_times

if TYPE_CHECKING:
    from .costs import Costs
    from .timed_schedule import Played, TimedSchedule

MOST_STEPS = 64
"""Maximum steps that are played until offsets between workers repeat; otherwise the second half of them is
measured.
"""

_LOOKED_BACK = 12
"""Number of steps within which a repetition is looked for."""

_CLOSE = 1e-9
"""Share of a step below which differing borders count as equal."""


def steady_step_seconds(model: TimedSchedule, costs: Costs, played: Played, *, norm: bool = False) -> float:
    """Seconds that a step of a synchronous schedule adds without a barrier.

    Args:
        model: the schedule.
        costs: its costs.
        played: one step alone.
        norm: whether every update waits for the gradients of all workers, and for their agreement.
    """
    schedule = model.schedule
    border = _FollowingSteps(model, costs, played)
    seconds = 0.0
    before: list[tuple[float, Floats]] = []
    at = np.zeros(schedule.workers + border.ready.lanes)
    for _ in range(MOST_STEPS):
        at = border.after(at, norm=norm)
        passed = float(at[: schedule.workers].min(initial=np.inf))
        seconds += passed
        at = np.maximum(at - passed, 0.0)
        for steps, (then, was) in enumerate(reversed(before[-_LOOKED_BACK:]), 1):
            if np.abs(at - was).max(initial=0.0) <= _CLOSE * max(passed, 1e-300):
                return (seconds - then) / steps
        before.append((seconds, at))
    middle = len(before) // 2
    return (seconds - before[middle][0]) / (len(before) - 1 - middle)


class _FollowingSteps:
    def __init__(self, model: TimedSchedule, costs: Costs, played: Played) -> None:
        self.model, self.costs = model, costs
        self.ready = model.ready(costs, played.end - played.start)
        self.synced = per_stage("sync", costs.sync, model.schedule.stages)
        self.planned: Sequence[PlannedSync] = ()
        if needs_sync(model.schedule, costs.replicas):
            times = model.placing_times(costs, model.seconds(costs), played.start, played.released)
            self.planned = plan_syncs(model.schedule, Sync(costs.sync_mode), *times)

    def after(self, at: Floats, *, norm: bool) -> Floats:
        """Times at which each worker has updated, and each link is free, if they begin at ``at``."""
        workers = self.model.schedule.workers
        times = self.model.played(self.ready, (at[:workers], at[workers:]))
        assert times is not None  # because no limit was given
        released, ended = times.end + self.ready.lasting.busy, times.clocks
        lane = at[:workers].copy()
        crossings = self.costs.sync_crossings
        sums = sync_times(self.planned, released, self.model.first, self.synced, lane, crossings=crossings)
        for _, _, until, members in sums:
            ended[members] = np.maximum(ended[members], until)
        ended = with_ties(self.model.schedule, self.costs, ended)
        if norm:
            ended[:] = ended.max(initial=0.0) + self.costs.agreement
        ended = with_statistics(self.model.schedule, self.costs, ended)
        return np.concatenate((ended, times.free))


def with_ties(schedule: Schedule, costs: Costs, ended: Floats) -> Floats:
    """Times at which each worker has the sums of weights that stages share.

    Args:
        schedule: schedule that was played.
        costs: costs of the schedule.
        ended: time at which each worker has done everything else.

    Raises:
        ConfigError: the ties name a stage that does not exist.
    """
    for stages, seconds in costs.ties:
        for stage in stages:
            if not 0 <= stage < schedule.stages:
                raise ConfigError(
                    f"ties: stage {stage} does not exist in a pipeline of {schedule.stages} stages"
                )
        ended = _summed(schedule, costs, ended, stages, seconds)
    return ended


def with_statistics(schedule: Schedule, costs: Costs, ended: Floats) -> Floats:
    """Times at which each worker has the averages of its stages' running statistics."""
    if costs.statistics == 0.0:
        return ended
    for stage, seconds in enumerate(per_stage("statistics", costs.statistics, schedule.stages)):
        ended = _summed(schedule, costs, ended, (stage,), seconds)
    return ended


def _summed(schedule: Schedule, costs: Costs, ended: Floats, stages: Sequence[int], seconds: float) -> Floats:
    """Times after a sum over all workers that hold one of some stages, if there are several."""
    members = sorted({w for stage in stages for _, w in schedule.placement.copies(stage)})
    if len(members) * costs.replicas > 1:
        ended = ended.copy()
        ended[members] = ended[members].max() + seconds
    return ended
