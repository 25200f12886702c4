"""Memory of a run's step: counted before any worker starts, and predicted before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.counted_memory import (
    Memory,
    available_bytes_here,
    available_bytes_on,
    memory,
    shortage,
)
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, simulate

from .job import Job
from .stage_mesh import degrees_of

_LOG = logging.getLogger(__name__)

_MOST_LAYER_RUNS = 4096
"""Maximum forwards of layers in the steps of a count: about a minute."""

_COUNTED_STEPS = 3


def available_bytes(job: Job) -> int | None:
    """Memory that a worker can use; None: unknown, as this machine has no GPU and the run needs some."""
    workers = job.about.workers_here
    if job.about.on_cpu:
        return available_bytes_on(torch.device("cpu"), workers)
    return available_bytes_here(workers) if torch.cuda.is_available() else None


def step_memory(job: Job, available: int | None) -> Memory | str:
    """Memory of each worker in a step, or the reason why it is not counted.

    The model is unfit for training afterwards, if its code saves tensors in global variables.

    Args:
        job: the run.
        available: memory that a worker can use; None: unknown.
    """
    config, replicas = job.config, job.config.pipeline.replicas
    if degrees_of(config).positions > 1:
        return "the mesh divides the weights"
    if len(job.layers) * job.schedule.micro_batches * replicas * _COUNTED_STEPS > _MOST_LAYER_RUNS:
        return "there are too many layers and micro-batches to count quickly; cf.memory counts them"
    inputs, targets = job.bundle.batches.batch(0, config.train.samples)
    try:
        result = memory(
            job.bundle.model,
            job.bundle.loss,
            job.schedule,
            inputs,
            targets,
            optimizer=job.optimizer,
            replicas=replicas,
            list_layers=job.bundle.list_layers,
            cuts=job.cuts,
            available_bytes=available or 0,
            execution=config.pipeline,
            count_memory_steps=0,
        )
    except (ConfigError, WorkerError) as error:
        return str(error).partition("\n")[0]
    return replace(result, available_bytes=available)


def least_shortage(least: Sequence[int], available: int | None) -> str | None:
    """Sentence about the worker whose weights, gradients and states alone are more than it can use.

    Args:
        least: their bytes by worker.
        available: memory that a worker can use; None: unknown.
    """
    worker = max(range(len(least)), key=least.__getitem__)
    if available is None or least[worker] <= available:
        return None
    return shortage(worker, "at least", least[worker], available)


def warn_of_memory(pipeline: Pipeline, schedule: Schedule, costs: Costs, workers: int) -> None:
    """Warn before the first step if this worker's memory does not suffice for what it was measured to save.

    ``Pipeline.step`` warns itself, unless the layers save other tensors than they do alone.

    Args:
        pipeline: the worker's.
        schedule: its schedule.
        costs: measured costs of the stages.
        workers: workers on this machine.
    """
    execution, memory_uses = pipeline.execution, simulate(schedule, costs).memory
    if memory_uses is None or not (execution.compile or execution.autocast or pipeline.dims.further):
        return
    saved, available = memory_uses[pipeline.worker].peak, available_bytes_on(pipeline.device, workers)
    if available is not None and saved > available:
        _LOG.warning(
            "%s; take fewer samples in a micro-batch, recomputation, or more stages",
            shortage(pipeline.worker, "more in its first step, saved for backward", saved, available),
        )
