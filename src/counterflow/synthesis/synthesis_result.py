"""Result of a synthesis: a schedule, its value, and a bound on the best possible value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from counterflow.common.html import table, titled
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, Simulation, simulate

from .bounds.lower import Bound
from .problem import Objective

PROVED = 1e-9
"""Share of a value within which a bound proves it, because sums of floats round."""


@dataclass(frozen=True)
class Synthesis:
    """A computed order. Times in the unit of the costs.

    Attributes:
        schedule: the best schedule found.
        costs: costs for which it was computed.
        objective: the objective that was minimised.
        bound: lower bound of all schedules of this workload within the limits, and its reason.
        method: method that found the schedule.
        named: the best published scheme of the same workload within the limits, and its objective; None: none
            exists.
        stopped: whether the search was interrupted.
    """

    schedule: Schedule
    costs: Costs
    objective: Objective
    bound: Bound
    method: str
    named: tuple[str, float] | None = None
    stopped: bool = False

    def _repr_html_(self) -> str:
        facts = [
            (self.objective.value, f"{self.value:.6g}"),
            ("no order below", f"{self.lower_bound:.6g}"),
            ("gap", "none: proved" if self.proved else f"{self.gap:.2%}"),
            ("found by", self.method),
        ]
        if self.named is not None:
            facts.append((f"best published scheme, {self.named[0]}", f"{self.named[1]:.6g}"))
        return titled(str(self.schedule), table(("", ""), facts), self.simulation._repr_svg_() or "")

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated schedule."""
        return simulate(self.schedule, self.costs)

    @property
    def makespan(self) -> float:
        """Time from the start to the end of one step."""
        return self.simulation.makespan

    @property
    def steady(self) -> float:
        """Time that a step adds if steps follow each other without a barrier."""
        seconds = self.simulation.steady_step
        assert seconds is not None  # the workload is synchronous
        return seconds

    @property
    def value(self) -> float:
        """The objective: ``makespan`` or ``steady``."""
        return self.makespan if self.objective is Objective.MAKESPAN else self.steady

    @property
    def proved(self) -> bool:
        """Return whether no schedule is better."""
        return self.value <= self.bound.seconds * (1 + PROVED)

    @property
    def lower_bound(self) -> float:
        """Lower bound of all schedules of this workload within the limits."""
        return self.value if self.proved else self.bound.seconds

    @property
    def gap(self) -> float:
        """Maximum share of its value that a better schedule could save: 0.02 is 2 %."""
        return 0.0 if not self.value else 1 - self.lower_bound / self.value

    @property
    def gain(self) -> float | None:
        """Share of the best published scheme's value that it saves; None if no such scheme exists."""
        if self.named is None or not self.named[1]:
            return None
        return 1 - self.value / self.named[1]

    @property
    def peak(self) -> tuple[float, ...]:
        """Maximum activations that each worker stashes, in (stage x micro-batch) units."""
        return self.simulation.peak_activations

    @property
    def idle(self) -> tuple[float, ...]:
        """Time until the makespan in which each worker has no op to run."""
        return self.simulation.idle
