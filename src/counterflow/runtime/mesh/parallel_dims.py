"""The one record of parallel dimensions: which positions of the mesh have samples of their own, and what each
holds of a weight.

Gradient sums, norms, digests, states and checkpoints read it, and no tensor or mesh:

* A weight's gradient is summed over every dimension with samples along which the weight is replicated, and
  over none along which a position holds another part of it (a shard) or another expert. What ``fully_shard``
  sums itself is not summed again.
* The global norm counts each distinct part once: at the first position along the dimensions where the weight
  is replicated.
* Digests of two ranks are compared if they stand at equal positions along the dimensions where parts differ.

Along the worker dimension positions hold other stages: the holders of a stage are an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from counterflow.api.contexts import Share

from .rank_mesh import REPLICA, WORKER, RankMesh


class Content(Enum):
    """Content of a weight at a position, compared with the first position along a dimension."""

    REPLICATED = "replicated"
    SHARD = "shard"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class WeightDims:
    """Content of one weight along the dimensions of the mesh.

    >>> sharded = WeightDims(shards=frozenset({2}))
    >>> sharded.content(2), sharded.content(3)
    (<Content.SHARD: 'shard'>, <Content.REPLICATED: 'replicated'>)

    Attributes:
        shards: dimensions along which each position holds another part of the weight.
        experts: dimensions along which each position holds the weight of another expert.
        reduced: dimensions over which ``fully_shard`` sums the weight's gradient: once a step
            (``FsdpGradientSum``), or in each backward with ``sums_each_backward``.
        placements: torch's description of a DTensor; None: a plain tensor.
    """

    shards: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()
    placements: str | None = None

    def content(self, dim: int) -> Content:
        """Content of the weight at the positions along a dimension."""
        if dim in self.experts:
            return Content.EXPERT
        return Content.SHARD if dim in self.shards else Content.REPLICATED

    @property
    def distinct(self) -> tuple[int, ...]:
        """Dimensions along which positions hold something else, ascending."""
        return tuple(sorted(self.shards | self.experts))


REPLICATED = WeightDims()
"""A plain weight that is the same at all positions."""


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Dimensions of the mesh, equal on all ranks.

    Replicas 1, workers 2, and a dimension of two positions: of tensor parallelism, and of ``fully_shard``.

    >>> mesh = RankMesh((1, 2, 2), (0, 1, 2, 3))
    >>> tensor_parallel = ParallelDims(mesh)
    >>> tensor_parallel.replica_ranks(3), tensor_parallel.same_samples
    (((1, 3),), ((0, 1, 2, 3),))
    >>> data_parallel = ParallelDims(mesh, samples=frozenset({0, 2}))
    >>> data_parallel.replica_ranks(3), data_parallel.same_samples
    (((0, 2), (1, 3)), ((0, 2), (1, 3)))
    >>> tensor_parallel.sum_groups([0]), data_parallel.sum_groups([0])
    ([(0,), (1,)], [(0, 1)])
    >>> data_parallel.sum_groups([0], WeightDims(experts=frozenset({2})))
    [(0,), (1,)]

    Attributes:
        mesh: coordinates of all ranks.
        samples: dimensions whose positions have samples of their own, or other tokens of them; the replicas
            among them.
        contexts: of these, the dimensions whose positions share the sequences of their samples.
        weights: by first name, the weights of all stages that are not plain and the same at all positions.
    """

    mesh: RankMesh
    samples: frozenset[int] = frozenset({REPLICA})
    weights: Mapping[str, WeightDims] = field(default_factory=dict)
    contexts: frozenset[int] = frozenset()

    @property
    def further(self) -> range:
        """Numbers of the dimensions after (replica, worker)."""
        return self.mesh.further

    @property
    def in_lockstep(self) -> bool:
        """True if positions with samples of their own communicate in a stage, so that all run each unit."""
        return self.samples > {REPLICA}

    @property
    def has_dtensors(self) -> bool:
        """True if some weight of the model is a DTensor."""
        return any(weight.placements is not None for weight in self.weights.values())

    @property
    def has_experts(self) -> bool:
        """True if positions hold the weights of other experts."""
        return any(weight.experts for weight in self.weights.values())

    def weight(self, name: str) -> WeightDims:
        """Content of a weight, by its first name in the model."""
        return self.weights.get(name, REPLICATED)

    # -- samples

    def replica_ranks(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """``ranks[replica][worker]`` of the pipelines at a rank's position along dimensions without samples.

        Positions along further dimensions with samples count as replicas.
        """
        fixed = self._without_samples
        position = self.mesh.along(rank, fixed)
        ranks = [each for each in self.mesh.ranks if self.mesh.along(each, fixed) == position]
        return tuple(self.mesh.groups(self.samples, ranks))

    @property
    def same_samples(self) -> tuple[tuple[int, ...], ...]:
        """Ranks with equal samples, by replica."""
        return tuple(self.mesh.groups(self.samples))

    @property
    def same_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the replicas, as of ``same_samples``, whose positions share sequences; empty: none do.

        >>> mesh = RankMesh((2, 1, 2), (0, 1, 2, 3))
        >>> ParallelDims(mesh, frozenset({0, 2}), contexts=frozenset({2})).same_sequences
        ((0, 1), (2, 3))
        """
        groups: dict[int, list[int]] = {}
        for replica, ranks in enumerate(self.same_samples if self.contexts else ()):
            groups.setdefault(self.share(ranks[0], self.samples - self.contexts).number, []).append(replica)
        return tuple(map(tuple, groups.values()))

    @property
    def divides_features(self) -> bool:
        """True if positions with the same samples have parts of a weight: tensor parallelism."""
        return any(weight.shards - self.samples for weight in self.weights.values())

    def share(self, rank: int, dims: Collection[int]) -> Share:
        """Number of a rank among the positions along some dimensions, and their number.

        >>> dims = ParallelDims(RankMesh((2, 1, 2), (0, 1, 2, 3)), frozenset({0, 2}), contexts=frozenset({2}))
        >>> dims.share(3, dims.samples - dims.contexts), dims.share(2, dims.contexts)
        (Share(number=1, count=2, lengths=(1,)), Share(number=0, count=2, lengths=(1,)))
        """
        number, count = 0, 1
        for dim in sorted(dims):
            size = self.mesh.shape[dim]
            number, count = number * size + self.mesh.coordinates(rank)[dim], count * size
        return Share(number, count)

    def reports_loss(self, rank: int) -> bool:
        """True for the first of the ranks that hold the same stage and have equal samples."""
        return self.mesh.is_first(rank, self._without_samples)

    @property
    def _without_samples(self) -> list[int]:
        return [dim for dim in self.further if dim not in self.samples]

    # -- gradients

    def sum_dims(self, weight: WeightDims = REPLICATED) -> frozenset[int]:
        """Dimensions over which the engine sums a weight's gradient."""
        replicated = {dim for dim in self.samples if weight.content(dim) is Content.REPLICATED}
        return frozenset(replicated - weight.reduced)

    def sum_groups(self, holders: Collection[int], weight: WeightDims = REPLICATED) -> list[tuple[int, ...]]:
        """Groups of ranks that sum a weight's gradient, of all positions, each ascending.

        Args:
            holders: workers of a pipeline that hold the weight.
            weight: content of the weight along the dimensions.
        """
        summed = self.sum_dims(weight)
        ranks = [rank for rank in self.mesh.ranks if self.mesh.coordinates(rank)[WORKER] in holders]
        fixed = [dim for dim in (REPLICA, *self.further) if dim not in summed]
        return [tuple(sorted(group)) for group in self.mesh.groups(fixed, ranks)]

    def counts_in_norm(self, rank: int, holders: Sequence[int], weight: WeightDims) -> bool:
        """True if a rank counts its part of a weight in the global gradient norm: one rank for each part.

        Args:
            rank: a holder of the weight.
            holders: workers of a pipeline that hold the weight; the first one counts it.
            weight: content of the weight along the dimensions.
        """
        return self._is_first_holder(rank, holders, without=weight.distinct)

    # -- states

    def position(self, rank: int, dims: Sequence[int]) -> tuple[int, ...]:
        """Coordinates of a rank along the distinct dimensions of a weight: equal where the part is equal."""
        return self.mesh.along(rank, dims)

    def gathers_state(self, rank: int, holders: Sequence[int]) -> bool:
        """True if a rank has a part of the tensors of a stage that are sent from its first holder.

        All positions of the first replica: together they have the whole tensors.
        """
        return self._is_first_holder(rank, holders, without=self.further)

    def sends_state(self, rank: int, holders: Sequence[int], weight: WeightDims = REPLICATED) -> bool:
        """True if a rank sends the whole tensors of a stage, or its expert's, to the ranks that need them."""
        return self._is_first_holder(rank, holders, without=weight.experts)

    def _is_first_holder(self, rank: int, holders: Sequence[int], *, without: Collection[int]) -> bool:
        dims = [dim for dim in (REPLICA, *self.further) if dim not in without]
        return self.mesh.coordinates(rank)[WORKER] == holders[0] and self.mesh.is_first(rank, dims)
