"""Runs synchronous schedules: each step is a whole order, and at its end nothing is under way.

Invariant: no weight changes before loss and gradient norm of the whole mini-batch are known everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from counterflow.errors import ConfigError, WorkerError
from counterflow.execution import Execution
from counterflow.program.actions import Program, StartSync, Summed, WaitSync

from ..mini_batch.batch import Batch
from ..mini_batch.losses import added, consistent, refuse_no_graph
from ..mini_batch.told import Counts, Part, Told, Weighed
from ..parameters.gradients import clip_factor
from ..parameters.weights import Weights
from .interpreter import Interpreter
from .step import StepStatistics, Workers
from .tasks import Tasks

_ROUNDING = 1e-14
"""What weighs as much, added up in another order, differs by less."""


class SynchronousRunner:
    """One worker's part.

    Args:
        program: the action lists.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        execution: whether and how it clips and skips.
    """

    warm_up_steps = 0
    slots = 1
    """Mini-batches whose messages are told apart."""
    tells_calls = False
    """Whether workers tell of a call with its loss, where no agreement of all went before."""

    def __init__(
        self,
        program: Program,
        make: Callable[..., Interpreter],
        workers: Workers,
        weights: Weights,
        execution: Execution,
    ) -> None:
        self.interpreter = make(program.schedule, slots=self.slots, owner=self)
        self._tasks = [self.interpreter.prepare(program, slot) for slot in range(self.slots)]
        self.workers = workers
        self.weights = weights
        self.execution = execution
        self._skipped = False  # something since the last update was not finite
        self._batch: Batch
        self._statistics: StepStatistics  # every list agrees once
        self._updates = True
        self._weight = 0.0  # of the losses since the last update
        self._counted = Counts(0)  # what they count
        self._divisor: float | None = None  # what those of the first step since then were divided by
        self.waiting = 0
        """Samples whose gradients wait for an update, of steps without one."""

    @property
    def under_way(self) -> bool:
        """Whether a step has left something to do: never."""
        return False

    @property
    def lists(self) -> Sequence[Tasks]:
        """All that may be run, for who needs the peers in it."""
        return self._tasks

    def step(self, batch: Batch, *, update: bool = True) -> StepStatistics | None:
        """Run the order once; without an update the gradients are kept for the next step's."""
        self._run(batch, update)
        return self._statistics

    def _run(self, batch: Batch, update: bool, number: int = 0, *, drains: bool = True) -> None:
        """Run the order once, as number ``number`` since nothing was under way."""
        self._batch, self._updates = batch, update
        batch.divisor = self._divisor
        self.weights.attach()
        self.weights.changes.note_parameters()
        offset = number if self.interpreter.whole_timeline else 0
        try:
            self.interpreter.run(self._tasks[number % self.slots], batch, period_offset=offset, drains=drains)
        except WorkerError as error:
            if isinstance(error.__cause__, RuntimeError):
                self.weights.changes.refuse_overwritten()
            raise
        finally:
            self.weights.hooks.give_back()
        self.weights.commit_statistics()
        if update and not self._skipped:
            self.weights.share()
        self.waiting = 0 if update else self.waiting + batch.total
        self._skipped = self._skipped and not update
        self.weights.detach()

    def flush(self, told: Told, compare: Callable[[Sequence[Told]], object]) -> list[StepStatistics]:
        """Nothing is under way."""
        del told, compare
        return []

    # -- what the interpreter asks for (``Owner``)

    def start_sync(self, sync: StartSync) -> None:
        """Begin to sum over workers; gradients only for an update."""
        if self._updates or sync.what is Summed.STATISTICS:
            self.weights.start_sync(sync)

    def wait_sync(self, sync: WaitSync) -> None:
        """Until it is summed."""
        if self._updates or sync.what is Summed.STATISTICS:
            self.weights.wait_sync(sync)

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Update a stage's weights, once loss and norm are agreed on."""
        del version, frees  # there is one version
        if self._skipped and self._updates:
            self.weights.skip(stage)
        elif self._updates:
            self.weights.update(stage, self._batch.step)

    def tell_loss(self) -> None:
        """No list asks for it: the loss is told with the norm."""
        raise AssertionError("with a barrier the loss is told with the norm")

    def agree(self) -> None:
        """Loss and gradient norm of the whole mini-batch; then clip by the norm.

        Raises:
            ConfigError: copies of a stage changed buffers of their own.
            WorkerError: the loss or a gradient is not finite.
        """
        self.weights.changes.check()
        losses = self._batch.losses
        hooked = self._updates and self.weights.hooked
        squared = self.weights.squared_norm() if self._updates and not hooked else 0.0
        parts = self._gathered(losses.part(squared))
        weighed = [part.weighed for part in parts]
        scale, this_step = self._weigh(weighed)
        squares = [part.squared_norm * scale**2 for part in parts]
        finite = all(math.isfinite(part.loss) for part in parts)
        if hooked and finite:
            self._call_hooks(scale)
            scale = 1.0
            squares = [row[0] for row in self.workers.transport.gather([self.weights.squared_norm()])]
        step = self._batch.step
        if self.execution.skip_non_finite and not (finite and all(map(math.isfinite, squares))):
            self._skipped = True
            loss, norm = added(part.loss for part in parts) * this_step, math.nan
        else:
            loss = self.workers.loss(parts, step, this_step)
            norm = self.workers.norm(squares, loss, step, self.weights.not_finite)
        metrics = self._metrics(weighed, this_step)
        if self._updates and not self._skipped:
            factor = scale * clip_factor(norm, self.execution.max_norm)
            if factor != 1.0:
                self.weights.scale(factor)
        else:
            norm = math.nan
        self._statistics = StepStatistics(
            step, loss, norm, self._batch.total, metrics, self._skipped, losses.by_micro_batch()
        )

    def _call_hooks(self, scale: float) -> None:
        """Let hooks see the mini-batch's gradients, once they are divided."""
        self.weights.scale(scale)
        self.weights.call_hooks(self._batch.step)

    def _gathered(self, part: Part) -> list[Part]:
        """Everybody's part of loss and norm."""
        return list(map(Part.unpack, self.workers.transport.gather(part.pack())))

    def _weigh(self, parts: Sequence[Weighed]) -> tuple[float, float]:
        """Add up what the losses weigh; ``parts`` as for ``Workers.weight``.

        Returns:
            What the gradients' sums are multiplied by, and what the step's own sums are.

        Raises:
            ConfigError: losses of this step, or of one since the last update, count something else.
        """
        refuse_no_graph(parts)
        weight, counted = self.workers.weight(parts, self._batch.step)
        self._counted |= counted
        if not consistent(self._counted):
            raise ConfigError(
                "the losses of the steps of an update are divided by several things: by samples, elements, "
                "tokens or a LossSum's weight; return the same kind of loss in all of them"
            )
        self._weight += weight
        scale = 1 / self._weight
        if self._updates:
            self._weight, self._counted, self._divisor = 0.0, Counts(0), None
        elif self._divisor is None:
            self._divisor = float(self._batch.total)
        return 1.0 if abs(scale - 1.0) < _ROUNDING else scale, 1 / weight

    def _metrics(self, parts: Sequence[Weighed], scale: float) -> dict[str, float]:
        """The mini-batch's metrics; as ``Workers.metrics``."""
        return self.workers.metrics(parts, self._batch.losses, scale)
