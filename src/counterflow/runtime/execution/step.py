"""What came of a step, and how workers find out together.

Invariant: every worker computes it from the same numbers in the same order, so that it is bitwise the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from counterflow.errors import ConfigError, WorkerError

from ..mini_batch.losses import Losses, added, refuse_other_counts
from ..transport import Transport

COLUMNS = 10
"""Of loss and norm: loss, squared norm, what is not finite, and what ``Losses.weighed`` gives."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one step, the same on every worker but for ``seconds``.

    Attributes:
        number: of the step, from 0.
        loss: mean over the samples of the mini-batch of all replicas.
        grad_norm: global norm of the gradients before clipping, each stage counted once.
        samples: of the mini-batch of all replicas.
        seconds: from the call to its return, on this worker.
        about: the step whose loss and norm these are: this one, or, without a barrier or a flush, an earlier
            one, whose backwards have ended by now. None while there is none yet: loss and norm are NaN.
        metrics: means, or sums over the weights, that the loss function gave with the loss.
        skipped: whether nothing was updated, for the loss or a gradient was not finite.
        outputs: with ``outputs=True``, what the last layer gave for the replica's samples, in their order; on
            workers with the last stage, None on others.
    """

    number: int
    loss: float
    grad_norm: float
    samples: int
    seconds: float
    about: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What all workers know of a mini-batch: its step, loss, gradient norm and so on; see ``Step``."""

    step: int
    loss: float
    grad_norm: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False


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
        loss = self.loss([(row[0], row[2]) for row in rows], updates)
        return loss, self.norm([row[1] for row in rows], loss, updates, not_finite)

    def loss(self, rows: Sequence[tuple[float, float]], updates: int) -> float:
        """The loss of a mini-batch of all replicas; ``rows`` and the rest as for ``loss_and_norm``."""
        loss = added(row[0] for row in rows)
        if not math.isfinite(loss):
            rank = next(rank for rank, row in enumerate(rows) if row[1] >= 0)
            replica, worker = place(self.ranks, rank)
            group = f" of replica {replica}" if self.replicas > 1 else ""
            where = f"micro-batch {rows[rank][1]:g} on worker {worker}{group}"
            made = "1 step" if updates == 1 else f"{updates} steps"
            raise WorkerError(f"after {made} the loss is {loss:g} ({where})")
        return loss

    def norm(
        self,
        squared: Sequence[float],
        loss: float,
        updates: int,
        not_finite: Callable[[], tuple[int, str] | None],
        *,
        updated: str = "nothing was updated with it",
    ) -> float:
        """The gradient norm of a mini-batch of all replicas.

        Args:
            squared: of every rank its part of the squared norm.
            loss: the mini-batch's, for the message.
            updates: as for ``loss_and_norm``.
            not_finite: likewise.
            updated: what was done with such a gradient, for the message.

        Raises:
            WorkerError: a gradient is not finite.
        """
        squares = list(squared)
        if all(map(math.isfinite, squares)):
            return math.sqrt(math.fsum(squares))
        # Everybody has the same rows, so everybody asks.
        found = cast("list[tuple[int, str] | None]", self.transport.gather_objects(not_finite()))
        known = sorted(each for each in found if each is not None)
        what = f"the gradient of {known[0][1]} (stage {known[0][0]}) is" if known else "the gradient norm is"
        raise WorkerError(f"step {updates}: {what} not finite, though the loss is {loss:g}; {updated}")

    def weight(self, rows: Sequence[Sequence[float]], step: int) -> float | None:
        """The weights of all losses of a mini-batch; None if they have none.

        Args:
            rows: of every rank what ``Losses.weighed`` gives.
            step: the step's number.

        Raises:
            ConfigError: parts of the losses are divided by what counts in each micro-batch, and that differs.
            WorkerError: nothing in the mini-batch counts.
        """
        refuse_other_counts(rows)
        if not any(row[1] for row in rows):
            return None
        found = math.fsum(row[0] for row in rows)
        if not (found > 0 and math.isfinite(found)):
            raise WorkerError(f"step {step}: the weights of all losses of the mini-batch sum to {found:g}")
        return found

    def metrics(self, rows: Sequence[Sequence[float]], losses: Losses, scale: float) -> dict[str, float]:
        """The metrics of a mini-batch; ``rows`` as for ``weight``, ``scale`` what sums are multiplied by."""
        if not any(row[2] for row in rows):  # everybody has the same rows, so everybody asks or nobody
            return {}
        parts = cast("list[dict[str, float]]", self.transport.gather_objects(losses.metrics()))
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: scale * added(part.get(name, 0.0) for part in parts) for name in names}


def place(ranks: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, int]:
    """Replica and worker of a rank.

    Raises:
        ConfigError: it has none.
    """
    for replica, row in enumerate(ranks):
        if rank in row:
            return replica, row.index(rank)
    raise ConfigError(f"rank {rank} is not in the mesh")
