"""Runs synchronous schedules: each step is a whole order, and at its end nothing is under way.

Invariant: no weight changes before loss and gradient norm of the whole mini-batch are known everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from counterflow.schedule.actions import Program

from .batch import Batch
from .gradients import clip_factor
from .interpreter import Interpreter
from .step import Told, Workers
from .tasks import Tasks
from .weights import Weights


class Flushing:
    """One worker's part.

    Args:
        program: the action lists.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        clip_norm: gradients of a larger global norm are scaled down to it; None: never.
    """

    under_way = False
    warm_up_steps = 0

    def __init__(
        self,
        program: Program,
        make: Callable[..., Interpreter],
        workers: Workers,
        weights: Weights,
        clip_norm: float | None,
    ) -> None:
        self.interpreter = make(program.schedule, owner=self)
        self.tasks = self.interpreter.prepare(program)
        self.workers = workers
        self.weights = weights
        self.clip_norm = clip_norm
        self._batch: Batch
        self._told: Told | None = None
        self._updates = True
        self.waiting = 0
        """Samples whose gradients wait for an update, of steps without one."""

    @property
    def lists(self) -> Sequence[Tasks]:
        """All that may be run, for who needs the peers in it."""
        return (self.tasks,)

    def step(self, batch: Batch, *, update: bool = True) -> Told:
        """Run the order once; without an update the gradients are kept for the next step's."""
        self._batch, self._told, self._updates = batch, None, update
        if self.waiting:
            batch.settle = partial(self._weighted, batch.settle)
        self.weights.attach()
        self.interpreter.run(self.tasks, batch)
        told = self._told or self._agree()  # nothing on this worker is updated: nobody has asked yet
        self.waiting = 0 if update else batch.total
        self.weights.detach()
        self.weights.average_statistics()
        return told

    def _weighted(self, settle: Callable[[], int] | None) -> int:
        """All samples since the last update; those before weigh as many as they are."""
        total = self.waiting + (self._batch.total if settle is None else settle())
        self.weights.scale(self.waiting / total)
        return total

    def flush(self) -> list[Told]:
        """Nothing is under way."""
        return []

    # -- what the interpreter asks for (``Owner``)

    def start_sync(self, stage: int) -> None:
        """Begin to sum a stage's gradients over its copies."""
        if self._updates:
            self.weights.start_sync(stage)

    def wait_sync(self, stage: int) -> None:
        """Until they are summed."""
        if self._updates:
            self.weights.wait_sync(stage)

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Update a stage's weights, once loss and norm are agreed on."""
        del version, frees  # there is one version
        if not self._updates:
            return
        if self._told is None:
            self._told = self._agree()
        self.weights.update(stage)

    def _agree(self) -> Told:
        """Loss and gradient norm of the whole mini-batch; then clip by the norm.

        Raises:
            WorkerError: the loss or a gradient is not finite.
        """
        if self._updates:
            self.weights.sum_tied()
        self.workers.transport.status.now("agreeing on loss and gradient norm")
        mine, odd = self._batch.losses.summed()
        squared = self.weights.squared_norm() if self._updates else 0.0
        rows = self.workers.transport.gather([mine, squared, odd])
        step, samples = self._batch.step, self._batch.total - self.waiting
        loss, norm = self.workers.loss_and_norm(rows, step, self.weights.not_finite)
        if self.waiting:
            loss *= self._batch.total / samples
        if not self._updates:
            return Told(step, loss, math.nan, samples)
        factor = clip_factor(norm, self.clip_norm)
        if factor < 1.0:
            self.weights.scale(factor)
        return Told(step, loss, norm, samples)
