"""Runs synchronous schedules without a barrier: a worker goes on as soon as its own stages are updated.

Invariant: every number is the same as with a barrier, bit for bit. What is left out are the waits that no
number needs: for the other workers' ends, for messages on their way, for the agreement on the next
mini-batch, which is like the last one. A worker is at most one step ahead of another (``early_loss.py``), so
that two sets of message numbers tell the steps apart.

Where gradients are clipped, or updates skipped, updates wait for the norm of all as with a barrier: that is
one gather, which ends when the last worker has its gradients. Else they wait for the loss only, which is
known by then. So a loss that is not finite ends the run before anything is updated with it. Where a gradient
is not, though the loss is, its worker updates with zeros and the others with theirs, and everybody ends
before the next updates.

Without either, a device always has an op to run while its host reads: the loss is read an op after it was
made, and the norm is told with the next step's loss, an op into that step. So the host does not know at an
update whether the gradients are finite; where they are, all of the worker's become zeros if one is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from counterflow.execution import Execution
from counterflow.program.actions import Program

from .. import later
from ..mini_batch.batch import Batch
from ..mini_batch.losses import added
from ..mini_batch.told import PART_WIDTH, TOLD_WIDTH, Part, Told, Weighed, pieces
from ..parameters.gradients import OwnNorm
from ..parameters.weights import Weights
from ..transport.base import Gathering
from .interpreter import Interpreter
from .step import StepStatistics, Workers
from .synchronous import SynchronousRunner


class _Untold(NamedTuple):
    """A step of which no step has told: what is known of it, and this worker's part of the norm, if any.

    ``scale`` is what makes the norm of it.
    """

    statistics: StepStatistics
    norm: OwnNorm | None
    scale: float


class BarrierFreeRunner(SynchronousRunner):
    """One worker's part.

    Args:
        program: the action lists; whether their updates wait for the norm ``execution`` says.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        execution: whether and how it clips and skips.
    """

    slots = 2
    tells_calls = True

    def __init__(
        self,
        program: Program,
        make: Callable[..., Interpreter],
        workers: Workers,
        weights: Weights,
        execution: Execution,
    ) -> None:
        super().__init__(program, make, workers, weights, execution)
        self._begun = 0  # steps since nothing was under way
        self._names: tuple[str, ...] = ()  # of the metrics, as everybody knows them
        self._columns: Sequence[Sequence[float]] = ()  # of the metrics, as all told them
        self._telling: Gathering
        self._told: StepStatistics | None = None
        self._untold: _Untold | None = None
        self._digests: tuple[int, later.Later] | None = None
        """After which step copies are compared, with what the next one gathers, and this worker's part."""
        self._odd: tuple[int, str] | None = None  # a gradient of this worker that was not finite

    @property
    def under_way(self) -> bool:
        """Whether another worker may still be at work on a step that this one has ended."""
        return self._begun > 0

    def step(self, batch: Batch, *, update: bool = True) -> StepStatistics | None:
        """Run the order once, and update; what is known by now: of the step before, or of this one."""
        number = self._begun
        self._begun += 1
        self._told = None
        self._run(batch, update, number, drains=False)
        if batch.compared:
            self._digests = batch.step, later.Later(self.weights.copies.digests())
        self.interpreter.way.release(batch)  # it stays itself until its slot is needed
        return self._told

    def flush(self, told: Told, compare: Callable[[Sequence[Told]], object]) -> list[StepStatistics]:
        """Wait until all workers have ended; what no step has told yet.

        Args:
            told: what this worker tells of the call.
            compare: looks at what all told of it.
        """
        if not self._begun:
            return []
        # What follows is for all workers together: they tell of it in as many numbers as of a step.
        more = PART_WIDTH + self.weights.copies.columns + 1 + 2 * len(self._names)
        rows = self.workers.transport.gather([*told.pack(), *([0.0] * more)])
        compare([Told.unpack(row[:TOLD_WIDTH]) for row in rows])
        found = []
        if self._untold is not None:
            self.workers.transport.status.now(f"hearing of step {self._untold.statistics.step}")
            rows = self.workers.transport.gather([self._own_square()])
            found = [self._hear(self._untold, [row[0] for row in rows])]
            self._untold = None
        self._digests = None  # who flushes compares them all
        self.interpreter.drain()
        self._begun = 0
        return found

    # -- what the interpreter asks for (``Owner``)

    def tell_loss(self) -> None:
        """Begin to tell everybody this worker's part of the loss, and of the norm of the step before."""
        part = self._batch.losses.part(self._own_square())
        self._telling = self.workers.transport.start_gather(self._row(part))

    def agree(self) -> None:
        """The loss of the whole mini-batch, and the norm of the one before; with clipping, loss and norm.

        Raises:
            ConfigError: the workers made different calls; or copies of a stage changed buffers.
            WorkerError: the loss, or a gradient of the mini-batch before, is not finite.
        """
        if self.execution.waits_for_norm:
            super().agree()
            self._told = self._statistics
            return
        self.weights.changes.check()
        parts = self._read(self._telling.wait())
        if self._untold is not None:
            self._told = self._hear(self._untold, [part.squared_norm for part in parts])
        batch = self._batch
        weighed = [part.weighed for part in parts]
        scale, this_step = self._weigh(weighed)
        loss = self.workers.loss(parts, batch.step, this_step)
        if self._updates and self.weights.hooked:
            self._call_hooks(scale)
            scale = 1.0
        metrics = self._metrics(weighed, this_step)
        norm: OwnNorm | None = None
        if self._updates:
            norm = self.weights.own_norm()
            norm.drop()
            if scale != 1.0:
                self.weights.scale(scale)
        losses = batch.losses.by_micro_batch()
        statistics = StepStatistics(batch.step, loss, math.nan, batch.total, metrics, losses=losses)
        self._untold = _Untold(statistics, norm, scale)

    # -- loss and norm

    def _own_square(self) -> float:
        """Of the step of which none has told yet this worker's part of the squared norm."""
        if self._untold is None or self._untold.norm is None:
            return 0.0
        square, odd = self._untold.norm.read()
        if odd is not None and self._odd is None:
            self._odd = odd, "one of its weights"
        return square

    def _hear(self, untold: _Untold, squares: list[float]) -> StepStatistics:
        """What came of a step, with what all told of its norm.

        Raises:
            WorkerError: a gradient of it is not finite.
        """
        known, own, scale = untold
        if own is None:
            return known
        norm = self.workers.norm(
            [square * scale**2 for square in squares],
            known.loss,
            known.step,
            lambda: self._odd,
            updated="other stages may be updated with it; with clip_norm, math.inf say, nothing would be",
        )
        return replace(known, grad_norm=norm)

    def _gathered(self, part: Part) -> list[Part]:
        return self._read(self.workers.transport.gather(self._row(part)))

    def _row(self, part: Part) -> list[float]:
        """What this worker tells of loss and norm, with the call and the metrics whose names are known."""
        assert self._batch.told is not None
        metrics = self._batch.losses.metrics()
        values = [x for name in self._names for x in (float(name in metrics), metrics.get(name, 0.0))]
        digests = [0.0] * self.weights.copies.columns if self._digests is None else self._digests[1].read()
        unknown = float(bool(metrics.keys() - self._names))
        return [*self._batch.told.pack(), *part.pack(), *digests, unknown, *values]

    def _read(self, rows: list[list[float]]) -> list[Part]:
        """What all told of loss and norm, once it is seen that they made the same call."""
        assert self._batch.compare is not None
        widths = TOLD_WIDTH, PART_WIDTH, self.weights.copies.columns
        told, parts, digests, metrics = zip(*(pieces(row, *widths) for row in rows), strict=True)
        self._batch.compare([Told.unpack(each) for each in told])
        if self._digests is not None:
            self.weights.copies.compare(digests, f"after step {self._digests[0]}")
            self._digests = None
        self._columns = metrics
        return [Part.unpack(each) for each in parts]

    def _metrics(self, parts: Sequence[Weighed], scale: float) -> dict[str, float]:
        if any(columns[0] for columns in self._columns):  # names that not everybody knows
            found = super()._metrics(parts, scale)
            self._names += tuple(name for name in found if name not in self._names)
            return found
        named: Mapping[str, int] = {name: 1 + 2 * at for at, name in enumerate(self._names)}
        return {
            name: scale * added(columns[at + 1] for columns in self._columns)
            for name, at in named.items()
            if any(columns[at] for columns in self._columns)
        }
