"""Memory of a run's step, counted before any worker starts."""

from __future__ import annotations

from counterflow.runtime.counted_memory import memory
from counterflow.runtime.footprint.footprint import Memory

from .job import Job
from .stage_mesh import degrees_of

_MOST_LAYER_RUNS = 4096
"""Maximum forwards of layers in the counted steps: about a minute."""

_COUNTED_STEPS = 3


def step_memory(job: Job) -> Memory | None:
    """Memory of each worker in a step; None: the mesh divides weights, or the count would take minutes.

    Args:
        job: the run.

    Raises:
        ConfigError: the model's memory cannot be counted, with the reason.
    """
    config = job.config
    replicas = config.pipeline.replicas
    if degrees_of(config).positions > 1:
        return None
    if len(job.layers) * job.schedule.micro_batches * replicas * _COUNTED_STEPS > _MOST_LAYER_RUNS:
        return None
    inputs, targets = job.bundle.batches.batch(0, config.train.samples)
    return memory(
        job.bundle.model,
        job.bundle.loss,
        job.schedule,
        inputs,
        targets,
        optimizer=job.optimizer,
        replicas=replicas,
        list_layers=job.bundle.list_layers,
        cuts=job.cuts,
        execution=config.pipeline,
    )
