"""Results of steps, which all workers of all replicas compute together.

Invariant: every worker computes it from the same numbers in the same order, so that it is bitwise the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from counterflow.errors import ConfigError, WorkerError

from ..mini_batch.losses import Losses, added, refuse_mixed, refuse_other_counts
from ..mini_batch.step_report import LossWeights, Normaliser, WorkerReport
from ..transport.base import Transport


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one step, the same on every worker but for ``seconds``, ``losses`` and ``outputs``.

    Attributes:
        number: of the step, from 0.
        loss: mean over the samples of the mini-batch of all replicas.
        grad_norm: global norm of the gradients before clipping, each stage counted once.
        samples: of the mini-batch of all replicas.
        seconds: from the call to its return, on this worker.
        reports_step: the step whose loss and norm these are: this one, or, without a barrier or in an
            asynchronous scheme, an earlier one, whose backwards have ended by now. None if there is none yet;
            loss and norm are NaN then.
        metrics: means, or sums over the weights, that the loss function gave with the loss.
        skipped: whether nothing was updated, for the loss or a gradient was not finite.
        loss_scale: what the losses were multiplied by before their backwards; loss and norm are without it.
            None: they were not.
        losses: by micro-batch of this worker's replica the mean loss, on workers that made it: those with the
            last stage, of copies of it each its own; empty on others. Of ``reports_step``, as ``loss``.
        outputs: with ``outputs=True``, what the last layer gave for the replica's samples, in their order; on
            workers with the last stage, None on others.
    """

    number: int
    loss: float
    grad_norm: float
    samples: int
    seconds: float
    reports_step: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    loss_scale: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluating a mini-batch, the same on every worker but for ``outputs``.

    Attributes:
        loss: mean over the samples of the mini-batch of all replicas.
        metrics: as ``Step.metrics``.
        outputs: as ``Step.outputs``.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class Workers:
    """Place of this worker among all workers of all replicas.

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

    def loss(self, parts: Sequence[WorkerReport], updates: int, scale: float) -> float:
        """The loss of a mini-batch of all replicas.

        Args:
            parts: every rank's.
            updates: that were made before, for the message.
            scale: what the sum is multiplied by.

        Raises:
            WorkerError: the loss is not finite.
        """
        loss = added(part.loss for part in parts) * scale
        if not math.isfinite(loss):
            rank = next(rank for rank, part in enumerate(parts) if part.non_finite is not None)
            replica, worker = replica_and_worker(self.ranks, rank)
            group = f" of replica {replica}" if self.replicas > 1 else ""
            where = f"micro-batch {parts[rank].non_finite} on worker {worker}{group}"
            raise WorkerError(f"in step {updates} the loss is {loss:g} ({where})")
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
            updates: that were made before, for the message.
            not_finite: stage and name of this worker's first parameter whose gradient is not finite.
            updated: what was done with such a gradient, for the message.

        Raises:
            WorkerError: a gradient is not finite.
        """
        squares = list(squared)
        if all(map(math.isfinite, squares)):
            return math.sqrt(math.fsum(squares))
        # Everybody has the same rows, so everybody asks.
        rows = cast("list[tuple[int, str] | None]", self.transport.gather_objects(not_finite()))
        known = sorted(row for row in rows if row is not None)
        what = f"the gradient of {known[0][1]} (stage {known[0][0]}) is" if known else "the gradient norm is"
        raise WorkerError(f"step {updates}: {what} not finite, though the loss is {loss:g}; {updated}")

    def weight(self, parts: Sequence[LossWeights], step: int) -> tuple[float, Normaliser]:
        """Sum of the weights of a mini-batch's losses, and the kind of things that they count.

        Args:
            parts: what every rank's weigh.
            step: the step's number.

        Raises:
            ConfigError: parts of the losses are divided by what counts in each micro-batch, and that differs;
                or some losses count one thing, some another.
            WorkerError: nothing in the mini-batch counts.
        """
        refuse_other_counts(parts)
        counted = refuse_mixed(parts)
        total = math.fsum(part.weight for part in parts)
        if not (total > 0 and math.isfinite(total)):
            raise WorkerError(f"step {step}: the weights of all losses of the mini-batch sum to {total:g}")
        return total, counted

    def metrics(self, parts: Sequence[LossWeights], losses: Losses, scale: float) -> dict[str, float]:
        """The metrics of a mini-batch; ``parts`` as for ``weight``, ``scale`` what sums are multiplied by."""
        if not any(part.has_metrics for part in parts):  # all have the same, so all ask or nobody does
            return {}
        rows = cast("list[dict[str, float]]", self.transport.gather_objects(losses.metrics()))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: scale * added(row.get(name, 0.0) for row in rows) for name in names}


def replica_and_worker(ranks: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, int]:
    """Replica and worker of a rank.

    Raises:
        ConfigError: it has none.
    """
    for replica, row in enumerate(ranks):
        if rank in row:
            return replica, row.index(rank)
    raise ConfigError(f"rank {rank} is not in the mesh")
