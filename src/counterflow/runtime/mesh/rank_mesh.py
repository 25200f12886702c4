"""Ranks of a device mesh: the coordinates of each along (replica, worker, further dimensions).

Invariant: at every position along the further dimensions there is a complete pipeline, and messages stay
among the workers of one position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

REPLICA, WORKER = 0, 1
"""The first two dimensions."""


@dataclass(frozen=True, slots=True)
class RankMesh:
    """Coordinates of all ranks.

    >>> mesh = RankMesh((1, 2, 2), (0, 1, 2, 3))
    >>> mesh.coordinates(2), mesh.varying([0, 2]), mesh.groups([2])
    ((0, 1, 0), frozenset({1}), [(0, 2), (1, 3)])

    Attributes:
        shape: replicas, workers, and the lengths of the further dimensions.
        ranks: ranks in row-major order of their coordinates.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    _coordinates: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        coordinates = product(*map(range, self.shape))
        object.__setattr__(self, "_coordinates", dict(zip(self.ranks, coordinates, strict=True)))

    @property
    def further(self) -> range:
        """Numbers of the dimensions after (replica, worker)."""
        return range(2, len(self.shape))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank along all dimensions.

        Raises:
            ConfigError: the rank is not in the mesh.
        """
        coordinates = self._coordinates.get(rank)
        if coordinates is None:
            raise ConfigError(f"rank {rank} is not in the mesh")
        return coordinates

    def along(self, rank: int, dims: Iterable[int]) -> tuple[int, ...]:
        """Coordinates of a rank along some dimensions, in ascending order of these."""
        coordinates = self.coordinates(rank)
        return tuple(coordinates[dim] for dim in sorted(dims))

    def is_first(self, rank: int, dims: Iterable[int]) -> bool:
        """True if a rank has coordinate 0 along all of some dimensions."""
        return not any(self.along(rank, dims))

    def varying(self, ranks: Iterable[int]) -> frozenset[int]:
        """Dimensions along which the coordinates of some ranks differ."""
        columns = zip(*(self.coordinates(rank) for rank in ranks), strict=True)
        return frozenset(dim for dim, column in enumerate(columns) if len({*column}) > 1)

    def groups(self, dims: Iterable[int], ranks: Iterable[int] | None = None) -> list[tuple[int, ...]]:
        """Ranks with equal coordinates along some dimensions, in ascending order of these coordinates.

        Args:
            dims: dimensions that are compared.
            ranks: ranks that are grouped, in the order that a group has; None: all.
        """
        dims = [*dims]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks if ranks is None else ranks:
            groups.setdefault(self.along(rank, dims), []).append(rank)
        return [tuple(groups[key]) for key in sorted(groups)]


Mesh = DeviceMesh | Sequence[Sequence[int]]
"""A mesh with the dimensions (replica, worker, …), or the ranks of each replica's workers."""


def rank_mesh(rank: int, world_size: int, schedule: Schedule, mesh: Mesh | None) -> RankMesh:
    """Coordinates of all ranks; without a mesh, rank = replica * workers + worker.

    Raises:
        ConfigError: the workers of this run cannot be divided into groups of the schedule's size.
    """
    workers = schedule.workers
    if mesh is None:
        if world_size % workers:
            started = (
                f"{world_size} workers were started, and" if world_size > 1 else "1 worker was started, and"
            )
            raise ConfigError(
                f"{started} {schedule} needs {workers} a replica; start {workers}, or a multiple of it"
            )
        return RankMesh((world_size // workers, workers), tuple(range(world_size)))
    shape, ranks = _shape_and_ranks(mesh)
    if len(shape) < 2 or shape[WORKER] != workers:
        raise ConfigError(
            f"the mesh has shape {shape}; {schedule} needs (replicas, {workers}), and further dimensions "
            "after these"
        )
    if math.prod(shape) != world_size:
        raise ConfigError(
            f"the mesh has {math.prod(shape)} ranks, and {plural(world_size, 'worker')} "
            f"{'was' if world_size == 1 else 'were'} started"
        )
    coordinates = RankMesh(shape, ranks)
    coordinates.coordinates(rank)
    return coordinates


def _shape_and_ranks(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and ranks of a mesh, in row-major order.

    >>> _shape_and_ranks([[2, 0], [1, 3]])
    ((2, 2), (2, 0, 1, 3))
    """
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.mesh.shape), tuple(map(int, mesh.mesh.flatten().tolist()))
    rows = [tuple(row) for row in mesh]
    ranks = tuple(rank for row in rows for rank in row)
    if len({len(row) for row in rows}) != 1 or set(ranks) != set(range(len(ranks))):
        raise ConfigError(f"mesh = {mesh}: give each replica as many ranks, and each rank from 0 on once")
    return (len(rows), len(rows[0])), ranks
