"""What came of a step, and how workers find out together.

Invariant: every worker computes it from the same numbers in the same order, so that it is bitwise the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

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

    def loss_and_norm(
        self,
        rows: Sequence[Sequence[float]],
        updates: int,
        not_finite: Callable[[], tuple[int, str] | None],
    ) -> tuple[float, float]:
        """Loss and gradient norm of a mini-batch of all replicas.

        Args:
            rows: of every rank its part of the loss, of the squared norm, and its first micro-batch whose
                loss is not finite or -1.
            updates: that were made before, for the message.
            not_finite: stage and name of this worker's first parameter whose gradient is not finite.

        Raises:
            WorkerError: the loss or a gradient is not finite.
        """
        loss = math.fsum(row[0] for row in rows)
        if not math.isfinite(loss):
            rank = next(rank for rank, row in enumerate(rows) if row[2] >= 0)
            replica, worker = place(self.ranks, rank)
            group = f" of replica {replica}" if self.replicas > 1 else ""
            where = f"micro-batch {rows[rank][2]:g} on worker {worker}{group}"
            made = "1 step" if updates == 1 else f"{updates} steps"
            raise WorkerError(f"after {made} the loss is {loss:g} ({where})")
        squares = [rows[rank][1] for rank in self.ranks[0]]
        if all(map(math.isfinite, squares)):
            return loss, math.sqrt(math.fsum(squares))
        # Everybody has the same rows, so everybody asks.
        found = cast("list[tuple[int, str] | None]", self.transport.gather_objects(not_finite()))
        known = sorted(each for each in found if each is not None)
        what = f"the gradient of {known[0][1]} (stage {known[0][0]}) is" if known else "the gradient norm is"
        raise WorkerError(
            f"step {updates}: {what} not finite, though the loss is {loss:g}; nothing was updated with it"
        )


def place(ranks: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, int]:
    """Replica and worker of a rank.

    Raises:
        ConfigError: it has none.
    """
    for replica, row in enumerate(ranks):
        if rank in row:
            return replica, row.index(rank)
    raise ConfigError(f"rank {rank} is not in the mesh")
