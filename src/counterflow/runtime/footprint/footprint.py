"""Record of a pipeline's memory by worker and part, with its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from counterflow.common.number_texts import byte_size

from .ledger import Part


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Bytes of a worker when they are most, in a step after the first ones.

    Attributes:
        worker: number of the worker in its replica.
        weights: all copies and versions of weights, and buffers.
        gradients: gradients, and buffers in which they are summed.
        optimizer: states of the optimizer.
        activations: tensors that exist between ops: saved for backwards, or waiting for another stage.
        messages: buffers in which messages are received.
        workspace: what an op or an update allocates and frees while it runs, kernels included.
    """

    worker: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    messages: int
    workspace: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, part.value) for part in Part)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a pipeline's workers, of one replica; printing it gives a table.

    Attributes:
        schedule: the schedule in words.
        workers: bytes by worker.
        available_bytes: memory that a worker can use; None: unknown.
        notes: what was not counted, in sentences.
    """

    schedule: str
    workers: tuple[WorkerMemory, ...]
    available_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Bytes of the worker that needs most."""
        return max(worker.total for worker in self.workers)

    @property
    def fits(self) -> bool | None:
        """True if every worker's memory suffices; None: the available memory is unknown."""
        return None if self.available_bytes is None else self.peak_bytes <= self.available_bytes

    @property
    def shortage(self) -> str | None:
        """Sentence about the worker that needs most, if that is more than it can use."""
        if self.fits is not False:
            return None
        worker = max(self.workers, key=lambda worker: worker.total)
        assert self.available_bytes is not None
        return shortage(worker.worker, "in a step", worker.total, self.available_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Fields as JSON has them, with the total of each worker."""
        record = asdict(self)
        record["workers"] = [asdict(worker) | {"total": worker.total} for worker in self.workers]
        return record | {"peak_bytes": self.peak_bytes, "fits": self.fits}

    def __str__(self) -> str:
        """Text of the table, in 80 columns."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = [*(part.value for part in Part), "total"]
        rows = [tuple(getattr(worker, name) for name in names) for worker in self.workers]
        yield f"memory of {self.schedule}"
        yield _line("worker", names, names)
        for first, last, row in _runs(rows):
            yield _line(f"{first}" if first == last else f"{first}–{last}", map(_cell, row), names)
        if self.available_bytes is not None:
            verdict = "fits" if self.fits else "does not fit"
            yield f"{byte_size(self.available_bytes)} available to a worker: {verdict}"
        yield from self.notes


def _line(label: str, cells: Iterable[str], names: Sequence[str]) -> str:
    return f"{label:<7}" + "".join(
        f"{cell:>{max(len(name), 9) + 1}}" for cell, name in zip(cells, names, strict=True)
    )


def _cell(size: int) -> str:
    return byte_size(size, digits=3)


def _runs(rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, Sequence[int]]]:
    first = 0
    for number in range(1, len(rows) + 1):
        if number == len(rows) or rows[number] != rows[first]:
            yield first, number - 1, rows[first]
            first = number


def shortage(worker: int, moment: str, needed: float, available: float) -> str:
    """Sentence about a worker whose memory does not suffice.

    >>> shortage(3, "in a step", 3 * 2**30, 2**30)
    'worker 3 needs 3 GiB in a step, and 1 GiB are available to it'
    """
    return (
        f"worker {worker} needs {byte_size(needed)} {moment}, and {byte_size(available)} are available to it"
    )


def worker_memory(worker: int, parts: Mapping[Part, int]) -> WorkerMemory:
    """Record of a worker from its bytes by part."""
    return WorkerMemory(worker, **{part.value: parts[part] for part in Part})
