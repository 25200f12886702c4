"""One schedule of a comparison: its step, and the memory of its workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule
from counterflow.schedule.placement import Placement
from counterflow.schedule.scheme import DEPTH, MICRO_BATCHES, PERIODS
from counterflow.simulation import Simulation
from counterflow.synthesis import Synthesis

if TYPE_CHECKING:
    from .play import Play

COMPUTED = "computed"
"""Scheme name of a row whose order was computed."""

_SIZES = frozenset({*DEPTH, MICRO_BATCHES.name, PERIODS.name})


@dataclass(frozen=True)
class Compared:
    """One schedule of a comparison. Times in the unit of the costs, for ``micro_batches`` micro-batches.

    Attributes:
        simulation: the schedule, simulated with the costs of its stages.
        micro_batches: N of the comparison.
        computed: bound and method of a computed order; None: a scheme's own order.
        play: the schedule with a profile's costs, whose step includes the update; None: costs are given.
    """

    simulation: Simulation
    micro_batches: int
    computed: Synthesis | None = None
    play: Play | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def name(self) -> str:
        """Name of the row: the scheme with the options that differ from their defaults."""
        if self.computed is not None:
            return computed_name(self.schedule.placement)
        return schedule_name(self.schedule)

    @property
    def scheme(self) -> str:
        """The scheme; ``computed`` if the order was computed."""
        return COMPUTED if self.computed is not None else self.schedule.scheme

    @property
    def synchronous(self) -> bool:
        """True if every update follows a flush, so the numbers equal those of one process."""
        return self.schedule.synchronous

    @cached_property
    def step(self) -> float:
        """Duration of N micro-batches: the makespan, or their time in the steady state.

        It is infinite if an asynchronous schedule has no steady state.
        """
        if self.play is not None:
            return self.play.seconds
        if self.synchronous:
            return self.simulation.makespan
        steady = self.simulation.steady_step
        micro_batches = self.schedule.micro_batches
        return math.inf if steady is None else steady * self.micro_batches / micro_batches

    @cached_property
    def step_range(self) -> tuple[float, float] | None:
        """Seconds of a step with the quantiles of a profile; None: it has none, or costs are given."""
        return None if self.play is None else self.play.range_seconds

    @cached_property
    def bubble_ratio(self) -> float:
        """Idle time over the step, averaged over workers; in the steady state if asynchronous."""
        if self.play is not None:
            return self.play.prediction().bubble_ratio
        steady = None if self.synchronous else self.simulation.steady_bubble_ratio
        return self.simulation.bubble_ratio if steady is None else steady

    @property
    def proved(self) -> bool | None:
        """True if no order of these stages and limits is better; None if none was computed."""
        return None if self.computed is None else self.computed.proved

    @property
    def lower_bound(self) -> float | None:
        """Lower bound of all orders of these stages within the limits; None if none was computed."""
        return None if self.computed is None else self.computed.lower_bound

    @property
    def remark(self) -> str:
        """A remark in a few words; usually empty."""
        if not self.synchronous:
            return "asynchronous: older weights"
        if self.computed is None:
            return ""
        if self.computed.proved:
            return "proved best for these stages and limits"
        return f"at most {self.computed.gap:.1%} from the best for these stages and limits"

    @property
    def mark(self) -> str:
        """The remark in one word: ``async``, ``proved``, or the gap of a computed order."""
        if not self.synchronous:
            return "async"
        if self.computed is None:
            return ""
        return "proved" if self.computed.proved else f"≤ {self.computed.gap:.1%}"

    @property
    def _share(self) -> float:
        return self.schedule.workers / self.schedule.stages

    @cached_property
    def weights(self) -> float:
        """Maximum weights of a worker, in shares of the model: 1 is 1/P of the model, held once."""
        return max(self.simulation.weight_copies) * self._share

    @cached_property
    def activations(self) -> float:
        """Maximum activations of a worker, in units of a worker's share for one micro-batch."""
        return max(self.simulation.peak_activations) * self._share

    @cached_property
    def peak_bytes(self) -> float | None:
        """Maximum bytes of a worker: weights, gradients, optimizer state, activations and messages together.

        None if no bytes were given.
        """
        if self.play is not None:
            return max(worker.total for worker in self.play.memory)
        peaks = self.simulation.peak_bytes
        return None if peaks is None else max(peaks)


def schedule_name(schedule: Schedule) -> str:
    """Name of a schedule: its scheme with the options that differ from their defaults, sizes omitted."""
    scheme = registry.scheme(schedule.scheme)
    shown = [
        option.describe(value)
        for name, value in schedule.options
        if name not in _SIZES and (option := scheme.option(name)) is not None and value != option.usual
    ]
    return ", ".join([scheme.title, *filter(None, shown)])


def computed_name(placement: Placement) -> str:
    """Name of a computed order, by its placement."""
    return f"computed {'in a V' if placement.stages > placement.workers else 'straight'}"
