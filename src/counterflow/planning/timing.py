"""Simulated times of a configuration's schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, Simulation, simulate
from counterflow.simulation.memory import Changes
from counterflow.simulation.shared_cores import SharedCores, core_wait_seconds
from counterflow.simulation.timed_cache import timed

from .inputs.model import Model


@dataclass(frozen=True)
class Timing:
    """Simulated times of a schedule with costs, wherever optimiser state is held.

    Attributes:
        schedule: the order.
        costs: costs of the simulation.
        model: the model, which says whether steps have a barrier, and updates wait for a norm.
        cores: the workers' cores; None: none are shared.
    """

    schedule: Schedule
    costs: Costs
    model: Model
    cores: SharedCores | None = None

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated schedule."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def steady(self) -> float:
        """Seconds of an update if steps follow each other without a barrier."""
        seconds = self.simulation.steady_step
        if seconds is None:
            raise ConfigError(
                f"{self.schedule}: an asynchronous scheme is timed by the periods of its steady part, but "
                "these differ or are too few; its builder has to set Schedule.steady"
            )
        return seconds

    @cached_property
    def update(self) -> float:
        """Seconds of an update's ops, messages and sums, with or without a barrier as the config says."""
        if not self.schedule.synchronous:
            return self.steady
        if self.model.barrier:
            return self.simulation.makespan
        seconds = self.simulation.steady_step_clipped if self.model.clips else self.simulation.steady_step
        assert seconds is not None  # the scheme is synchronous
        return seconds

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds of ops of each worker in an update."""
        if self.schedule.synchronous:
            return self.simulation.busy
        return tuple(busy / self.schedule.periods for busy in self.simulation.busy)

    @cached_property
    def core_work(self) -> float:
        """Minimum seconds of an update in any order, as workers share cores; 0 if there is no order yet."""
        cores, schedule = self.cores, self.schedule
        if cores is None or not any(schedule.orders):
            return 0.0
        messages = timed(schedule).messages
        ends = np.bincount([*messages.senders, *messages.receivers], minlength=schedule.workers)
        seconds = cores.message_seconds / 2 / (1 if schedule.synchronous else schedule.periods)
        return cores.seconds([work + seconds * count for work, count in zip(self.work, ends, strict=True)])

    @cached_property
    def core_wait(self) -> float:
        """Additional seconds of an update as workers wait for cores; of asynchronous periods not known."""
        if self.cores is None or not self.schedule.synchronous:
            return 0.0
        return core_wait_seconds(timed(self.schedule), self.costs, self.cores)

    @cached_property
    def changes(self) -> Changes:
        """Changes of each worker's memory by ops and weight versions."""
        return timed(self.schedule).changes(self.costs)
