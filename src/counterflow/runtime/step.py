"""What came of a step, and how workers find out together.

Invariant: every worker computes it from the same numbers in the same order, so that it is bitwise the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.errors import ConfigError, WorkerError

from .transport import Transport


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one step, the same on every worker but for ``seconds``.

    Attributes:
        number: of the step, from 0.
        loss: mean over the samples of the mini-batch of all replicas.
        grad_norm: global norm of the gradients before clipping, each stage counted once.
        samples: of the mini-batch of all replicas.
        seconds: from the call to its return, on this worker.
        about: the step whose loss and norm these are: this one, or, in schemes without a flush, an earlier
            one, whose backwards have ended by now. None while there is none yet: loss and norm are NaN.
    """

    number: int
    loss: float
    grad_norm: float
    samples: int
    seconds: float
    about: int | None


@dataclass(frozen=True, slots=True)
class Told:
    """What all workers know of a mini-batch: its step, loss, gradient norm and samples; see ``Step``."""

    step: int
    loss: float
    grad_norm: float
    samples: int


@dataclass(frozen=True, slots=True)
class Workers:
    """Where this worker is among all.

    Attributes:
        ranks: ``ranks[replica][worker]``.
        replica: this one's.
        worker: this one's number in its group.
        transport: how to reach the others.
    """

    ranks: tuple[tuple[int, ...], ...]
    replica: int
    worker: int
    transport: Transport

    @property
    def replicas(self) -> int:
        """Pipeline groups."""
        return len(self.ranks)

    def loss_and_norm(self, rows: Sequence[Sequence[float]], updates: int) -> tuple[float, float]:
        """Loss and gradient norm of a mini-batch of all replicas.

        Args:
            rows: of every rank its part of the loss, of the squared norm, and its first micro-batch whose
                loss is not finite or -1.
            updates: that were made before, for the message.

        Raises:
            WorkerError: the loss is not finite.
        """
        loss = math.fsum(row[0] for row in rows)
        if not math.isfinite(loss):
            rank = next(rank for rank, row in enumerate(rows) if row[2] >= 0)
            replica, worker = place(self.ranks, rank)
            group = f" of replica {replica}" if self.replicas > 1 else ""
            where = f"micro-batch {rows[rank][2]:g} on worker {worker}{group}"
            made = "1 step" if updates == 1 else f"{updates} steps"
            raise WorkerError(f"after {made} the loss is {loss:g} ({where})")
        return loss, math.sqrt(math.fsum(rows[rank][1] for rank in self.ranks[0]))


def place(ranks: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, int]:
    """Replica and worker of a rank.

    Raises:
        ConfigError: it has none.
    """
    for replica, row in enumerate(ranks):
        if rank in row:
            return replica, row.index(rank)
    raise ConfigError(f"rank {rank} is not in the mesh")
