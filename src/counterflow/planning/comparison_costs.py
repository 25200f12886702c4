"""Costs of a comparison: numbers for a model or a worker's share of it, or the profile of a model.

Invariant: both price every schedule for the same model and mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from counterflow.errors import ConfigError
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import Costs, simulate
from counterflow.simulation.model_share import CostsOf, of_stages
from counterflow.synthesis import Synthesis

from .compared import Compared
from .orders import SYNTHESIZED, play_one_by_one
from .play import Play
from .predict import Predictor
from .prediction import Configuration


class OrderProblem(NamedTuple):
    """Ops to order, with their costs and the memory of each worker; None: without limit."""

    workload: Workload
    costs: Costs
    memory_bytes: float | tuple[float, ...] | None


class ComparisonCosts(Protocol):
    """Costs of every schedule of a comparison."""

    @property
    def costs(self) -> Costs:
        """The costs, or with a profile, those by default."""

    @property
    def costs_of(self) -> CostsOf:
        """Unit of the costs."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a mini-batch."""

    @property
    def about(self) -> str:
        """Description of the model in a few words; empty if only costs are known."""

    def compare(self, options: Mapping[str, OptionValue], schedule: Schedule) -> Compared:
        """A row for the schedule of a scheme."""

    def problem(self, placement: Placement, memory_bytes: float | None) -> OrderProblem:
        """The split ops of a placement."""

    def compare_order(self, problem: OrderProblem, synthesis: Synthesis) -> Compared:
        """A row for an order computed for ``problem``."""

    def usable_bytes(self) -> float | None:
        """Memory of a worker; None if it is not known."""


@dataclass(frozen=True, slots=True)
class NumericCosts:
    """Numbers for the whole model or a worker's share of it, as ``CostsOf`` says."""

    costs: Costs
    costs_of: CostsOf
    micro_batches: int

    @property
    def about(self) -> str:
        """Empty."""
        return ""

    def compare(self, options: Mapping[str, OptionValue], schedule: Schedule) -> Compared:  # noqa: ARG002
        """A row for the schedule of a scheme."""
        costs = of_stages(self.costs, schedule.placement, self.costs_of)
        return Compared(simulate(schedule, costs), self.micro_batches)

    def problem(self, placement: Placement, memory_bytes: float | None) -> OrderProblem:
        """The split ops of a placement."""
        workload = plain(placement, self.micro_batches, split=True)
        return OrderProblem(workload, of_stages(self.costs, placement, self.costs_of), memory_bytes)

    def compare_order(self, problem: OrderProblem, synthesis: Synthesis) -> Compared:  # noqa: ARG002
        """A row for a computed order."""
        return Compared(synthesis.simulation, self.micro_batches, synthesis)

    def usable_bytes(self) -> float | None:
        """Nothing is known of the devices."""
        return None


class ProfiledCosts:
    """Costs of a profiled model on a cluster, cut into balanced stages for each placement.

    Args:
        predictor: predictor of the model on the cluster.
        samples: B, samples of a micro-batch.
        micro_batches: N, micro-batches of a mini-batch.
    """

    costs_of = CostsOf.MODEL

    def __init__(self, predictor: Predictor, samples: int, micro_batches: int) -> None:
        if samples < 1:
            raise ConfigError(f"samples={samples}: must be 1 or more")
        self.predictor, self.samples, self.micro_batches = predictor, samples, micro_batches
        self.costs = Costs()
        self._jobs: dict[int, Play] = {}

    @property
    def about(self) -> str:
        """Name of the model and the cluster, and samples of a micro-batch."""
        model, cluster = self.predictor.model.name, self.predictor.cluster.name
        return f"model {model} on {cluster} · micro-batches of {self.samples}"

    def compare(self, options: Mapping[str, OptionValue], schedule: Schedule) -> Compared:
        """A row for the schedule of a scheme."""
        configuration = Configuration.of(schedule.scheme, dict(options), replicas=1, samples=self.samples)
        return self._row(self.predictor.play_order(configuration, schedule, self._mini_batch), None)

    def problem(self, placement: Placement, memory_bytes: float | None) -> OrderProblem:
        """The split ops of a placement."""
        workload = plain(placement, self.micro_batches, split=True)
        play = play_one_by_one(
            self.predictor, workload, replicas=1, samples=self.samples, recompute=Recompute.NONE
        )
        rooms = zip(play.usable_bytes, play.order_independent_bytes, strict=True)
        memory = tuple(
            (usable if memory_bytes is None else min(usable, memory_bytes)) - room for usable, room in rooms
        )
        problem = OrderProblem(play.schedule.workload, play.costs, memory)
        self._jobs[id(problem.workload)] = play
        return problem

    def compare_order(self, problem: OrderProblem, synthesis: Synthesis) -> Compared:
        """A row for a computed order."""
        play = self._jobs[id(problem.workload)]
        size = ("workers", synthesis.schedule.workers), ("micro_batches", self.micro_batches)
        schedule = replace(synthesis.schedule, options=size)
        configuration = replace(play.configuration, scheme=SYNTHESIZED)
        return self._row(self.predictor.play_order(configuration, schedule, self._mini_batch), synthesis)

    def usable_bytes(self) -> float | None:
        """Memory of a device of the cluster."""
        return self.predictor.cluster.usable_bytes

    @property
    def _mini_batch(self) -> int:
        return self.micro_batches * self.samples

    def _row(self, play: Play, synthesis: Synthesis | None) -> Compared:
        return Compared(play.simulation, self.micro_batches, synthesis, play)
