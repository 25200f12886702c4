"""The table ``[mesh]`` of a config in a run: degrees, samples of a rank, and the table of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterflow.api.contexts import share_sequence
from counterflow.common.trees import mapped
from counterflow.runtime.assembly.rehearsal import MeshDegrees, Rehearsal, rehearse
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule.ir import Schedule

from .config import RunConfig
from .source import ModelAndData


def degrees_of(config: RunConfig) -> MeshDegrees:
    """Degrees of parallelism inside of a stage."""
    return MeshDegrees(**config.mesh.values())


def mesh_options(config: RunConfig, workers: int, device: str) -> dict[str, Any]:
    """Arguments ``mesh`` and ``parallelize`` of a run's pipeline.

    Args:
        config: config of the run.
        workers: workers of a replica.
        device: type of the ranks' devices.
    """
    replicas, degrees = config.pipeline.replicas, degrees_of(config)
    if degrees.positions == 1:
        return {"mesh": config.plan.ranks(workers, replicas)}
    ranks = config.plan.devices_of(workers * replicas * degrees.positions)
    return degrees.options(replicas, workers, device=device, ranks=ranks)


def samples_of(pipeline: Pipeline, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Share of a rank of its samples' sequences; all of them without contexts.

    Args:
        pipeline: the rank's.
        batch: inputs and targets of the samples, with whole sequences.
    """
    if pipeline.context.count == 1:
        return batch
    shares: tuple[Any, Any] = mapped(lambda tensor: share_sequence(tensor, pipeline.context), batch)
    return shares


def rehearsal_of(
    config: RunConfig, schedule: Schedule, bundle: ModelAndData, cuts: Sequence[int]
) -> Rehearsal | None:
    """Division of a run's weights over its mesh, found without its ranks; None: stages are not divided.

    Args:
        config: config of the run.
        schedule: schedule of the run.
        bundle: the model.
        cuts: the layers with which stages 1, 2, ... begin.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    degrees, replicas = degrees_of(config), config.pipeline.replicas
    if degrees.positions == 1:
        return None
    return rehearse(
        bundle.model,
        degrees,
        replicas,
        config.plan.devices_of(schedule.workers * replicas * degrees.positions),
        schedule=schedule,
        list_layers=bundle.list_layers,
        cuts=tuple(cuts),
    )
