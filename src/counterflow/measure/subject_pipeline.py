"""The subject of a measurement, its pipelines, and the sizes of micro-batches that they run with.

Invariant: a measurement refuses no layer that a pipeline with one copy of each stage trains.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.plurals import plural
from counterflow.execution import Batching, Execution
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.transport.spi import Hub
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes import dapple

from .stages.stage_record import StageCost

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a measurement; every process gets a copy of it.

    Attributes:
        layers: the model; on the meta device weights are made by ``reset_parameters``. Several pipelines are
            made of copies of it, and train these.
        loss: function of the model's output and targets that returns the mean loss over the samples.
        optimizer: function that makes an optimiser of parameters.
        batch: function that makes inputs and targets of a number of samples.
        seed: seed of weights and random draws.
        execution: how the pipeline executes it.
        batching: how mini-batches are cut.
        fills_meta: True if layers on the meta device are measured with any values.
    """

    layers: list[nn.Module]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[int], tuple[Any, Any]]
    seed: int
    execution: Execution
    batching: Batching = field(default_factory=Batching)
    fills_meta: bool = False


SubjectSource = Callable[[], Subject]
"""Function that makes a subject, which each worker calls; it can be pickled."""


def same(subject: Subject) -> Subject:
    """The subject itself: with ``partial``, the source of a subject that can be pickled."""
    return subject


def pipeline_of(subject: Subject, schedule: Schedule, transport: Transport | None = None) -> Pipeline:
    """A pipeline with copies of a subject's layers.

    Args:
        subject: the subject.
        schedule: the schedule.
        transport: the pipeline's transport; None: that of this worker.
    """
    pipeline = Pipeline(
        copy.deepcopy(subject.layers),
        copy.deepcopy(subject.loss) if isinstance(subject.loss, nn.Module) else subject.loss,
        schedule,
        optimizer=subject.optimizer,
        transport=transport,
        seed=subject.seed,
        execution=subject.execution,
        batching=subject.batching,
    )
    pipeline.weights.mutations.record()  # every worker has a replica, and these need not agree
    return pipeline


def pipeline_alone(subject: Subject, schedule: Schedule) -> Pipeline:
    """A pipeline as of ``pipeline_of`` in this worker alone, which is not compiled."""
    plain = replace(subject, execution=subject.execution.but(compile=False))
    return pipeline_of(plain, schedule, transport=Hub(1).transport(0, current_transport().device))


def with_copies(costs: Sequence[StageCost], pipeline: Pipeline) -> list[StageCost]:
    """Costs of stages that say which need one copy, as the steps of their pipeline have shown."""
    single = pipeline.weights.mutations.single_stages or ()
    return [
        replace(cost, profile=replace(cost.profile, one_copy=stage in single))
        for stage, cost in enumerate(costs)
    ]


def runnable_sizes(subject: Subject, sizes: Sequence[int]) -> list[int]:
    """The sizes of micro-batches without the smallest ones with which a subject raises an error.

    A batch norm needs two samples, for example. All workers call it, and each tries the sizes alone, so an
    error interrupts no communication. If the subject runs with no size, it raises the error of the smallest.

    Args:
        subject: the subject.
        sizes: samples of a micro-batch, ascending.
    """
    transport = current_transport()
    errors: list[Exception] = []
    for number, size in enumerate(sizes):
        error = _error_of_step(subject, size)
        if not all(transport.gather_objects(error is not None)):
            if error is not None:  # of this worker alone
                raise error
            return [*sizes[number:]]
        assert error is not None
        errors.append(error)
        if transport.rank == 0 and number + 1 < len(sizes):
            _LOG.warning("micro-batches of %s are not measured: %s", plural(size, "sample"), error)
    raise errors[0]


def _error_of_step(subject: Subject, size: int) -> Exception | None:
    try:
        pipeline = pipeline_alone(subject, dapple(1, 1))
        pipeline.step(*subject.batch(size))
        pipeline.close()
    except Exception as error:
        return error
    return None
