"""Optimiser state sharded over the holders of a stage (ZeRO stage 1): owners, and the messages that follow.

It follows the runtime (``runtime/parameters/sharded_updates.py``): whole parameters have owners, by
``owners``; when a step ends each worker visits the groups of ranks that hold the same stages, in the order of
their ranks, and in each group the owners send the weights that they updated, one after another, in pieces.

Invariant: owners, updates and messages do not depend on orders, sync modes or recomputation. If a profile
does not contain the sizes of parameters, the bytes of a stage are divided evenly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial

import numpy as np

from counterflow.schedule.owners import PIECE_BYTES, owners, pieces
from counterflow.schedule.placement import Placement

from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile import Profile
from ..search.node_orders import Ints, Runs
from .device_placement import Arrangement, Holding, devices, holding
from .stages import StageCosts


@dataclass(frozen=True, slots=True)
class ShardedState:
    """The state that each worker owns, in the replica with the most.

    Attributes:
        owned: by replica, by worker: bytes of the trained weights whose optimiser state it holds. One row for
            all replicas if they are equal.
        most: by worker: the maximum over all replicas.
        spared: by worker: bytes of optimiser state saved by sharding.
        updating: by worker: bytes needed in addition to its state while it updates, or sends and receives.
        seconds: time to send updated weights when a step ends.
    """

    owned: tuple[tuple[float, ...], ...]
    most: tuple[float, ...]
    spared: tuple[float, ...]
    updating: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained parameter: its bytes, the layers that contain it, and the additional memory of its update."""

    size: float
    layers: tuple[int, ...]
    update_peak: float


def parameters_of(model: Model, profile: Profile) -> list[Parameter] | None:
    """All trained parameters in the model's order, a shared one at its first layer; None: unknown.

    If several parameters of a layer have the bytes of a shared one, the first is taken to be it.
    """
    rows: list[list[Parameter]] = []
    for number, kind in enumerate(model.layers):
        layer = profile.layer(kind)
        sizes = layer.parameter_bytes
        if layer.trained_bytes and not sizes:
            return None
        peak_bytes = (sum(sizes) if profile.update_together else max(sizes)) if sizes else 0.0
        peak_share = layer.update_peak_bytes / peak_bytes if peak_bytes else 0.0
        rows.append([Parameter(size, (number,), size * peak_share) for size in sizes])
    for tie in model.ties:
        if not tie.trained:
            continue
        first, *later = tie.layers
        for number in (first, *later):
            row = rows[number]
            shared = [
                i
                for i, parameter in enumerate(row)
                if parameter.size == tie.size_bytes and parameter.layers == (number,)
            ]
            if not shared:
                return None
            if number == first:
                row[shared[0]] = Parameter(tie.size_bytes, tie.layers, row[shared[0]].update_peak)
            else:
                del row[shared[0]]
    return [parameter for row in rows for parameter in row]


@dataclass(frozen=True)
class _Group:
    workers: tuple[int, ...]
    on: Holding

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all replicas."""
        return self.on.ranks

    @cached_property
    def nodes(self) -> Ints:
        """Nodes that contain any of the ranks."""
        return np.array(self.on.nodes, dtype=np.int64)


class Sharding:
    """Ranks that hold the same stages on a cluster, for all cuts and sizes.

    Args:
        cluster: the cluster with its links.
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: which devices they are on.
        nodes: the order of the nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        placement: Placement,
        replicas: int,
        arrangement: Arrangement,
        nodes: Runs = (),
    ) -> None:
        self.placement, self._nodes = placement, nodes
        self._where = cluster, placement, replicas, arrangement
        self._groups: dict[tuple[int, ...], _Group] = {}
        """By workers."""
        self._of_stages: dict[tuple[int, ...], _Group] = {}

    @cached_property
    def _ranks(self) -> Ints:
        cluster, placement, replicas, arrangement = self._where
        rows = devices(placement, replicas, arrangement, cluster, self._nodes)
        return np.array(rows, dtype=np.int64)

    def of(self, stages: Sequence[int]) -> _Group:
        """The ranks that hold any of some stages."""
        key = tuple(stages)
        if key not in self._of_stages:
            self._of_stages[key] = self._holding(key)
        return self._of_stages[key]

    def _holding(self, stages: Sequence[int]) -> _Group:
        workers = tuple(sorted({worker for stage in stages for worker in _holders(self.placement)[stage]}))
        if workers not in self._groups:
            self._groups[workers] = _Group(workers, holding(*self._where, workers, nodes=self._nodes))
        return self._groups[workers]

    def state(
        self, stages: StageCosts, parameters: Sequence[Parameter] | None, states: float, *, together: bool
    ) -> ShardedState:
        """The state that is owned, and the cost of sending updates.

        Args:
            stages: costs of the placement's stages.
            parameters: result of ``parameters_of``.
            states: bytes of optimiser state for each byte of trained weights.
            together: True if the optimiser updates all weights of a stage at once.
        """
        if parameters is None:
            return self._even(stages, states, together=together)
        return self._exact(stages.cuts, parameters, states, together=together)

    def _exact(
        self, cuts: Sequence[int], parameters: Sequence[Parameter], states: float, *, together: bool
    ) -> ShardedState:
        on = [
            tuple(sorted({bisect_right(cuts, layer) for layer in parameter.layers}))
            for parameter in parameters
        ]
        groups = [self.of(holder_stages) for holder_stages in on]
        owner = owners(
            (parameter.size, group.ranks) for parameter, group in zip(parameters, groups, strict=True)
        )
        owned, held_bytes = np.zeros(self._ranks.max() + 1), np.zeros(self.placement.workers)
        sent: dict[tuple[int, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        needs: dict[tuple[int, int], list[float]] = defaultdict(list)
        """Memory that the updates of parameters need, by their owner and stage."""
        for parameter, holder_stages, group, rank in zip(parameters, on, groups, owner, strict=True):
            owned[rank] += parameter.size
            held_bytes[list(group.workers)] += parameter.size
            sent[group.workers][rank].append(parameter.size)
            needs[rank, holder_stages[0]].append(parameter.update_peak)
        updating = np.zeros(self._ranks.max() + 1)
        for (rank, _), peaks in needs.items():
            updating[rank] = max(updating[rank], (sum if together else max)(peaks))
        rows: list[tuple[_Group, float, int]] = []
        for workers, by_owner in sent.items():
            group = self._groups[workers]
            if len(group.ranks) < 2:
                continue
            parts = [piece for sizes in by_owner.values() for piece in pieces(sizes)]
            rows.append((group, sum(map(sum, parts)), len(parts)))
            moving = max(sum(piece) + max(piece) for piece in parts)  # all, and a copy of one at a time
            updating[list(group.ranks)] = np.maximum(updating[list(group.ranks)], moving)
        by_replica = owned[self._ranks]
        most = by_replica.max(axis=0)
        return ShardedState(
            tuple(map(tuple, by_replica.tolist())),
            tuple(most.tolist()),
            tuple((states * (held_bytes - most)).tolist()),
            tuple(updating[self._ranks].max(axis=0).tolist()),
            self._seconds(rows),
        )

    def _even(self, stages: StageCosts, states: float, *, together: bool) -> ShardedState:
        count = self.placement.workers
        owned, held_bytes, updating = [0.0] * count, [0.0] * count, [0.0] * count
        sizes: dict[tuple[int, ...], float] = defaultdict(float)
        for shared_stages, size in (
            *(((stage,), size) for stage, size in enumerate(stages.summed)),
            *((tie.stages, tie.trained_bytes) for tie in stages.ties),
        ):
            group = self.of(shared_stages)
            share = size / len(group.ranks)
            sizes[group.workers] += size
            for worker in group.workers:
                owned[worker] += share
                held_bytes[worker] += size
                needs = (
                    stages.update_peaks[shared_stages[0]]
                    if stages.update_peaks and len(shared_stages) == 1
                    else 0.0
                )
                updating[worker] = max(updating[worker], needs / len(group.ranks) if together else needs)
        rows = []
        for workers, size in sizes.items():
            group = self._groups[workers]
            if len(group.ranks) < 2 or not size:
                continue
            rank_bytes = size / len(group.ranks)
            rows.append((group, size, len(group.ranks) * math.ceil(rank_bytes / PIECE_BYTES)))
            for worker in workers:
                updating[worker] = max(updating[worker], min(rank_bytes, PIECE_BYTES))
        spared = tuple(
            states * (all_ - owned_bytes) for all_, owned_bytes in zip(held_bytes, owned, strict=True)
        )
        return ShardedState((tuple(owned),), tuple(owned), spared, tuple(updating), self._seconds(rows))

    def _seconds(self, rows: Sequence[tuple[_Group, float, int]]) -> float:
        free = [0.0] * self.placement.workers
        crossing = np.zeros(1 + max((max(group.on.nodes) for group, _, _ in rows), default=0))
        for group, size, count in sorted(rows, key=lambda row: row[0].ranks):
            # A worker is in one group at a time, and a node's single way out carries all.
            done = max(free[w] for w in group.workers) + group.on.sends.seconds(size, count)
            for worker in group.workers:
                free[worker] = done
            crossing[group.nodes] += group.on.sends.crossing_seconds_per_byte * size
        return max(*free, float(crossing.max()))


class ShardedStates:
    """Sharded optimiser state of a model's stages on a cluster; equal ones are computed once.

    Args:
        model: what is trained.
        profile: costs of its layers.
        cluster: the cluster with its links.
    """

    def __init__(self, model: Model, profile: Profile, cluster: Cluster) -> None:
        self._parameters = parameters_of(model, profile)
        self._states, self._update_together = model.optimizer_states, profile.update_together
        self._sharding = cache(partial(Sharding, cluster))
        self._known: dict[object, ShardedState] = {}

    def state(
        self, stages: StageCosts, placement: Placement, replicas: int, arrangement: Arrangement, nodes: Runs
    ) -> ShardedState:
        """Owners of optimiser state and the cost of sending updates; see ``Sharding``."""
        where = placement, replicas, arrangement, nodes
        key = stages.cuts, stages.samples, where
        if key not in self._known:
            self._known[key] = self._sharding(*where).state(
                stages, self._parameters, self._states, together=self._update_together
            )
        return self._known[key]


@lru_cache(maxsize=256)
def _holders(placement: Placement) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(sorted({worker for _, worker in placement.copies(stage)})) for stage in range(placement.stages)
    )


@lru_cache(maxsize=1024)
def several_hold(placement: Placement, replicas: int) -> bool:
    """True if any stage is held by several workers, of all replicas."""
    return replicas > 1 or any(len(workers) > 1 for workers in _holders(placement))
