"""Gathers of what workers report about running mini-batches: their layout, and the comparison of copies.

Invariant: all workers ask for the same gathers in the same order (checked by ``program/rules.py``), and each
reports the same number of values. The consequences of the gathered values are not decided here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from counterflow.common.tensors import devices
from counterflow.common.tensors.unknown_values import values_unknown
from counterflow.errors import ConfigError

from ..mini_batch.losses import Losses, added
from ..mini_batch.step_report import WORKER_WIDTH, LossWeights, WorkerReport
from ..parameters.gradient_norms import OwnNorm, StageNorm
from ..transport.base import Gathering
from .step import Step, Workers


@dataclass(slots=True)
class MiniBatch:
    """Mini-batch in flight: its reports, as far as they were gathered.

    Attributes:
        step: its step.
        losses: this worker's of it.
        compared: whether the copies of stages are compared as it leaves them.
        updates: whether its gradients are updated with, and not kept for a later step's.
        scale: what its gradients are still to be multiplied by.
        norms: of its gradients, where these are used before the host knows it.
        used: what was done with a gradient that is not finite.
        digests: of what others hold too, as it leaves it.
        loss: of all workers.
        norm: of all workers' gradients; NaN: nothing was updated.
        metrics: of all workers.
        samples: of all replicas.
        skipped: whether nothing was updated because something was not finite.
        loss_scale: what its losses were multiplied by; None: they were not.
    """

    step: int
    losses: Losses
    compared: bool
    updates: bool
    scale: float = 1.0
    norms: list[OwnNorm | StageNorm] = field(default_factory=list)
    used: str = "nothing was updated with it"
    digests: list[devices.HostCopy] = field(default_factory=list)
    loss: float = math.nan
    norm: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    skipped: bool = False
    loss_scale: float | None = None

    def step_of(self, number: int, seconds: float) -> Step:
        """The mini-batch's report by step ``number``, which may be a later step and took ``seconds``."""
        return Step(
            number,
            self.loss,
            self.norm,
            self.samples,
            seconds,
            reports_step=self.step,
            metrics=self.metrics,
            skipped=self.skipped,
            loss_scale=self.loss_scale,
            losses=self.losses.by_micro_batch(),
        )


class GatherRequest(NamedTuple):
    """The mini-batches of which a gather asks: for their loss, their norm and their copies' digests."""

    loss: MiniBatch | None
    norm: MiniBatch | None
    copies: MiniBatch | None


class Gathered(NamedTuple):
    """Reports of all ranks: their parts, the digests of their copies, and the metrics they know."""

    parts: list[WorkerReport]
    digests: list[Sequence[float]]
    metrics: list[Sequence[float]]
    names: tuple[str, ...]

    @property
    def has_new_metrics(self) -> bool:
        """True if there are metrics whose names are new to some workers."""
        return any(columns[0] for columns in self.metrics)


class _Row(NamedTuple):
    requests: list[GatherRequest]
    compare: Callable[[list[Sequence[float]]], object]
    head: int
    names: tuple[str, ...]
    gathering: Gathering


Head = tuple[Sequence[float], Callable[[list[Sequence[float]]], object]]
"""A worker's report of its calls, and a function that checks the reports of all workers."""


class StepGathers:
    """Gathers one worker's reports of its steps with those of all others.

    Args:
        workers: place of this worker.
        digests: number of digests that a worker reports.
        together: number of mini-batches that one gather reports.
        square: this worker's part of a mini-batch's squared norm.
        head: this worker's report of its calls, sent with those mini-batches.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        digests: int,
        together: int,
        square: Callable[[MiniBatch], float],
        head: Callable[[GatherRequest], Head],
    ) -> None:
        self._workers, self._transport = workers, workers.transport
        self._digests, self._together, self._square, self._head = digests, together, square, head
        self._requests: list[GatherRequest] = []
        self._begun: deque[_Row] = deque()
        self._arrived: deque[Gathered] = deque()
        self._names: tuple[str, ...] = ()
        """Names of the metrics that all workers know."""

    def start(self, request: GatherRequest) -> None:
        """Start a gather as soon as enough mini-batches are requested."""
        self._requests.append(request)
        if len(self._requests) == self._together:
            self._start_gather()

    def _start_gather(self) -> None:
        head, compare = self._head(self._requests[0])
        row = [*head]
        for request in self._requests:
            row += self._report(request)
        gathering = self._transport.start_gather(row)
        self._begun.append(_Row(self._requests, compare, len(head), self._names, gathering))
        self._requests = []

    def _report(self, request: GatherRequest) -> list[float]:
        square = 0.0 if request.norm is None else self._square(request.norm)
        part, metrics = WorkerReport(0.0, square, None, LossWeights()), dict[str, float]()
        if request.loss is not None:
            part, metrics = request.loss.losses.report(square), request.loss.losses.metrics()
        if values_unknown():
            part = part._replace(loss=1.0, squared_norm=1.0, non_finite=None)
        of_steps = [digest.read() for digest in request.copies.digests] if request.copies is not None else []
        digests = map(sum, zip(*of_steps, strict=True)) if of_steps else [0.0] * self._digests
        unknown = float(bool(metrics.keys() - self._names))
        values = [x for name in self._names for x in (float(name in metrics), metrics.get(name, 0.0))]
        return [*part.pack(), *digests, unknown, *values]

    def wait(self) -> Gathered:
        """Reports of all workers on the next mini-batch asked for.

        Raises:
            ConfigError: the workers made different calls.
        """
        if not self._arrived:
            if not self._begun:
                self._start_gather()  # no further mini-batch would be reported with it
            self._receive(self._begun.popleft())
        return self._arrived.popleft()

    def _receive(self, begun: _Row) -> None:
        rows = begun.gathering.wait()
        begun.compare([row[: begun.head] for row in rows])
        width = WORKER_WIDTH + self._digests + 1 + 2 * len(begun.names)
        for index in range(len(begun.requests)):
            first = begun.head + width * index
            after_part = first + WORKER_WIDTH
            after_digests = after_part + self._digests
            self._arrived.append(
                Gathered(
                    parts=[WorkerReport.unpack(row[first:after_part]) for row in rows],
                    digests=[row[after_part:after_digests] for row in rows],
                    metrics=[row[after_digests : first + width] for row in rows],
                    names=begun.names,
                )
            )

    def metrics(
        self, gathered: Gathered, weighed: Sequence[LossWeights], losses: Losses, scale: float
    ) -> dict[str, float]:
        """The metrics of a mini-batch; ``losses`` are this worker's, the rest as for ``Workers.metrics``."""
        if gathered.has_new_metrics:
            metrics = self._workers.metrics(weighed, losses, scale)
            self._names += tuple(name for name in metrics if name not in self._names)
            return metrics
        if not gathered.names:
            return {}
        named = {name: 1 + 2 * at for at, name in enumerate(gathered.names)}
        return {
            name: scale * added(columns[at + 1] for columns in gathered.metrics)
            for name, at in named.items()
            if any(columns[at] for columns in gathered.metrics)
        }


def refuse_other_steps(rows: list[Sequence[float]]) -> None:
    """Refuse reports of workers that made different calls.

    Raises:
        ConfigError: the calls differ.
    """
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise ConfigError(
                f"rank {rank} reported step {row[1]:g} in call {row[0]:g} since the pipeline was empty, "
                f"rank 0 of step {rows[0][1]:g} in call {rows[0][0]:g}; all workers make the same calls "
                "in the same order"
            )
