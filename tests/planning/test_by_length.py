"""Plans by length of the sequence: costs at other lengths, and from which length slices win."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from counterflow import ConfigError
from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
from counterflow.planning.by_length import of_length, plans_by_length, slices_win_from
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.task import PlanningTask
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import F
from counterflow.simulation.layer_cost import LayerCost
from counterflow.simulation.slice_lengths import balanced_slices

BLOCK = LayerProfile(
    (1.0,), (1.0,), (2.0,), (80.0,), 10.0, 8.0, attention_share=0.2, fixed_share=0.1, state_bytes=16.0
)
PROFILE = Profile("p", "m", "2026-01-01", {"block": BLOCK}, op_overhead_seconds=0.1, positions=64)
CLUSTER = Cluster("c", 4, 1, 2400.0, Link(0.0, 0.0), Link(0.0, 0.0))
TASK = PlanningTask("", "", Model("m", ("block",) * 8), PROFILE, CLUSTER, 2, "")
FEW = Constraints(schemes=("1f1b", "zb-v"), depths=(4,), recompute=(Recompute.NONE,), slices=(1, 2, 4))


def test_costs_at_another_length() -> None:
    found = of_length(PROFILE, 4).layers["block"]
    whole = 0.1 + 0.7 * 4 + 0.2 * 16
    assert found.forward_seconds[0] == pytest.approx(whole)
    assert found.backward_seconds[0] == pytest.approx(2 * whole)
    assert (found.saved_bytes, found.output_bytes, found.state_bytes) == ((320.0,), 32.0, 64.0)
    assert found.weights_bytes == 10.0
    assert found.attention_share == pytest.approx(3.2 / whole)
    assert found.fixed_share == pytest.approx(0.1 / whole)
    there_and_back = of_length(of_length(PROFILE, 4), 0.25).layers["block"]
    assert there_and_back.forward_seconds[0] == pytest.approx(1.0)
    assert there_and_back.attention_share == pytest.approx(0.2)


def test_slices_win_from_a_length_on() -> None:
    """Short sequences are not worth their fixed costs; long ones do not fit whole."""
    found = plans_by_length(TASK, FEW, times=(0.125, 1, 4, 8))
    assert [each.positions for each in found] == [8, 64, 256, 512]
    assert [each.slices_win for each in found] == [False, True, True, True]
    assert [each.unsliced is not None for each in found] == [True, True, True, False]
    assert found[0].faster is not None
    assert found[0].faster < 1
    assert found[3].sliced is not None
    assert found[3].faster is None
    first = slices_win_from(found)
    assert first is not None
    assert first.positions == 64
    assert first.unsliced is not None
    assert first.sliced is not None
    assert first.faster == first.unsliced.seconds / first.sliced.seconds > 1
    assert slices_win_from(found[:1]) is None


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no positions"):
        plans_by_length(PlanningTask("", "", TASK.model, of_length(PROFILE, 0), CLUSTER, 2, ""), FEW)
    with pytest.raises(ConfigError, match="give 2 or more too"):
        plans_by_length(TASK, Constraints(slices=(1,)))


def test_shares_of_layers_without_a_part_in_proportion() -> None:
    """Averages of shares whose sums are 1 exceed it by a rounding, which once refused a measured profile."""
    shares = [(number / 97, 1 - number / 97) for number in range(97)]
    layers = [replace(BLOCK, attention_share=a, fixed_share=f) for a, f in shares]
    for first, second in combinations(layers, 2):
        cost = LayerCost.fold([first.cost(), second.cost()], 1.0)
        lengths = balanced_slices(64, 4, attention=cost.attention.get(F, 0.0), fixed=cost.fixed)
        assert sum(lengths) == 64
