"""Bounds that hold however the layers are cut: by hand, and against all cuts of small models."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
from counterflow.planning.cost.device_placement import Arrangement, Network, network
from counterflow.planning.cost.stages import stage_costs
from counterflow.planning.inputs.cluster import NodeKind
from counterflow.planning.search.cut_free_bound import CutFreeBound
from counterflow.planning.search.order_free_bounds import order_free_bounds
from counterflow.planning.search.path_bounds import HopCosts
from counterflow.planning.search.shape import WorkloadShape
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave

PLAIN = LayerProfile((1.0, 2.0), (1.0, 2.0), (3.0, 6.0), (0.0, 0.0), 100.0, 5.0)
DEAR = LayerProfile((1.0, 2.0), (10.0, 20.0), (30.0, 60.0), (0.0, 0.0), 0.0, 9.0)
PROFILE = Profile("p", "", "", {"block": PLAIN, "head": DEAR}, op_overhead_seconds=7.0)
MODEL = Model("m", ("block", "block", "head"))
CLUSTER = Cluster("c", 8, 1, memory_bytes=1e9, inside=Link(0.0, 0.0), between=Link(0.5, 0.25))


def shape(placement: Placement, passes: int = 4, **others: Any) -> WorkloadShape:
    pipes = placement.pipes
    found: dict[str, Any] = {"together": (1,) * pipes, "parts": 1, "split": False, "synchronous": True}
    promises: dict[str, Any] = {"most_stashed": None, "most_in_flight": None}
    return WorkloadShape(placement, (passes,) * pipes, **found | promises | others)


def seconds(of: WorkloadShape, links: Network, recompute: Recompute = Recompute.NONE, **others: Any) -> float:
    found = CutFreeBound.of(of, MODEL, PROFILE, 1, recompute)
    return found.seconds(of, HopCosts.of(of.placement, links), links, **others)


def links(placement: Placement, replicas: int = 1, cluster: Cluster = CLUSTER) -> Network:
    return network(cluster, placement, replicas, Arrangement.PIPELINE_INSIDE)


def test_the_work_of_all_layers_is_without_the_overhead_of_ops() -> None:
    one = CutFreeBound.of(shape(linear(2)), MODEL, PROFILE, 1, Recompute.NONE)
    assert (one.work, one.round_trip) == pytest.approx((4 + 4 + 40,) * 2)
    two = CutFreeBound.of(shape(linear(2)), MODEL, PROFILE, 2, Recompute.LAYER)
    assert (two.work, two.round_trip) == pytest.approx((10 + 10 + 100,) * 2)


def test_each_layer_is_in_its_quickest_way() -> None:
    """One layer is quicker by twos, the other one by one: no stage of both is as quick as both alone."""
    by_twos = LayerProfile((1.0, 2.0), (10.0, 18.0), (20.0, 40.0), (0.0, 0.0), 0.0, 0.0)
    by_one = LayerProfile((1.0, 2.0), (1.0, 3.0), (2.0, 4.0), (0.0, 0.0), 0.0, 0.0)
    profile = Profile("p", "", "", {"block": by_twos, "head": by_one})
    found = CutFreeBound.of(
        shape(linear(2), together=(2,)), Model("m", ("block", "head")), profile, 1, Recompute.STAGE
    )
    assert found.work == pytest.approx((9 + 30) + (1 + 3))


def test_many_micro_batches_are_divided_among_the_workers() -> None:
    four = linear(2)
    assert seconds(shape(four, 100), links(four)) == pytest.approx(100 * 48 / 2)
    slow = replace(links(four), slowness=(1.0, 3.0))
    assert seconds(shape(four, 100), slow) == pytest.approx(100 * 48 / (1 + 1 / 3))


def test_a_micro_batch_goes_up_and_back_before_stage_0_sums_its_gradients() -> None:
    two = linear(2)
    way = 48 + 2 * (0.5 + 0.25 * 5)  # its output is that of a block
    assert seconds(shape(two, 1), links(two)) == pytest.approx(way)
    promised = shape(two, 5, most_in_flight=2)  # two at a time: three times
    assert seconds(promised, links(two)) == pytest.approx(3 * way)
    copies = links(two, 2)
    assert seconds(shape(two, 1), copies) == pytest.approx(way + copies.allreduce[0].seconds(100))
    # On the fastest of its workers, whichever that is.
    assert seconds(shape(two, 1), replace(links(two), slowness=(3.0, 2.0))) == pytest.approx(way + 48)


def test_a_half_of_a_backward_carries_half_a_gradient() -> None:
    two, free = linear(2), CutFreeBound.of(shape(linear(2), parts=2), MODEL, PROFILE, 1, Recompute.NONE)
    assert (free.up, free.down) == (5.0, 2.5)
    sliced = CutFreeBound.of(shape(two, lengths=(3, 1)), MODEL, PROFILE, 1, Recompute.NONE)
    assert (sliced.up, sliced.down) == (1.25, 1.25)


@pytest.mark.parametrize("others", [{"split": True, "parts": 2}, {"synchronous": False}])
def test_where_steps_overlap_only_the_work_counts(others: dict[str, Any]) -> None:
    two = linear(2)
    assert seconds(shape(two, 1, **others), links(two)) == pytest.approx(48 / 2)
    assert seconds(shape(two, 1), links(two), barrier=False) == pytest.approx(48 / 2)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.LAYER])
@pytest.mark.parametrize("placement", [linear(3), looped(2, 2), wave(2, 1), bidirectional(4, 1)], ids=str)
def test_no_cuts_have_a_lower_bound(placement: Placement, recompute: Recompute) -> None:
    """Against the bounds of all cuts of a model of unlike layers."""
    halves: dict[str, Any] = {"input_gradient_seconds": (2.0, 4.0), "weight_gradients_seconds": (1.5, 3.0)}
    tail = LayerProfile((1.0, 2.0), (2.0, 3.0), (3.0, 5.0), (0.0, 0.0), 70.0, 3.0, **halves)
    layers = {"block": replace(PLAIN, **halves), "head": tail}
    profile = Profile("p", "", "", layers, op_overhead_seconds=0.01)
    model = Model("m", ("head", *("block",) * 4, "head", "block"))
    kinds = (NodeKind("plain", 6), NodeKind("slow", 2, None, None, 1.5))
    ways: list[dict[str, Any]] = [{}, {"split": True}, {"most_in_flight": 2}, {"synchronous": False}]
    ways += [{"parts": 2}, {"together": (2,) * placement.pipes}, {"lengths": (2, 1)}]
    checked = 0
    for cluster in (CLUSTER, replace(CLUSTER, kinds=kinds)):
        for replicas, passes, others in [(r, n, o) for r in (1, 2) for n in (1, 2, 6) for o in ways]:
            of = shape(placement, passes, **others)
            here = links(placement, replicas, cluster)
            least = CutFreeBound.of(of, model, profile, 1, recompute).seconds(
                of, HopCosts.of(placement, here), here, barrier=True
            )
            bounds = [
                order_free_bounds(of, stage_costs(model, profile, cuts, 1), here, recompute)
                for cuts in combinations(range(1, len(model.layers)), placement.stages - 1)
            ]
            closest = min(one.seconds(None, of.most_in_flight) for one in bounds)
            assert 0 < least <= closest * (1 + 1e-9)
            checked += len(bounds)
    assert checked >= 2 * 2 * 3 * 7 * 15
