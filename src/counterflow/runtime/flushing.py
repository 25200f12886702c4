"""Runs synchronous schedules: each step is a whole order, and at its end nothing is under way.

Invariant: no weight changes before loss and gradient norm of the whole mini-batch are known everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    @property
    def lists(self) -> Sequence[Tasks]:
        """All that may be run, for who needs the peers in it."""
        return (self.tasks,)

    def step(self, batch: Batch) -> Told:
        """Run the order once."""
        self._batch, self._told = batch, None
        self.weights.attach()
        self.interpreter.run(self.tasks, batch)
        told = self._told or self._agree()  # nothing on this worker is updated: nobody has asked yet
        self.weights.detach()
        self.weights.average_statistics()
        return told

    def flush(self) -> list[Told]:
        """Nothing is under way."""
        return []

    # -- what the interpreter asks for (``Owner``)

    def start_sync(self, stage: int) -> None:
        """Begin to sum a stage's gradients over its copies."""
        self.weights.start_sync(stage)

    def wait_sync(self, stage: int) -> None:
        """Until they are summed."""
        self.weights.wait_sync(stage)

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Update a stage's weights, once loss and norm are agreed on."""
        del version, frees  # there is one version
        if self._told is None:
            self._told = self._agree()
        self.weights.update(stage)

    def _agree(self) -> Told:
        """Loss and gradient norm of the whole mini-batch; then clip by the norm.

        Raises:
            WorkerError: the loss or a gradient is not finite.
        """
        self.weights.sum_tied()
        self.workers.transport.status.now("agreeing on loss and gradient norm")
        mine, odd = self._batch.losses.summed()
        rows = self.workers.transport.gather([mine, self.weights.squared_norm(), odd])
        step = self._batch.step
        loss, norm = self.workers.loss_and_norm(rows, step, self.weights.not_finite)
        factor = clip_factor(norm, self.clip_norm)
        if factor < 1.0:
            self.weights.scale(factor)
        return Told(step, loss, norm, self._batch.total)
