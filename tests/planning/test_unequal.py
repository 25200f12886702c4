"""Clusters whose nodes differ: literal steps, cuts, memory and links, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterflow import ConfigError
from counterflow.errors import PlanError
from counterflow.papers.step_times import planned_closed_form
from counterflow.planning import (
    Arrangement,
    Cluster,
    Configuration,
    LayerProfile,
    Link,
    Model,
    NodeKind,
    Predictor,
    Profile,
)
from counterflow.planning.cost.device_placement import devices, network
from counterflow.planning.inputs.input_files import dumps, load_cluster
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import bidirectional, linear

FREE = Link(0.0, 0.0)
BLOCK = LayerProfile((1.0,), (1.0,), (2.0,), (10.0,), weights_bytes=100.0, output_bytes=4.0)
PROFILE = Profile("p", "a device", "2026-01-01", {"block": BLOCK})
MODEL = Model("m", ("block",) * 6, optimizer_states=0.0)
FAST, SLOW = NodeKind("fast", 1), NodeKind("slow", 1, slowness=2.0)
TWO = Cluster("c", 2, 1, 1e6, FREE, FREE, kinds=(FAST, SLOW))


def dapple(stages: int, micro_batches: int, replicas: int = 1, **more: Any) -> Configuration:
    options = {"stages": stages, "micro_batches": micro_batches}
    return Configuration.of("dapple", options, replicas, 1, **more)


def test_ops_and_updates_take_as_long_as_the_worker_s_device_makes_them() -> None:
    predictor = Predictor(MODEL, replace(PROFILE, update_seconds_per_byte=0.01), TWO)
    found = predictor.predict(dapple(2, 1, cuts=(4,)))
    # 4 blocks forward, 2 twice as slow, and back; worker 0 updates 400 bytes, worker 1 200 twice as slowly.
    assert found.step_seconds == pytest.approx(4 + 2 * 2 + 4 * 2 + 8 + 4)
    other = predictor.predict(dapple(2, 1, cuts=(4,), nodes=(("slow", 1), ("fast", 1))))
    assert other.step_seconds == pytest.approx(8 + 2 + 4 + 16 + 8)


def test_no_closed_form_stands_beside_workers_that_differ() -> None:
    assert planned_closed_form(Predictor(MODEL, PROFILE, TWO).play(dapple(2, 8))) is None
    assert (
        planned_closed_form(Predictor(MODEL, PROFILE, replace(TWO, kinds=())).play(dapple(2, 8))) is not None
    )


def test_a_slow_worker_gets_fewer_layers() -> None:
    predictor = Predictor(MODEL, PROFILE, TWO)
    assert predictor.play(dapple(2, 8)).stages.cuts == (4,)
    assert predictor.play(dapple(2, 8, nodes=(("slow", 1), ("fast", 1)))).stages.cuts == (2,)
    equal = Predictor(MODEL, PROFILE, replace(TWO, kinds=()))
    assert equal.play(dapple(2, 8)).stages.cuts == (3,)


def test_layers_leave_a_worker_with_less_memory() -> None:
    """Four blocks are 800 bytes of weights and gradients and more; two 400, a stash of 20 and messages."""
    small = replace(TWO, kinds=(FAST, NodeKind("small", 1, memory_bytes=500.0)))
    play = Predictor(MODEL, PROFILE, small).play(dapple(2, 8))
    assert play.stages.cuts == (4,)
    assert play.usable_bytes == (1e6, 500.0)
    assert play.fits
    assert play.prediction().fits
    whole = Predictor(MODEL, PROFILE, small).play(dapple(2, 8, cuts=(2,)))
    assert not whole.fits
    assert not whole.prediction().fits
    # Three blocks: 600, a stash of 30, a message of 4 each way.
    wanted = Constraints(schemes=("dapple",), depths=(2,), cuts=(3,), recompute=(Recompute.NONE,))
    with pytest.raises(PlanError, match="dapple: needs at least 638 B on worker 1, which has 500 B"):
        search(MODEL, PROFILE, small, 8, wanted)


def test_a_worker_is_as_slow_as_the_slowest_of_its_replicas() -> None:
    four = replace(TWO, nodes=4, kinds=(replace(FAST, nodes=2), replace(SLOW, nodes=2)))

    def slowness(arrangement: Arrangement, **more: Any) -> tuple[float, ...]:
        return network(four, linear(2), 2, arrangement, **more).slowness

    assert slowness(Arrangement.PIPELINE_INSIDE) == (2.0, 2.0)  # the second replica is slow
    assert slowness(Arrangement.REPLICAS_INSIDE) == (1.0, 2.0)
    in_turns = tuple((name, 1) for name in ("fast", "slow", "fast", "slow"))
    assert slowness(Arrangement.PIPELINE_INSIDE, nodes=in_turns) == (1.0, 2.0)
    assert devices(linear(2), 2, Arrangement.PIPELINE_INSIDE, four, in_turns) == ((0, 2), (1, 3))


def test_nodes_of_different_size_are_counted_by_their_devices() -> None:
    """One device, then three: a pipeline of four crosses once, after worker 0, or after worker 2."""
    kinds = NodeKind("one", 1, devices=1), NodeKind("three", 1, devices=3)
    cluster = Cluster("c", 2, 8, 1e6, Link(1.0, 0.0), Link(5.0, 0.0), kinds=kinds)
    assert cluster.size == 4

    def crossings(**more: Any) -> list[float]:
        found = network(cluster, linear(4), 1, Arrangement.PIPELINE_INSIDE, **more)
        return [found.latency_seconds[w][w + 1] for w in range(3)]

    assert crossings() == [5.0, 1.0, 1.0]
    turned = (("three", 1), ("one", 1))
    assert crossings(nodes=turned) == [1.0, 1.0, 5.0]
    assert devices(linear(4), 1, Arrangement.PIPELINE_INSIDE, cluster, turned) == ((1, 2, 3, 0),)
    # Stage 0 of both directions is on devices 0 and 3, alone and among three: one step between, none inside.
    both = network(cluster, bidirectional(4), 1, Arrangement.PIPELINE_INSIDE)
    assert both.allreduce[0].latency_seconds == 2 * 5.0
    assert both.allreduce[1].latency_seconds == 2 * 1.0  # devices 1 and 2


def test_a_message_takes_the_slower_of_both_ends_and_a_node_s_own_link_inside() -> None:
    slow = NodeKind("slow", 1, inside=Link(2.0, 0.0), between=Link(7.0, 0.0))
    cluster = Cluster("c", 2, 2, 1e6, Link(1.0, 0.0), Link(5.0, 0.0), kinds=(FAST, slow))
    found = network(cluster, linear(4), 1, Arrangement.PIPELINE_INSIDE)
    assert [found.latency_seconds[w][w + 1] for w in range(3)] == [1.0, 7.0, 2.0]
    assert [found.latency_seconds[w + 1][w] for w in range(3)] == [1.0, 7.0, 2.0]
    side_by_side = network(cluster, linear(2), 2, Arrangement.REPLICAS_INSIDE)
    assert [one.latency_seconds for one in side_by_side.allreduce] == [2 * 1.0, 2 * 2.0]


def test_workers_wait_for_the_cores_of_their_own_node() -> None:
    kinds = NodeKind("many", 1, cores=2), NodeKind("few", 1, cores=1)
    cluster = Cluster("c", 2, 2, 1e6, FREE, FREE, cores=2, kinds=kinds)
    found = Predictor(Model("m", ("block",) * 4), PROFILE, cluster).predict(dapple(4, 4))
    # Two workers with 4 forwards of 1 second and backwards of 2 each have one core: 24 seconds, and some
    # in which it waits for the other node (tests/simulation/test_shared_cores.py).
    assert found.step_seconds == pytest.approx(30)
    assert found.notes[0].startswith("2 workers of a node share 1 core, ")


def test_one_kind_that_is_like_the_cluster_changes_nothing() -> None:
    plain = replace(TWO, kinds=())
    named = replace(TWO, kinds=(NodeKind("all", 2),))
    a, b = (search(MODEL, PROFILE, cluster, 8, count=20) for cluster in (plain, named))
    assert [plan.seconds for plan in a.best] == [plan.seconds for plan in b.best]
    assert all(not plan.play.configuration.nodes for plan in b.best)


def test_a_plan_that_knows_the_kinds_is_quicker() -> None:
    knows, takes_for_equal = (
        search(MODEL, PROFILE, cluster, 8, Constraints(schemes=("dapple",)), count=1).best[0].play
        for cluster in (TWO, replace(TWO, kinds=()))
    )
    there = Predictor(MODEL, PROFILE, TWO).predict(takes_for_equal.prediction().configuration)
    assert knows.seconds < 0.8 * there.step_seconds


def test_a_cluster_of_kinds_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    kinds = FAST, NodeKind("other", 1, 4, 2e6, 1.5, between=Link(1e-3, 1e-9))
    cluster = replace(TWO, kinds=kinds)
    path = tmp_path / "cluster.toml"
    path.write_text(dumps(cluster))
    assert "[[kinds]]" in path.read_text()
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((FAST,), "nodes=2: the kinds have 1 node together; the numbers must be equal"),
        ((FAST, FAST), "kinds: 'fast' exists twice; give each kind a name of its own"),
        (
            (FAST, NodeKind("slow", 1, cores=2)),
            "kinds: slow: cores=2: the cluster has no cores, so its devices are not workers on cores",
        ),
        (
            (FAST, NodeKind("small", 1, memory_bytes=50.0)),
            "kinds: small: reserve_bytes=100: leaves nothing of memory_bytes=50; must be less",
        ),
    ],
)
def test_kinds_that_do_not_add_up_are_refused(kinds: tuple[NodeKind, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TWO, reserve_bytes=100.0, kinds=kinds)


def test_a_kind_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="slowness=0: must be more than 0"):
        NodeKind("still", 1, slowness=0.0)
    with pytest.raises(ConfigError, match="nodes=0: must be 1 or more"):
        NodeKind("none", 0)
