"""Report of a run's mesh, known before any rank starts: coordinates and samples of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

from counterflow.common.json_models import Part, Result, describe

from .config import RunConfig
from .job import Job
from .stage_mesh import degrees_of
from .training_report import WeightsShown


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of a rank in the mesh.

    Attributes:
        rank: rank of the process.
        place: coordinate by dimension of the mesh.
        stages: stages that it holds a part of.
        samples: number of its share of the samples, and number of shares.
        sequence: number of its share of each sequence, and number of shares.
    """

    rank: int
    place: Mapping[str, int]
    stages: tuple[int, ...]
    samples: tuple[int, int]
    sequence: tuple[int, int]


class RankShown(Part):
    """A rank of a mesh."""

    rank: Annotated[int, describe("rank of the process")]
    place: Annotated[dict[str, int], describe("coordinate by dimension of the mesh")]
    stages: Annotated[list[int], describe("stages that it holds a part of")]
    samples: Annotated[list[int], describe("number of its share of the samples, and number of shares")]
    sequence: Annotated[list[int], describe("number of its share of each sequence, and number of shares")]


class MeshShown(Result):
    """`counterflow mesh`."""

    dims: Annotated[dict[str, int], describe("names and sizes of the mesh's dimensions")]
    ranks: list[RankShown]
    weights: Annotated[
        list[WeightsShown], describe("groups of weights that are divided alike; empty without [mesh]")
    ]


def mesh_dims(config: RunConfig) -> dict[str, int]:
    """Names and sizes of a run's mesh, from the outermost dimension on."""
    workers = config.build_schedule().workers
    return {"replica": config.pipeline.replicas, "worker": workers, **degrees_of(config).sizes}


def rank_places(job: Job) -> list[RankPlace]:
    """Places of a run's ranks, in ascending order of ranks."""
    dims = mesh_dims(job.config)
    count = job.about.processes
    ranks = job.config.plan.devices_of(count) or tuple(range(count))
    places = []
    for rank, coordinates in zip(ranks, product(*map(range, dims.values())), strict=True):
        place = dict(zip(dims, coordinates, strict=True))
        stages = {stage for _, stage in job.schedule.placement.stages_on(place["worker"])}
        samples = [name for name in dims if name == "replica" or name.startswith("dp_shard")]
        contexts = [name for name in dims if name.startswith("cp")]
        places.append(
            RankPlace(
                rank,
                place,
                tuple(sorted(stages)),
                _share(place, dims, samples),
                _share(place, dims, contexts),
            )
        )
    return sorted(places, key=lambda place: place.rank)


def mesh_report(job: Job) -> MeshShown:
    """Report of a run's mesh.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    rehearsal = job.rehearsal()
    return MeshShown.of(
        dims=mesh_dims(job.config),
        ranks=[RankShown.of(**asdict(place)) for place in rank_places(job)],
        weights=[] if rehearsal is None else [asdict(row) for row in rehearsal.table.rows],
    )


def _share(place: Mapping[str, int], dims: Mapping[str, int], names: Sequence[str]) -> tuple[int, int]:
    number, count = 0, 1
    for name in names:
        number, count = number * dims[name] + place[name], count * dims[name]
    return number, count
