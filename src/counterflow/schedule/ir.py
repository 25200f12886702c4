"""The schedule: which op runs on which worker, in which order. Plain, frozen data.

Invariant: a ``Schedule`` is only a placement and one order a worker; it knows no time, rank or device.
It need not be correct: the checker (``check.py``) decides that, so that edited files can be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .placement import Placement

OptionValue = int | str


class OpKind(Enum):
    """What an op computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Op:
    """A forward or a backward of one stage on one micro-batch, a group of them, or a part of one.

    ``micro_batches`` are the micro-batches computed together (more than one in a doubled forward).
    ``part`` of ``parts`` says which share of the micro-batch a divided backward computes.
    ``version`` is the number of updates the stage's weights have seen (0 in every synchronous scheme:
    the weights at the start of the mini-batch). All numbers count from 0.

    >>> str(Op(OpKind.FORWARD, stage=7, micro_batches=(3,)))
    'F3.7'
    >>> str(Op(OpKind.BACKWARD, stage=0, micro_batches=(4,), pipe=1, part=1, parts=2, version=3))
    'B4.0p1:1/2v3'
    """

    kind: OpKind
    stage: int
    micro_batches: tuple[int, ...]
    pipe: int = 0
    part: int = 0
    parts: int = 1
    version: int = 0

    def __str__(self) -> str:
        batches = self.micro_batches
        text = str(batches[0]) if len(batches) == 1 else f"({','.join(map(str, batches))})"
        text = f"{self.kind.value}{text}.{self.stage}"
        if self.pipe:
            text += f"p{self.pipe}"
        if self.parts != 1:
            text += f":{self.part}/{self.parts}"
        if self.version:
            text += f"v{self.version}"
        return text

    @property
    def load(self) -> float:
        """Work in micro-batches: 2 for a doubled forward, 0.5 for a half backward."""
        return len(self.micro_batches) / self.parts


@dataclass(frozen=True, slots=True)
class Schedule:
    """A placement and one order a worker.

    ``micro_batches`` is the number of micro-batches of one period (one update of every stage);
    a synchronous schedule is one period with a flush at its end, an asynchronous one plays ``periods``
    of them without a flush between. Micro-batch ``m`` belongs to period ``m // micro_batches``.
    ``steady`` gives, for an asynchronous schedule, each worker's slice ``order[start:stop]`` that
    consists of whole periods after the warm-up and before the drain.
    """

    scheme: str
    options: tuple[tuple[str, OptionValue], ...]
    placement: Placement
    orders: tuple[tuple[Op, ...], ...]
    micro_batches: int
    periods: int = 1
    synchronous: bool = True
    steady: tuple[tuple[int, int], ...] | None = None

    @property
    def workers(self) -> int:
        """Number of workers of one pipeline group."""
        return self.placement.workers

    @property
    def stages(self) -> int:
        """Number of stages the model is cut into."""
        return self.placement.stages

    @property
    def pipes(self) -> int:
        """Number of passes through all the stages, each along a placement of its own."""
        return self.placement.pipes

    @property
    def total_micro_batches(self) -> int:
        """Micro-batches of all periods together."""
        return self.micro_batches * self.periods

    def period_of(self, op: Op) -> int:
        """The period whose gradients ``op`` adds to, or whose samples it reads."""
        return op.micro_batches[0] // self.micro_batches

    def ops(self) -> Iterator[Op]:
        """Every op, worker by worker in its order."""
        for order in self.orders:
            yield from order

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.scheme}({shown})"
