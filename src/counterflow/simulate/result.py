"""What a simulation found: times, bubbles, activations, weight copies, memory.

Invariant: everything here follows from the schedule, its costs, and the start and end of each op.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.residency import peak_activations, weight_copies

from .costs import ByteCosts, Costs
from .kernel import Floats
from .memory import MemoryUse, memory_use
from .model import Model


@dataclass(frozen=True, slots=True)
class Span:
    """One op as it ran. Times in seconds."""

    worker: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """One gradient sync as it ran beside the compute of a worker. Times in seconds."""

    worker: int
    stage: int
    period: int
    start: float
    end: float


class Simulation:
    """A schedule played with costs. Made by ``simulate``."""

    def __init__(self, model: Model, costs: Costs, start: Floats, end: Floats, syncs: Floats) -> None:
        self.schedule: Schedule = model.schedule
        self.costs = costs
        self.start = start
        """Start of each op, worker by worker in order, in seconds."""
        self.end = end
        """End of each op, worker by worker in order, in seconds."""
        self._model = model
        self._syncs = syncs

    @cached_property
    def makespan(self) -> float:
        """From the start to the end of the last op or gradient sync, in seconds."""
        last = max(float(self.end.max()), 0.0) if len(self.end) else 0.0
        return max(last, float(self._syncs[:, 3].max()) if len(self._syncs) else 0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each worker computes."""
        seconds = np.bincount(
            self._model.worker, weights=self.end - self.start, minlength=self.schedule.workers
        )
        return tuple(seconds.tolist())

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds each worker has no op to run, until the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble_ratio(self) -> float:
        """Idle time over makespan, the mean of all workers."""
        if not self.makespan:
            return 0.0
        return sum(self.idle) / (self.makespan * self.schedule.workers)

    @cached_property
    def steady_bubble_ratio(self) -> float | None:
        """Idle over whole steady periods of an asynchronous schedule; None if it has none."""
        if self.schedule.steady is None:
            return None
        first = self._model.graph.first
        idle = total = 0.0
        for worker, (begin, stop) in enumerate(self.schedule.steady):
            nodes = slice(first[worker] + begin, first[worker] + stop)
            window = float(self.end[nodes][-1] - self.start[nodes][0])
            total += window
            idle += window - float((self.end[nodes] - self.start[nodes]).sum())
        return max(0.0, idle / total) if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Most forwards stashed at once on each worker, in (stage x micro-batch) units."""
        return peak_activations(self.schedule)

    @cached_property
    def weight_copies(self) -> tuple[int, ...]:
        """Stages each worker holds at most at once, versions counted."""
        return weight_copies(self.schedule)

    @cached_property
    def timeline(self) -> tuple[Span, ...]:
        """Every op with its times, worker by worker in order."""
        start, end = self.start.tolist(), self.end.tolist()
        graph = self._model.graph
        return tuple(
            Span(graph.worker[node], op, start[node], end[node]) for node, op in enumerate(graph.ops)
        )

    @cached_property
    def syncs(self) -> tuple[SyncSpan, ...]:
        """The gradient syncs that took time, once for every worker that takes part."""
        return tuple(
            SyncSpan(worker, int(stage), int(period), start, end)
            for period, stage, start, end in self._syncs.tolist()
            for worker in sorted({w for _, w in self.schedule.placement.copies(int(stage))})
        )

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...] | None:
        """Each worker's memory over time; None when no byte costs were given."""
        if self.costs.memory is None:
            return None
        return memory_use(self.schedule, self.costs, self.start.tolist(), self.end.tolist())

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Each worker's largest memory in bytes; None when no byte costs were given."""
        return None if self.costs.memory is None else self._model.peak_bytes(self.costs)

    @cached_property
    def activations_over_time(self) -> tuple[MemoryUse, ...]:
        """Stashed forwards of each worker over time, in (stage x micro-batch) units, not bytes."""
        units = Costs(memory=ByteCosts(activations=1.0))
        return memory_use(self.schedule, units, self.start.tolist(), self.end.tolist())
