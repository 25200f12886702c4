"""Who holds what, by hand: groups of ranks, own weights and tied ones, and who counts what in the norm."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

import pytest
import torch
from torch import nn

from counterflow.errors import ConfigError
from counterflow.runtime.mesh.parallel_dims import ParallelDims, WeightDims
from counterflow.runtime.mesh.rank_mesh import RankMesh
from counterflow.runtime.parameters.gradients import GradientGroup
from counterflow.runtime.parameters.parameter_placement import ParameterPlacement
from counterflow.runtime.transport.base import Group
from counterflow.runtime.transport.local import Hub, LocalTransport

from .by_hand import names_of, stage_of


class Noting(LocalTransport):
    """Notes the ranks of the groups that it makes, in order."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(Hub(world_size), rank, torch.device("cpu"))
        self.asked: list[tuple[int, ...]] = []

    def group(self, ranks: Sequence[int]) -> Group:
        self.asked.append(tuple(ranks))
        return super().group(ranks)


def placement_of(
    modules: list[list[nn.Module]],
    holders: list[list[int]],
    *,
    dims: ParallelDims,
    rank: int = 0,
    weights: dict[str, WeightDims] | None = None,
) -> tuple[ParameterPlacement, list[tuple[int, ...]]]:
    """What a rank holds of stages with some modules each, and for which ranks it made groups, in order."""
    first, stages = 0, []
    for number, its in enumerate(modules):
        stages.append(stage_of(number, its, first))
        first += len(its)
    worker = dims.mesh.coordinates(rank)[1]
    held = {number: stage for number, stage in enumerate(stages) if worker in holders[number]}
    transport = Noting(rank, len(dims.mesh.ranks))
    dims = replace(dims, weights=weights or {})
    return ParameterPlacement(held, names_of(*stages), holders, dims, transport), transport.asked


def dims_of(*shape: int, samples: Collection[int] = ()) -> ParallelDims:
    """A mesh of a shape, with ranks in order; further dimensions with samples of their own."""
    return ParallelDims(RankMesh(shape, tuple(range(prod(shape)))), frozenset({0, *samples}))


def shown(group: GradientGroup) -> tuple[int, list[str], tuple[int, ...] | None, bool]:
    """Stage, names, ranks that hold the same, and whether its norm is counted here."""
    ranks = None if group.group is None else group.group.ranks
    return group.stage, [*group.parameters], ranks, group.counted


def linears(count: int) -> list[list[nn.Module]]:
    return [[nn.Linear(1, 1)] for _ in range(count)]


def ranks_of(groups: dict[int, Group | None]) -> dict[int, tuple[int, ...] | None]:
    return {stage: None if group is None else group.ranks for stage, group in groups.items()}


ALONE, TWO_REPLICAS = dims_of(1, 2), dims_of(2, 2)


def test_a_pipeline_alone_shares_nothing() -> None:
    for rank in range(2):
        found, asked = placement_of(linears(2), [[0], [1]], dims=ALONE, rank=rank)
        assert (asked, found.created, found.worker) == ([], [], rank)
        assert found.groups == {rank: None}
        assert not any((found.tied, found.split_ties, found.split_tied))
        names = [f"{rank}.weight", f"{rank}.bias"]
        assert [*map(shown, found.by_stage[rank])] == [(rank, names, None, True)]
        assert [*map(shown, found.all_gradients())] == [(rank, names, None, True)]


def test_replicas_hold_the_same_and_the_first_counts_it() -> None:
    for rank in range(4):
        found, asked = placement_of(linears(2), [[0], [1]], dims=TWO_REPLICAS, rank=rank)
        assert asked == [(0, 2), (1, 3)], "all make the groups of all, in one order"
        assert [group.ranks for group in found.created] == asked
        stage, mine = rank % 2, asked[rank % 2]
        assert ranks_of(found.groups) == {stage: mine}
        assert [*map(shown, found.by_stage[stage])] == [
            (stage, [f"{stage}.weight", f"{stage}.bias"], mine, rank < 2)
        ]


def test_copies_of_a_stage_in_one_pipeline_are_counted_by_the_first_holder() -> None:
    for rank in range(2):
        found, asked = placement_of(linears(2), [[0, 1], [1, 0]], dims=ALONE, rank=rank)
        assert asked == [(0, 1)], "one group for all that the same ranks hold"
        assert found.groups[0] is found.groups[1] is found.created[0]
        assert [*found.by_stage] == [0, 1]
        counted = [(found.by_stage[stage][0].counted) for stage in range(2)]
        assert counted == [rank == 0, rank == 1]


def tied(first: int, last: int, count: int) -> list[list[nn.Module]]:
    """Linear layers, two of which have one weight."""
    modules = linears(count)
    modules[last][0].weight = modules[first][0].weight
    return modules


def test_a_tied_weight_is_one_of_all_its_stages() -> None:
    modules = tied(0, 2, 3)
    found, asked = placement_of(modules, [[0], [1], [2]], dims=dims_of(1, 3), rank=2)
    assert asked == [(0, 2)]
    assert [*found.tied] == [(0, 2)]
    assert [*map(shown, found.tied[0, 2])] == [(2, ["0.weight"], (0, 2), False)]
    assert [*map(shown, found.by_stage[2])] == [(2, ["2.bias"], None, True)]
    assert [*map(shown, found.all_gradients())] == [
        (2, ["0.weight"], (0, 2), False),
        (2, ["2.bias"], None, True),
    ]
    assert found.split_ties == {2: ("0.weight", (0, 2))}
    assert found.split_tied == {"0.weight": modules[0][0].weight}
    first, _ = placement_of(modules, [[0], [1], [2]], dims=dims_of(1, 3))
    assert [*map(shown, first.tied[0, 2])] == [(0, ["0.weight"], (0, 2), True)]
    assert first.split_ties == {0: ("0.weight", (0, 2))}
    none, asked = placement_of(modules, [[0], [1], [2]], dims=dims_of(1, 3), rank=1)
    assert asked == [(0, 2)], "who has none of it makes the group too"
    assert (none.tied, none.split_ties, none.split_tied) == ({}, {}, {})
    assert [*none.by_stage] == [1]


def test_a_tied_weight_of_one_worker_is_updated_there_alone() -> None:
    found, asked = placement_of(tied(0, 1, 2), [[0], [0]], dims=dims_of(1, 1))
    assert asked == []
    assert [*map(shown, found.tied[0, 1])] == [(0, ["0.weight"], None, True)]
    assert [*map(shown, found.by_stage[0])] == [(0, ["0.bias"], None, True)]
    assert [*map(shown, found.by_stage[1])] == [(1, ["1.bias"], None, True)]
    assert not found.split_ties
    assert not found.split_tied


def test_two_tied_weights_of_the_same_stages_are_two_groups() -> None:
    modules = tied(0, 1, 2)
    modules[1][0].bias = modules[0][0].bias
    found, asked = placement_of(modules, [[0], [1]], dims=ALONE)
    assert asked == [(0, 1)]
    assert [names for _, names, _, _ in map(shown, found.tied[0, 1])] == [["0.weight"], ["0.bias"]]
    assert found.split_ties == {0: ("0.weight", (0, 1))}, "the first is named"
    assert [*found.split_tied] == ["0.weight", "0.bias"]
    assert found.by_stage == {0: []}


def test_a_tied_weight_whose_first_stage_differs_by_holder_is_apart() -> None:
    """Two pipes: worker 0 has stages 0 and 1, and worker 1 has both: everybody updates it with stage 0."""
    found, _ = placement_of(tied(0, 1, 2), [[0, 1], [1, 0]], dims=ALONE, rank=1)
    assert found.split_ties == {}
    assert [*map(shown, found.tied[0, 1])] == [(0, ["0.weight"], (0, 1), False)]


# -- sharded over a further dimension of the mesh: replicas 1, workers 2, and 2 positions

MESH = dims_of(1, 2, 2, samples={2})
SUMMED = WeightDims(shards=frozenset({2}), reduced=frozenset({2}), placements="Shard(0)")


def test_what_fsdp_sums_has_a_group_of_its_own() -> None:
    weights = {"0.weight": SUMMED}
    for rank in range(4):
        found, asked = placement_of(linears(2), [[0], [1]], dims=MESH, rank=rank, weights=weights)
        assert asked == [(0, 1), (2, 3)]
        stage = rank // 2
        assert ranks_of(found.groups) == {stage: asked[stage]}
        rest = (stage, ["0.weight", "0.bias"][1:] if not stage else ["1.weight", "1.bias"], asked[stage])
        sharded = [(0, ["0.weight"], None, True)] if not stage else []
        assert [*map(shown, found.by_stage[stage])] == [*sharded, (*rest, rank % 2 == 0)]


def test_positions_count_their_parts_and_replicas_do_not() -> None:
    dims = dims_of(2, 1, 2, samples={2})
    counted = []
    for rank in range(4):
        found, asked = placement_of(linears(1), [[0]], dims=dims, rank=rank, weights={"0.bias": SUMMED})
        assert asked == [(0, 1, 2, 3), (0, 2), (1, 3)]
        weight, bias = found.by_stage[0]
        assert [*weight.parameters, *bias.parameters] == ["0.weight", "0.bias"]
        assert bias.group is not None
        assert bias.group.ranks == (rank % 2, rank % 2 + 2)
        assert ranks_of(found.groups) == {0: (0, 1, 2, 3)}
        counted.append((weight.counted, bias.counted))
    assert counted == [(True, True), (False, True), (False, False), (False, False)]


def test_a_tied_weight_that_is_two_on_one_worker_is_refused() -> None:
    dims = dims_of(1, 1, 2, samples={2})
    with pytest.raises(ConfigError) as refused:
        placement_of(tied(0, 2, 3), [[0], [0], [0]], dims=dims, weights={"0.weight": SUMMED})
    assert str(refused.value) == (
        "0.weight is a weight of stages 0 and 2, which one worker holds, and parallelize() made two of it "
        "there; leave it whole, or do not tie it"
    )
    found, asked = placement_of(tied(0, 2, 3), [[0], [0], [0]], dims=dims)  # whole
    assert asked == [(0, 1)]
    assert [*map(shown, found.tied[0, 2])] == [(0, ["0.weight"], (0, 1), True)]


def test_a_tied_weight_that_is_sharded_on_two_workers() -> None:
    weights = {"0.weight": SUMMED}
    for rank in range(4):
        found, asked = placement_of(tied(0, 1, 2), [[0], [1]], dims=MESH, rank=rank, weights=weights)
        assert asked == [(0, 2), (1, 3), (0, 1), (2, 3)]
        (one,) = found.tied[0, 1]
        assert shown(one) == (rank // 2, ["0.weight"], asked[rank % 2], rank < 2)


def test_a_tied_weight_of_three_stages_is_named_by_the_first_and_the_last() -> None:
    modules = tied(0, 1, 3)
    modules[2][0].weight = modules[0][0].weight
    dims = dims_of(1, 1, 2, samples={2})
    with pytest.raises(ConfigError, match="stages 0 and 2, which"):
        placement_of(modules, [[0], [0], [0]], dims=dims, weights={"0.weight": SUMMED})


def test_a_tied_weight_comes_after_one_that_is_held_elsewhere() -> None:
    modules = tied(0, 1, 4)
    modules[3][0].weight = modules[2][0].weight
    dims = dims_of(1, 4)
    found, asked = placement_of(modules, [[0], [1], [2], [3]], dims=dims, rank=3)
    assert asked == [(0, 1), (2, 3)]
    assert [*found.tied] == [(2, 3)]


def test_groups_are_made_in_one_order_on_all() -> None:
    """Weights that are summed over several dimensions: by these, and not as they come."""
    dims = dims_of(1, 1, 2, 2, 2, samples={2, 3, 4})
    for order in permutations((2, 3, 4)):
        layers = [nn.Linear(1, 1, bias=False) for _ in order]
        weights = {
            f"{n}.weight": WeightDims(shards=frozenset({d}), reduced=frozenset({d}), placements="x")
            for n, d in enumerate(order)
        }
        _, asked = placement_of([[*layers]], [[0]], dims=dims, weights=weights)
        assert asked == [
            tuple(range(8)),
            *((0, 1, 2, 3), (4, 5, 6, 7)),
            *((0, 1, 4, 5), (2, 3, 6, 7)),
            *((0, 2, 4, 6), (1, 3, 5, 7)),
        ]
