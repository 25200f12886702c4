"""The record of parallel dimensions, on small meshes: what is summed, counted, compared and sent by whom."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from counterflow.errors import ConfigError
from counterflow.runtime.mesh.parallel_dims import REPLICATED, Content, ParallelDims, WeightDims
from counterflow.runtime.mesh.rank_mesh import RankMesh
from counterflow.runtime.mesh.weight_dims import agreed_dims
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport


def dims_of(*shape: int, samples: tuple[int, ...] = (0,), **weights: WeightDims) -> ParallelDims:
    """A mesh of a shape whose ranks are in order."""
    return ParallelDims(RankMesh(shape, tuple(range(prod(shape)))), frozenset(samples), weights)


def counting(dims: ParallelDims, holders: list[int], weight: WeightDims) -> list[int]:
    """The ranks that count a weight in the norm."""
    return [
        rank
        for rank in dims.mesh.ranks
        if dims.mesh.coordinates(rank)[1] in holders and dims.counts_in_norm(rank, holders, weight)
    ]


SHARD, EXPERT = WeightDims(shards=frozenset({2})), WeightDims(experts=frozenset({2}))
GATHERED = WeightDims(shards=frozenset({2}), reduced=frozenset({2}))
"""A shard that ``fully_shard`` gathers, and whose gradient it sums."""


def test_without_further_dimensions_replicas_sum_and_the_first_counts() -> None:
    dims = dims_of(2, 2)
    assert dims.replica_ranks(3) == dims.same_samples == ((0, 1), (2, 3))
    assert dims.sum_groups([0]) == [(0, 2)]
    assert dims.sum_groups([0, 1]) == [(0, 1, 2, 3)], "a stage of two pipes"
    assert counting(dims, [1], REPLICATED) == [1]
    assert counting(dims, [1, 0], REPLICATED) == [1], "the first holder"
    assert [rank for rank in range(4) if dims.sends_state(rank, [1, 0])] == [1]
    assert [rank for rank in range(4) if dims.gathers_state(rank, [1, 0])] == [1]
    assert [rank for rank in range(4) if dims.reports_loss(rank)] == [0, 1, 2, 3]
    assert not dims.in_lockstep
    assert not dims.has_dtensors


def test_ranks_may_be_in_any_order() -> None:
    dims = ParallelDims(RankMesh((2, 2), (2, 0, 1, 3)))
    assert dims.replica_ranks(0) == ((2, 0), (1, 3))
    assert dims.sum_groups([0]) == [(1, 2)]
    assert dims.mesh.varying([2, 0]) == {1}
    with pytest.raises(ConfigError, match="rank 4 is not in the mesh"):
        dims.mesh.coordinates(4)


def test_tensor_parallelism_sums_nothing_over_its_positions() -> None:
    """Replicas 2, workers 1, positions 2, which have the same samples."""
    dims = dims_of(2, 1, 2)
    assert dims.replica_ranks(0) == ((0,), (2,))
    assert dims.replica_ranks(1) == ((1,), (3,))
    assert dims.same_samples == ((0, 1), (2, 3))
    assert [rank for rank in range(4) if dims.reports_loss(rank)] == [0, 2]
    for weight in (REPLICATED, SHARD):
        assert dims.sum_groups([0], weight) == [(0, 2), (1, 3)]
    assert counting(dims, [0], REPLICATED) == [0]
    assert counting(dims, [0], SHARD) == [0, 1], "each part once"
    assert dims.position(3, SHARD.distinct) == (1,)
    assert dims.position(3, REPLICATED.distinct) == (), "all ranks are compared"
    assert not dims.in_lockstep


def test_fully_shard_sums_over_its_dimension_itself() -> None:
    """Replicas 2, workers 1, positions 2, each with samples of its own."""
    dims = dims_of(2, 1, 2, samples=(0, 2))
    assert dims.replica_ranks(3) == dims.same_samples == ((0,), (1,), (2,), (3,))
    assert dims.in_lockstep
    assert dims.sum_dims() == {0, 2}
    assert dims.sum_groups([0]) == [(0, 1, 2, 3)], "what it does not shard"
    assert dims.sum_dims(GATHERED) == {0}
    assert dims.sum_groups([0], GATHERED) == [(0, 2), (1, 3)]
    assert counting(dims, [0], GATHERED) == [0, 1]
    assert [rank for rank in range(4) if dims.gathers_state(rank, [0])] == [0, 1], "parts of one tensor"
    assert [rank for rank in range(4) if dims.sends_state(rank, [0], GATHERED)] == [0]


def test_hybrid_sharding_sums_over_both_its_dimensions_itself() -> None:
    """``fully_shard`` over (replicate, shard): along the first the weight is the same, and summed by it."""
    hybrid = WeightDims(shards=frozenset({3}), reduced=frozenset({2, 3}))
    dims = dims_of(1, 1, 2, 2, samples=(0, 2, 3))
    assert dims.sum_groups([0], hybrid) == [(0,), (1,), (2,), (3,)]
    assert dims.sum_groups([0]) == [(0, 1, 2, 3)]
    assert counting(dims, [0], hybrid) == [0, 1]


def test_sharding_and_tensor_parallelism_together() -> None:
    """Dimension 2 has samples of its own, dimension 3 has not."""
    both = WeightDims(shards=frozenset({2, 3}), reduced=frozenset({2}))
    dims = dims_of(1, 1, 2, 2, samples=(0, 2))
    assert dims.replica_ranks(1) == ((1,), (3,))
    assert dims.same_samples == ((0, 1), (2, 3))
    assert dims.sum_groups([0]) == [(0, 2), (1, 3)]
    assert dims.sum_groups([0], both) == [(0,), (1,), (2,), (3,)]
    assert counting(dims, [0], both) == [0, 1, 2, 3]
    assert counting(dims, [0], WeightDims(shards=frozenset({3}))) == [0, 1]
    assert [rank for rank in range(4) if dims.reports_loss(rank)] == [0, 2]
    assert dims.position(2, both.distinct) == (1, 0)


def test_an_expert_is_summed_over_replicas_and_not_over_other_experts() -> None:
    """Replicas 2, workers 1, and 2 positions with samples and experts of their own."""
    dims = dims_of(2, 1, 2, samples=(0, 2), expert=EXPERT)
    assert dims.weight("expert").content(2) is Content.EXPERT
    assert dims.weight("router") is REPLICATED
    assert dims.sum_groups([0], dims.weight("expert")) == [(0, 2), (1, 3)]
    assert dims.sum_groups([0], dims.weight("router")) == [(0, 1, 2, 3)]
    assert counting(dims, [0], EXPERT) == [0, 1]
    assert counting(dims, [0], REPLICATED) == [0]
    assert [rank for rank in range(4) if dims.sends_state(rank, [0], EXPERT)] == [0, 1], "each expert"
    assert dims.position(1, EXPERT.distinct) != dims.position(0, EXPERT.distinct)
    assert dims.position(3, EXPERT.distinct) == dims.position(1, EXPERT.distinct)


def test_parts_of_a_sequence_are_summed_as_samples_are() -> None:
    """Context parallelism: weights are the same along a dimension whose positions have other tokens."""
    dims = dims_of(1, 2, 2, samples=(0, 2))
    assert dims.sum_groups([1]) == [(2, 3)]
    assert counting(dims, [1], REPLICATED) == [2]


# -- what workers agree on


def agreed(rows: list[list[tuple[str, torch.Tensor]]], shape: tuple[int, ...]) -> list[Any]:
    """The record on each rank, or its error."""
    mesh = RankMesh(shape, tuple(range(prod(shape))))

    def work() -> Any:
        transport = current_transport()
        try:
            return agreed_dims(mesh, rows[transport.rank], {}, transport, ("tp",))
        except ConfigError as error:
            return str(error)

    return launch(work, workers=len(rows), transport="local")


def test_plain_weights_are_not_in_the_record() -> None:
    weight = torch.zeros(2, 3)
    for dims in agreed([[("0.weight", weight)]] * 2, (1, 1, 2)):
        assert dims == dims_of(1, 1, 2)
        assert dims.weight("0.weight") is REPLICATED


def test_parts_of_other_shapes_on_copies_are_refused_on_all() -> None:
    rows = [[("0.weight", torch.zeros(2, 3))], [("0.weight", torch.zeros(1, 3))]]
    assert all(isinstance(dims, ParallelDims) for dims in agreed(rows, (1, 1, 2))), "other positions"
    first, second = agreed([*rows[:1] * 2, *rows[1:] * 2], (2, 1, 2))[:2]
    assert first == second
    assert first.startswith(
        "0.weight is sharded in several ways by the workers that hold it (on rank 2 as (1, 3)"
    )
