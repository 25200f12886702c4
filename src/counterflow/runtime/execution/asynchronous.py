"""Runs schedules without a flush: a step begins a mini-batch and leaves the last ones under way.

What a step runs is a segment of the schedule (``program/segments.py``); the next step goes on where
it ended, so that no worker waits for the others between two steps. For the same reason loss and norm of a
mini-batch are told by a later step, when everybody has sent its part long before, those of short periods
several at a time; and gradients are clipped stage by stage, because a stage is updated before the gradients
of the others are there.

Invariant: n steps and a flush are the program of the scheme with n periods, action by action.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterflow.errors import ConfigError, WorkerError
from counterflow.execution import Execution
from counterflow.program.actions import StartSync, WaitSync
from counterflow.program.segments import Segments

from .. import later
from ..mini_batch.batch import Batch
from ..mini_batch.losses import Losses, divisor_of, refuse_no_graph
from ..mini_batch.told import PART_WIDTH, Part, Told, pieces
from ..parameters.weights import Weights
from ..stages.versions import Versions
from ..transport.base import Gathering
from .interpreter import Interpreter
from .step import StepStatistics, Workers
from .tasks import Tasks

TOLD_TOGETHER = 8
"""Micro-batches of which loss and norm are gathered at once: a gather costs as much as an op's messages."""


class _Own(NamedTuple):
    """What this worker has to tell of a mini-batch.

    That is its step, its samples of all replicas, its losses, and whether copies are compared after it.
    """

    step: int
    samples: int
    losses: Losses
    compared: bool


class AsynchronousRunner:
    """One worker's part.

    Args:
        cut: an asynchronous schedule, cut where its mini-batches come in.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        execution: how it clips: a stage's gradients are scaled down to the largest norm divided by the square
            root of the number of stages, so that those of all stages together never exceed it.

    Raises:
        ConfigError: the schedule has too few periods, or stages share weights.
        ScheduleError: the checker does not accept it.
    """

    waiting = 0
    """Samples whose gradients wait for an update: none, in no step."""
    tells_calls = False
    """Whether workers tell of a call with its loss: they tell of it much later."""

    def __init__(
        self,
        cut: Segments,
        make: Callable[..., Interpreter],
        workers: Workers,
        weights: Weights,
        execution: Execution,
    ) -> None:
        schedule = cut.schedule
        if weights.shared:
            raise ConfigError(
                f"{schedule.scheme} updates each stage at its own time, and {weights.shared[0]} is a weight "
                "of several stages; do not tie them, or take a scheme with a flush"
            )
        self.segments = cut
        self.warm_up_steps = self.segments.last
        """Steps until a segment is like all later ones."""
        # One slot more than mini-batches under way: a worker may be ahead of the one it sends to.
        slots = self.segments.periods_in_flight + 1
        self.interpreter = make(schedule, slots=slots, owner=self)
        self._slots = slots
        self._lists: dict[tuple[bool, int, int], Tasks] = {}
        self.workers = workers
        self.weights = weights
        most = execution.max_norm
        self.limit = None if most is None else most / math.sqrt(schedule.stages)
        saved = self.interpreter.saved
        for stage, copy in weights.stages.items():
            copy.versions = Versions(
                stage, copy.parameters, saved.never if saved is not None else lambda _: None
            )
        self._together = math.ceil(TOLD_TOGETHER / schedule.micro_batches)
        """Mini-batches that a gather tells of."""
        self._begun = 0  # mini-batches, since the pipeline was empty
        self._first = 0
        """The step of the first of these."""
        self._batch: Batch | None = None  # that a step brings
        self._samples = 1  # of each mini-batch under way
        self._untold: deque[_Own] = deque()
        self._norms: dict[int, list[tuple[int, later.Later]]] = defaultdict(list)
        """By mini-batch, of stages that were updated: squared norm, and whether all so far were finite."""
        self._alive: dict[int, Tensor] = {}
        """By stage, whether all its gradients so far were finite; else they count as zeros from then on."""
        self._dead: set[int] = set()
        """Stages with a gradient that was not finite, as far as this worker has read it."""
        self._compared: set[int] = set()
        """Mini-batches after whose updates copies are compared."""
        self._digests: dict[int, list[later.Later]] = defaultdict(list)
        """Of these, what of this worker's is compared: of each stage as the mini-batch leaves it."""
        self._telling: deque[tuple[list[_Own], Gathering]] = deque()
        self._heard: deque[tuple[_Own, list[list[float]]]] = deque()

    @property
    def under_way(self) -> bool:
        """Whether anything is left to do for a mini-batch that was begun."""
        return self._begun > 0

    @property
    def lists(self) -> Sequence[Tasks]:
        """All that may be run, for who needs the peers in it."""
        every = range(self.segments.last + 1)
        return [self._tasks(drains, k, 0) for drains in (False, True) for k in every]

    # -- steps

    def step(self, batch: Batch, *, update: bool = True) -> StepStatistics | None:
        """Begin a mini-batch; what is known by now of one before, if there is one.

        Raises:
            ConfigError: it is to be made without an update.
        """
        if not update:
            raise ConfigError(
                f"{self.interpreter.schedule.scheme} updates each stage at its own time, and cannot make a "
                "step without an update; give more micro-batches, or take a scheme with a flush"
            )
        number = self._begun
        if not number:
            self._first = batch.step
            for versions in self._versions():
                versions.begin()
        self._begun += 1
        if batch.compared:
            self._compared.add(number)
        self._run(number, batch)
        self._untold.append(_Own(batch.step, batch.total, batch.losses, batch.compared))
        if len(self._untold) == self.segments.update_lag + self._together:
            self._tell(self._together)
        told_by_all = number + 1 - self.segments.update_lag - self.segments.spread
        return self._hear() if told_by_all >= self._together else None

    def flush(self, told: Told, compare: Callable[[Sequence[Told]], object]) -> list[StepStatistics]:
        """End what is under way; what no step has told yet. Nobody waits for all others, nor tells of it."""
        del told, compare
        if not self._begun:
            return []
        self._run(self._begun - 1, None)
        for versions in self._versions():
            versions.end()
        if self._untold:
            self._tell(len(self._untold))
        found = []
        while self._telling or self._heard:
            found.append(self._hear())
        self._alive.clear()
        self._compared.clear()
        self._begun = 0
        return found

    def _run(self, number: int, batch: Batch | None) -> None:
        index = min(number, self.segments.last)
        tasks = self._tasks(batch is None, index, number - index)
        self.weights.attach()
        self.weights.changes.note_parameters()
        self._batch = batch
        try:
            self.interpreter.run(tasks, batch, period_offset=number - index, drains=batch is None)
            self.weights.changes.check()  # also where a segment has no update
        except WorkerError as error:
            if isinstance(error.__cause__, RuntimeError):
                self.weights.changes.check()
            raise
        finally:
            self.weights.hooks.give_back()
            if batch is not None:
                self._samples, self._batch = batch.total, None
        self.weights.detach()
        for versions in self._versions():
            versions.show_latest()

    def _versions(self) -> list[Versions]:
        return [copy.versions for copy in self.weights.stages.values() if copy.versions is not None]

    def _tasks(self, drains: bool, index: int, period_offset: int) -> Tasks:
        key = drains, index, period_offset % self._slots
        if key not in self._lists:
            programs = self.segments.drains if drains else self.segments.steady
            self._lists[key] = self.interpreter.prepare(programs[index], period_offset)
        return self._lists[key]

    # -- loss and norm

    def _tell(self, count: int) -> None:
        """Tell everybody this worker's part in the oldest mini-batches, whose updates are made here."""
        first = self._begun - len(self._untold)
        batches = [self._untold.popleft() for _ in range(count)]
        row: list[float] = [self._begun, batches[0].step]
        for number, batch in enumerate(batches, first):
            row += batch.losses.part(self._squared(number)).pack()
            digests = [each.read() for each in self._digests.pop(number, ())]
            row += map(sum, zip(*digests, strict=True)) if digests else [0.0] * self.weights.copies.columns
        self._telling.append((batches, self.workers.transport.start_gather(row)))

    def _squared(self, number: int) -> float:
        """Return this worker's part of a mini-batch's squared norm; NaN if a gradient was not finite."""
        squared = 0.0
        for stage, norm in self._norms.pop(number, ()):
            counted, alive = norm.read()
            squared += counted if alive else math.nan
            if not alive:
                self._dead.add(stage)
        return squared

    def _hear(self) -> StepStatistics:
        """What everybody told of the oldest mini-batch that no step has told yet.

        Raises:
            WorkerError: its loss or a gradient is not finite.
        """
        if not self._heard:
            self._gather()
        batch, rows = self._heard.popleft()
        packed, digests, _ = zip(
            *(pieces(r, PART_WIDTH, self.weights.copies.columns) for r in rows), strict=True
        )
        if batch.compared:
            self.weights.copies.compare(digests, f"after step {batch.step}")
        parts = [Part.unpack(row) for row in packed]
        weighed = [part.weighed for part in parts]
        refuse_no_graph(weighed)
        scale = 1 / self.workers.weight(weighed, batch.step)[0]
        loss = self.workers.loss(parts, batch.step, scale)
        norm = self.workers.norm(
            [part.squared_norm for part in parts],
            loss,
            batch.step,
            lambda: (min(self._dead), "one of its weights") if self._dead else None,
            updated="its stage counted it and all later ones as zeros",
        )
        metrics = self.workers.metrics(weighed, batch.losses, scale)
        losses = batch.losses.by_micro_batch()
        return StepStatistics(batch.step, loss, norm, batch.samples, metrics, losses=losses)

    def _gather(self) -> None:
        """Wait for what everybody told next."""
        batches, telling = self._telling.popleft()
        self.workers.transport.status.now(f"hearing of step {batches[0].step}")
        rows = telling.wait()
        for rank, row in enumerate(rows):
            if row[:2] != rows[0][:2]:
                raise ConfigError(
                    f"rank {rank} told of step {row[1]:g} in call {row[0]:g} since the pipeline was empty, "
                    f"rank 0 of step {rows[0][1]:g} in call {rows[0][0]:g}; all workers make the same calls "
                    "in the same order"
                )
        for index, batch in enumerate(batches):
            width = PART_WIDTH + self.weights.copies.columns
            its = slice(2 + width * index, 2 + width * (index + 1))
            self._heard.append((batch, [row[its] for row in rows]))

    # -- what the interpreter asks for (``Owner``)

    def start_sync(self, sync: StartSync) -> None:
        """Begin to sum over workers."""
        self.weights.start_sync(sync)

    def wait_sync(self, sync: WaitSync) -> None:
        """Until it is summed."""
        self.weights.wait_sync(sync)

    def tell_loss(self) -> None:
        """No list asks for it either."""
        raise AssertionError("without a flush no list tells of the loss")

    def agree(self) -> None:
        """No list asks for it: what is told, is told by a later step."""
        raise AssertionError("without a flush no list agrees on loss and norm")

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Make a version of a stage's weights from the gradients at hand.

        The host does not look at them. After one that is not finite a stage's gradients count as zeros, and
        all workers end when they are told of it.
        """
        self.weights.changes.check()
        versions = self.weights.stages[stage].versions
        assert versions is not None
        versions.make(version, frees)
        samples = self._samples if self._batch is None else self._batch.total  # the same in all under way
        divisor = divisor_of(samples, flushes=False)
        if divisor != samples:
            self.weights.scale(divisor / samples, stage)
        with versions.unseen():
            self.weights.call_hooks(self._first + version - 1, stage)
        counted, alive = self.weights.clip(stage, self.limit, self._alive.get(stage))
        self._alive[stage] = alive
        self._norms[version - 1].append((stage, later.Later(torch.stack([counted, alive.double()]))))
        with versions.unseen():
            self.weights.update(stage, self._first + version - 1)
        if version - 1 in self._compared:
            digests = self.weights.copies.digests({stage}, buffers=False)
            self._digests[version - 1].append(later.Later(digests))
