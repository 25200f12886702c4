"""A simulated schedule as the papers' formulas see it: depth, micro-batches, seconds of its stages."""

from __future__ import annotations

from typing import NamedTuple

from counterflow.schedule.ir import OpKind, OptionValue, Schedule
from counterflow.schedule.modes import Sync
from counterflow.simulation import Simulation
from counterflow.simulation.op_costs import Piece, per_stage

from .step_times import StageTimes, seconds_of_slowest


class Subject(NamedTuple):
    """A simulated schedule.

    Attributes:
        result: its simulation.
        schedule: the schedule.
        options: options of its scheme.
        times: seconds of the slowest worker, averaged over its stages.
        forwards: seconds of each stage's forward.
        backwards: seconds of each stage's backward.
    """

    result: Simulation
    schedule: Schedule
    options: dict[str, OptionValue]
    times: StageTimes
    forwards: list[float]
    backwards: list[float]

    @classmethod
    def of(cls, result: Simulation) -> Subject:
        """Subject of a simulation."""
        schedule, costs = result.schedule, result.costs
        ops, workers = costs.of_ops(schedule.stages), schedule.placement.pipes_stages[0]

        def seconds(kind: OpKind) -> list[float]:
            return [ops.seconds(Piece(kind, stage, workers[stage])) for stage in range(schedule.stages)]

        forwards, backwards = seconds(OpKind.FORWARD), seconds(OpKind.BACKWARD)
        summed = costs.replicas > 1 or schedule.pipes > 1
        sums = tuple(per_stage("sync", costs.sync, schedule.stages)) if summed else 0.0
        times = StageTimes(
            seconds_of_slowest(schedule, forwards),
            seconds_of_slowest(schedule, backwards),
            _longest_message(result),
            sums,
            Sync(costs.sync_mode),
        )
        return cls(result, schedule, dict(schedule.options), times, forwards, backwards)

    @property
    def depth(self) -> int:
        """Workers."""
        return self.schedule.workers

    @property
    def n(self) -> int:
        """Micro-batches of an update."""
        return self.schedule.micro_batches

    @property
    def chunks(self) -> int:
        """Stages of a worker in one pipe."""
        return self.schedule.stages // self.schedule.workers

    def number(self, name: str) -> int:
        """An option whose value is a number; 0 if it is another."""
        value = self.options.get(name, 0)
        return value if isinstance(value, int) else 0


def _longest_message(result: Simulation) -> float:
    return max((message.end - message.start for message in result.messages), default=0.0)
