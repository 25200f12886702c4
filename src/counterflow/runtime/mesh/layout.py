"""Which rank is which worker of which replica, and where it stands along further dimensions of the mesh.

Invariant: at every position along the further dimensions stands a whole pipeline, and messages stay among the
workers of one position. Positions along a *split* dimension (one that FSDP shards over) have samples of their
own and count as replicas; those along the others are given the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

REPLICA, WORKER = 0, 1
"""The first two dimensions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all ranks.

    >>> layout = Layout((1, 2, 2), (0, 1, 2, 3))
    >>> layout.grid(3), layout.alike
    (((1, 3),), ((0, 1, 2, 3),))
    >>> split = Layout((1, 2, 2), (0, 1, 2, 3), frozenset({2}))
    >>> split.grid(3), split.alike
    (((0, 2), (1, 3)), ((0, 2), (1, 3)))
    >>> layout.copies([0]), split.copies([0]), split.copies([0], apart={2})
    ([(0,), (1,)], [(0, 1)], [(0,), (1,)])

    Attributes:
        shape: replicas, workers, and the lengths of the further dimensions.
        ranks: of all places, row by row.
        split: dimensions whose positions have samples of their own.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    split: frozenset[int] = frozenset()
    _places: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = product(*map(range, self.shape))
        object.__setattr__(self, "_places", dict(zip(self.ranks, places, strict=True)))

    @property
    def further(self) -> range:
        """The numbers of the further dimensions."""
        return range(2, len(self.shape))

    def place(self, rank: int) -> tuple[int, ...]:
        """A rank's place along all dimensions.

        Raises:
            ConfigError: it has none.
        """
        found = self._places.get(rank)
        if found is None:
            raise ConfigError(f"rank {rank} is not in the mesh")
        return found

    def grid(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """``ranks[replica][worker]`` of the pipelines that a rank's messages and sums may go to."""
        same = [dim for dim in self.further if dim not in self.split]
        mine = [self.place(rank)[dim] for dim in same]
        its = [other for other, place in self._places.items() if [place[dim] for dim in same] == mine]
        return self._by_replica(its)

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Ranks with equal samples, by replica."""
        return self._by_replica(self.ranks)

    def _by_replica(self, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            place = self._places[rank]
            found.setdefault((place[REPLICA], *(place[dim] for dim in sorted(self.split))), []).append(rank)
        return tuple(tuple(found[key]) for key in sorted(found))

    def copies(self, workers: Iterable[int], apart: Collection[int] = ()) -> list[tuple[int, ...]]:
        """The ranks that hold copies of the same, for every position.

        Args:
            workers: who holds it in a pipeline.
            apart: split dimensions along which each position has something else.
        """
        held = set(workers)
        fixed = [dim for dim in self.further if dim not in self.split or dim in apart]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self._places.items():
            if place[WORKER] in held:
                found.setdefault(tuple(place[dim] for dim in fixed), []).append(rank)
        return [tuple(sorted(found[key])) for key in sorted(found)]

    def is_first(self, rank: int, dims: Iterable[int]) -> bool:
        """Whether a rank stands first along some dimensions."""
        place = self.place(rank)
        return not any(place[dim] for dim in dims)

    def varying(self, ranks: Iterable[int]) -> frozenset[int]:
        """The dimensions along which some ranks stand apart."""
        places = [self.place(rank) for rank in ranks]
        return frozenset(d for d in range(len(self.shape)) if len({place[d] for place in places}) > 1)


Mesh = DeviceMesh | Sequence[Sequence[int]]
"""A mesh with the dimensions (replica, worker, …), or the ranks of each replica's workers."""


def layout_of(rank: int, world_size: int, schedule: Schedule, mesh: Mesh | None) -> Layout:
    """The places of all ranks; without a mesh, rank = replica * workers + worker.

    Raises:
        ConfigError: the workers there are cannot be divided into groups of the schedule's.
    """
    workers = schedule.workers
    if mesh is None:
        if world_size % workers:
            raise ConfigError(
                f"{world_size} workers were started, and {schedule} needs {workers} a replica; "
                f"start {workers}, or a multiple of it"
            )
        return Layout((world_size // workers, workers), tuple(range(world_size)))
    shape, ranks = _read(mesh)
    if len(shape) < 2 or shape[WORKER] != workers:
        raise ConfigError(
            f"the mesh has shape {shape}; {schedule} needs (replicas, {workers}), and further dimensions "
            "after these"
        )
    if math.prod(shape) != world_size:
        raise ConfigError(f"the mesh has {math.prod(shape)} ranks, and {world_size} workers were started")
    layout = Layout(shape, ranks)
    layout.place(rank)
    return layout


def _read(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and ranks of a mesh, row by row.

    >>> _read([[2, 0], [1, 3]])
    ((2, 2), (2, 0, 1, 3))
    """
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.mesh.shape), tuple(map(int, mesh.mesh.flatten().tolist()))
    rows = [tuple(row) for row in mesh]
    ranks = tuple(rank for row in rows for rank in row)
    if len({len(row) for row in rows}) != 1 or set(ranks) != set(range(len(ranks))):
        raise ConfigError(f"mesh = {mesh}: give each replica as many ranks, and each rank from 0 on once")
    return (len(rows), len(rows[0])), ranks
