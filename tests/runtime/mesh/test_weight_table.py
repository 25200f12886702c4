"""The table of weights, on small meshes."""

from __future__ import annotations

from counterflow.runtime.mesh.parallel_dims import ParallelDims, WeightDims
from counterflow.runtime.mesh.rank_mesh import RankMesh
from counterflow.runtime.mesh.weight_table import weight_table

EP = frozenset({2})


def test_experts_other_weights_and_tied_ones_of_two_replicas() -> None:
    """Replicas 2, workers 2, experts 2; both stages share a table."""
    weights = {
        "0.up": WeightDims(experts=EP, placements="[Shard(dim=0)]"),
        "0.norm": WeightDims(shards=EP, reduced=EP, placements="[Shard(dim=0)]"),
    }
    dims = ParallelDims(RankMesh((2, 2, 2), tuple(range(8))), frozenset({0, 2}), weights)
    names = [[("0.up", "0.up"), ("0.norm", "0.norm"), ("0.table", "0.table")], [("1.table", "0.table")]]
    table = weight_table(dims, ("ep",), names, [[0], [1]])
    experts, norm, tied = table.rows
    assert experts.contents == {"replica": "replicated", "ep": "expert"}
    assert experts.summed_by_engine == ((0, 4), (1, 5))
    assert experts.counted_by == (0, 1)
    assert (norm.summed_by_fsdp, norm.summed_by_engine) == (("ep",), ((0, 4), (1, 5)))
    assert (tied.stages, tied.ranks, tied.counted_by) == ((0, 1), tuple(range(8)), (0,))
    assert tied.summed_by_engine == (tuple(range(8)),)
    assert str(table).splitlines()[:5] == [
        "mesh: replica 2 x worker 2 x ep 2",
        "stage 0: 0.up",
        "  on ranks 0, 1, 4, 5: other experts along ep",
        "  gradients: summed over ranks 0, 4 and over ranks 1, 5",
        "  norm: counts the part of ranks 0, 1",
    ]


def test_one_process_sums_nothing() -> None:
    table = weight_table(
        ParallelDims(RankMesh((1, 1), (0,))), (), [[("a", "a"), ("b", "b"), ("c", "c")]], [[0]]
    )
    assert str(table).splitlines() == [
        "mesh: replica 1 x worker 1",
        "stage 0: a, b and 1 more",
        "  on rank 0: the same on all",
        "  gradients: complete on each rank, summed over none",
        "  norm: counts the part of rank 0",
    ]
