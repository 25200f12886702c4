"""Runs schedules without a flush: a step begins a mini-batch and leaves the last ones under way.

What a step runs is a segment of the schedule (``schedule/segments.py``); the next step goes on where it
ended, so that no worker waits for the others between two steps. For the same reason loss and norm of a
mini-batch are told by a later step, when everybody has sent its part long before; and gradients are
clipped stage by stage, because a stage is updated before the gradients of the others are there.

Invariant: n steps and a flush are the program of the scheme with n periods, action by action.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.segments import segments

from .batch import Batch
from .gradients import clip_factor
from .interpreter import Interpreter
from .step import Told, Workers
from .tasks import Tasks
from .transport import Gathering
from .versions import Versions
from .weights import Weights


class Continuous:
    """One worker's part.

    Args:
        schedule: an asynchronous schedule.
        make: makes the interpreter of a schedule.
        workers: where this worker is.
        weights: this worker's.
        clip_norm: a stage's gradients are scaled down to this divided by the square root of the number of
            stages, so that those of all stages together never exceed it; None: never.

    Raises:
        ConfigError: the schedule has too few periods, or stages share weights.
        ScheduleError: the checker does not accept it.
    """

    def __init__(
        self,
        schedule: Schedule,
        make: Callable[..., Interpreter],
        workers: Workers,
        weights: Weights,
        clip_norm: float | None,
    ) -> None:
        if weights.shared:
            raise ConfigError(
                f"{schedule.scheme} updates each stage at its own time, and {weights.shared[0]} is a weight "
                "of several stages; do not tie them, or take a scheme with a flush"
            )
        self.segments = segments(schedule, replicas=workers.replicas)
        self.warm_up_steps = self.segments.last
        """Steps until a segment is like all later ones."""
        # One slot more than mini-batches under way: a worker may be ahead of the one it sends to.
        slots = self.segments.periods_in_flight + 1
        self.interpreter = make(schedule, slots=slots, owner=self)
        self._slots = slots
        self._lists: dict[tuple[bool, int, int], Tasks] = {}
        self.workers = workers
        self.weights = weights
        self.limit = None if clip_norm is None else clip_norm / math.sqrt(schedule.stages)
        saved = self.interpreter.saved
        for stage, copy in weights.stages.items():
            copy.versions = Versions(
                stage, [layer.module for layer in copy.layers], saved.never if saved else lambda _: None
            )
        self._under_way: list[Batch] = []
        self._told = 0
        self._squared: dict[int, float] = defaultdict(float)
        self._telling: deque[tuple[int, Gathering]] = deque()

    @property
    def under_way(self) -> bool:
        """Whether anything is left to do for a mini-batch that was begun."""
        return bool(self._under_way)

    @property
    def lists(self) -> Sequence[Tasks]:
        """All that may be run, for who needs the peers in it."""
        every = range(self.segments.last + 1)
        return [self._tasks(drains, k, 0) for drains in (False, True) for k in every]

    # -- steps

    def step(self, batch: Batch) -> Told | None:
        """Begin a mini-batch; what is known by now of one before, if there is one."""
        number = len(self._under_way)
        if not number:
            for copy in self.weights.stages.values():
                assert copy.versions is not None
                copy.versions.begin()
        self._under_way.append(batch)
        self._run(number, batch)
        self._tell_until(number - self.segments.update_lag)
        found = self._hear() if len(self._telling) > self.segments.spread else None
        self._forget()
        return found

    def flush(self) -> list[Told]:
        """End what is under way; what no step has told yet."""
        if not self._under_way:
            return []
        last = len(self._under_way) - 1
        self._run(last, None)
        for copy in self.weights.stages.values():
            assert copy.versions is not None
            copy.versions.end()
        self.weights.average_statistics()
        self._tell_until(last)
        found = []
        while self._telling:
            found.append(self._hear())
        self._under_way.clear()
        self._squared.clear()
        self._told = 0
        return found

    def _run(self, number: int, batch: Batch | None) -> None:
        index = min(number, self.segments.last)
        tasks = self._tasks(batch is None, index, number - index)
        self.interpreter.run(tasks, batch, later=number - index, drains=batch is None)

    def _tasks(self, drains: bool, index: int, later: int) -> Tasks:
        key = drains, index, later % self._slots
        if key not in self._lists:
            programs = self.segments.drains if drains else self.segments.steady
            self._lists[key] = self.interpreter.prepare(programs[index], later)
        return self._lists[key]

    # -- loss and norm

    def _tell_until(self, number: int) -> None:
        """Tell everybody this worker's part in the mini-batches up to one, whose updates are made here."""
        while self._told <= number:
            batch = self._under_way[self._told]
            mine, odd = batch.losses.summed()
            row = [mine, self._squared.pop(self._told, 0.0), odd, batch.step, len(self._under_way)]
            self._telling.append((self._told, self.workers.transport.start_gather(row)))
            self._told += 1

    def _hear(self) -> Told:
        """What everybody told of the oldest mini-batch."""
        number, telling = self._telling.popleft()
        batch = self._under_way[number]
        self.workers.transport.status.now(f"hearing of step {batch.step}")
        rows = telling.wait()
        for rank, row in enumerate(rows):
            if row[3:] != rows[0][3:]:
                raise ConfigError(
                    f"rank {rank} told of step {row[3]:g} in call {row[4]:g} since the pipeline was empty, "
                    f"rank 0 of step {rows[0][3]:g} in call {rows[0][4]:g}; all workers make the same calls "
                    "in the same order"
                )
        loss, norm = self.workers.loss_and_norm(rows, batch.step)
        return Told(batch.step, loss, norm, batch.total)

    def _forget(self) -> None:
        """Let go of the samples of mini-batches that are over."""
        over = len(self._under_way) - self._slots
        if over >= 0:
            self._under_way[over].inputs = self._under_way[over].targets = None

    # -- what the interpreter asks for (``Owner``)

    def start_sync(self, stage: int) -> None:
        """Begin to sum a stage's gradients over its copies."""
        self.weights.start_sync(stage)

    def wait_sync(self, stage: int) -> None:
        """Until they are summed."""
        self.weights.wait_sync(stage)

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Make a version of a stage's weights from the gradients at hand."""
        squared = self.weights.squared_norm(stage)
        self._squared[version - 1] += squared if self.weights.counts(stage) else 0.0
        factor = clip_factor(math.sqrt(squared), self.limit)
        if factor < 1.0:
            self.weights.scale(factor, stage)
        self.weights.note_gradients([stage])
        versions = self.weights.stages[stage].versions
        assert versions is not None
        versions.make(version, frees)
        self.weights.update(stage)
