"""The unit of a mini-batch that the model's own forward runs on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from counterflow.schedule.ir import Schedule

from ..execution.step import Workers
from ..messages.values import Unit
from ..mini_batch.batch import Batch
from ..stages.sample_rows import SampleRows


@dataclass(frozen=True, slots=True)
class WitnessUnit:
    """A unit that the model's own forward runs on.

    Attributes:
        unit: the unit; of a micro-batch in slices, all of it.
        rows: its samples.
        replica: the replica whose workers run it.
        pipe: its pipe.
        inputs_rank: rank of a worker that holds the pipe's first stage.
        rank: rank of the worker that computes its loss, and compares.
    """

    unit: Unit
    rows: SampleRows
    replica: int
    pipe: int
    inputs_rank: int
    rank: int


class Units:
    """Choice of units, each time of another micro-batch and another replica.

    Args:
        schedule: schedule of the pipeline.
        workers: place of this worker.
    """

    def __init__(self, schedule: Schedule, workers: Workers) -> None:
        self._schedule, self._workers = schedule, workers
        self.only_first = False
        """Whether only the first unit of a mini-batch is chosen."""
        self._count = 0

    @cached_property
    def _pipes(self) -> dict[int, tuple[int, int]]:
        schedule = self._schedule
        count, last = schedule.micro_batches, schedule.stages - 1
        pipes: dict[int, tuple[int, int]] = {}
        for op in schedule.ops():
            for number in op.micro_batches:
                _, parts = pipes.get(number % count, (0, 1))
                if op.stage == last and number < count:
                    pipes[number] = op.pipe, max(parts, op.parts)
        return pipes

    def choose(self, batch: Batch) -> WitnessUnit | None:
        """Return the next unit, the same on all workers; None: no replica has samples."""
        rows = self._workers.transport.gather(self._proposal(batch))
        replicas = [rows[ranks[0]] for ranks in self._workers.ranks]
        with_samples = [replica for replica, row in enumerate(replicas) if row[0] >= 0]
        if not with_samples:
            return None
        replica = with_samples[self._count % len(with_samples)]
        self._count += 1
        number, part, parts, samples, micro_batch = map(int, replicas[replica])
        unit, pipe = Unit(number, part, parts), self._pipes[number][0]
        span = unit.rows(samples)
        ranks, placement = self._workers.ranks[replica], self._schedule.placement
        return WitnessUnit(
            unit,
            SampleRows(micro_batch, samples, span.start, span.stop),
            replica,
            pipe,
            ranks[placement.worker(pipe, 0)],
            ranks[placement.worker(pipe, self._schedule.stages - 1)],
        )

    def _proposal(self, batch: Batch) -> tuple[float, ...]:
        numbers = [number for number, samples in enumerate(batch.samples) if samples]
        if not numbers:
            return -1.0, 0.0, 1.0, 0.0, 0.0
        number = numbers[0 if self.only_first else self._count % len(numbers)]
        parts = self._pipes[number][1] if self._schedule.workload.slices == 1 and batch.training else 1
        samples = batch.samples[number]
        units = [Unit(number, part, parts) for part in range(parts)]
        units = [unit for unit in units if unit.rows(samples).start < unit.rows(samples).stop]
        unit = units[0 if self.only_first else self._count % len(units)]
        return number, unit.part, unit.parts, samples, batch.rows.first + number

    def rank_of_stage(self, unit: WitnessUnit, stage: int) -> int:
        """Return the rank of the worker that holds a stage of a unit's pipe."""
        return self._workers.ranks[unit.replica][self._schedule.placement.worker(unit.pipe, stage)]
