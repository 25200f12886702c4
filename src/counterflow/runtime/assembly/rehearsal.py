"""Division of a model over a mesh without its ranks: torch's process group of fake ranks, and meta tensors.

Invariant: stages are parallelized by the function that the run calls, so the table is that of the run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from counterflow.common.tensors.dtensors import local

from ..mesh.mesh_degrees import MeshDegrees
from ..mesh.parallel import (
    StageModule,
    context_dims,
    expert_dims,
    further_mesh,
    parallelize_stages,
    same_token_dims,
)
from ..mesh.rank_mesh import RankMesh
from ..mesh.weight_dims import agreed_dims
from ..mesh.weight_table import WeightTable, weight_table
from .partition import Model, partition_model

__all__ = ["MeshDegrees", "Rehearsal", "rehearse"]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of a stage on one rank.

    Attributes:
        weights: weights that the rank holds; the optimizer's states are of these.
        gradients: gradients while a step runs; those that ``fully_shard`` shards are whole until they are
            summed.
    """

    weights: int
    gradients: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Division of a model over a mesh.

    Attributes:
        table: weights, their holders and sums.
        stages: bytes of each stage on its first rank.
    """

    table: WeightTable
    stages: tuple[StageBytes, ...]


class _LoneTransport:
    rank = 0
    shares_process = False

    @staticmethod
    def gather_objects(value: object) -> list[object]:
        return [value]


def rehearse(model: Model, degrees: MeshDegrees, replicas: int, ranks: Any = None, **cut: Any) -> Rehearsal:
    """Divide a model on the meta device as the ranks of a run will.

    Args:
        model: the model or its layers; left as it is.
        degrees: degrees of parallelism beside the pipeline's.
        replicas: copies of the pipeline.
        ranks: rank by replica, worker and position, row by row; None: in ascending order.
        cut: arguments ``schedule``, ``list_layers`` and ``cuts`` of a pipeline.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    with torch.device("meta"):
        parts = partition_model(copy.deepcopy(model), None, costs=None, **cut)
    workers = parts.schedule.workers
    count = replicas * workers * degrees.positions
    transport = cast("Any", _LoneTransport())
    with _fake_ranks(count):
        mesh = degrees.device_mesh(replicas, workers, ranks=ranks)
        rank_mesh = RankMesh(tuple(mesh.mesh.shape), tuple(map(int, mesh.mesh.flatten().tolist())))
        stages = [
            StageModule(number, [replace(layer, module=layer.module.to("meta")) for layer in layers])
            for number, layers in enumerate(parts.layers)
        ]
        for stage in stages:
            stage.stays_on_meta = True
        further = further_mesh(mesh, degrees, transport)
        reduced = parallelize_stages(stages, degrees, further, rank_mesh)
        firsts = [dict(pairs) for pairs in parts.names]
        tensors = [
            (firsts[number][layer.names[name]], parameter)
            for number, layers in enumerate(parts.layers)
            for layer in layers
            for name, parameter in layer.module.named_parameters(remove_duplicate=False)
        ]
        names = further.mesh_dim_names or ()
        dims = agreed_dims(
            rank_mesh,
            tensors,
            reduced,
            transport,
            names,
            experts=expert_dims(stages, rank_mesh),
            contexts=context_dims(stages, rank_mesh),
            same_tokens=same_token_dims(stages, rank_mesh),
        )
        table = weight_table(dims, names, parts.names, parts.holders)
        sizes = []
        for stage in stages:
            weights = {id(parameter): local(parameter).nbytes for parameter in stage.parameters()}
            shards = {key: math.prod(rank_mesh.shape[dim] for dim in reduced.get(key, ())) for key in weights}
            gradients = sum(size * shards[key] for key, size in weights.items())
            sizes.append(StageBytes(sum(weights.values()), gradients))
    return Rehearsal(table, tuple(sizes))


@contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - slow

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
