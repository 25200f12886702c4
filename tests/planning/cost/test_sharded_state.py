"""Optimiser state sharded over the holders of a stage: who owns what, what is sent, what a step takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from counterflow import ConfigError
from counterflow.planning import (
    AllReduce,
    Arrangement,
    Cluster,
    Configuration,
    LayerProfile,
    LayerTie,
    Link,
    Model,
    Predictor,
    Profile,
    predict,
)
from counterflow.planning.inputs.cluster import broadcasts
from counterflow.planning.play import Play
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.search.space import space

BLOCK = LayerProfile((1.0,), (1.0,), (2.0,), (10.0,), weights_bytes=100.0, output_bytes=4.0)
PROFILE = Profile("p", "a device", "2026-01-01", {"block": BLOCK}, update_seconds_per_byte=0.01)
WITH_SIZES = replace(PROFILE, layers={"block": replace(BLOCK, parameter_bytes=(60.0, 30.0, 10.0))})
MODEL = Model("m", ("block",) * 4, optimizer_states=2.0)
LINK = Link(1.0, 0.1)
CLUSTER = Cluster("c", 1, 8, 1e6, LINK, LINK)


def played(
    profile: Profile,
    scheme: str,
    replicas: int,
    model: Model = MODEL,
    cluster: Cluster = CLUSTER,
    **more: Any,
) -> Play:
    """With ``zero_stage`` 1."""
    options = {"stages": 4 // replicas if scheme == "dapple" else 4, "micro_batches": 4}
    configuration = Configuration.of(scheme, options, replicas, 1, zero_stage=1, **more)
    return Predictor(model, profile, cluster).play(configuration)


def test_whole_parameters_are_owned() -> None:
    """Two stages of two blocks on two replicas: 60 60 30 30 10 10 of each, the largest first."""
    play = played(WITH_SIZES, "dapple", 2)
    assert play.sharded is not None
    assert play.sharded.owned == ((100.0, 100.0), (100.0, 100.0))
    odd = replace(WITH_SIZES, layers={"block": replace(BLOCK, parameter_bytes=(80.0, 20.0))})
    model = replace(MODEL, layers=("block", "block"))
    play = played(odd, "dapple", 2, model=model)
    assert play.sharded is not None
    assert play.sharded.owned == ((80.0, 80.0), (20.0, 20.0))
    assert play.sharded.most == (80.0, 80.0)
    assert play.sharded.spared == (40.0, 40.0)
    before, after = (
        play.with_zero_stage(stage).prediction().memory for stage in (0, 1)
    )  # both on the replica that has most
    assert [one.total - other.total for one, other in zip(before, after, strict=True)] == [40.0, 40.0]


def test_where_sizes_are_not_told_all_own_as_much() -> None:
    play = played(PROFILE, "chimera", 1)
    assert play.sharded is not None
    assert play.sharded.owned == ((100.0,) * 4,)  # of 200
    assert play.sharded.spared == (200.0,) * 4


def test_a_tied_weight_is_owned_once() -> None:
    """Blocks 0 and 3 share 60 bytes: on all who hold stage 0 or 1, once."""
    model = replace(MODEL, ties=(LayerTie((0, 3), 60.0),))
    found = [played(profile, "dapple", 2, model=model).sharded for profile in (PROFILE, WITH_SIZES)]
    assert [state and state.owned for state in found] == [((85.0, 85.0),), ((100.0, 70.0), (100.0, 70.0))]
    assert [state and state.spared for state in found] == [(230.0, 230.0), (200.0, 260.0)]  # of 200 held


def test_the_step_is_the_update_of_what_is_owned_and_the_broadcasts() -> None:
    """A chain of two: 1 s to arrive, 2 owners · 1 s to start, 200 bytes · 0.1 s."""
    play = played(WITH_SIZES, "dapple", 2)
    whole = play.with_zero_stage(0)
    assert play.broadcast_seconds == pytest.approx(1 + 2 + 20)
    assert play.seconds == pytest.approx(whole.seconds - 0.01 * 100 + 23)
    parts = play.parts()
    assert parts.broadcasts == pytest.approx(23)
    assert parts.update == pytest.approx(1.0)
    assert sum(getattr(parts, name) for name in type(parts).__slots__) == pytest.approx(play.seconds)
    assert play.with_zero_stage(0).simulation is play.simulation


def test_groups_that_a_worker_is_in_go_one_after_another() -> None:
    """Chimera's worker 0 holds stages 0 and 3 with worker 3: one group; tied, one more of all."""
    play = played(PROFILE, "chimera", 1)
    assert play.broadcast_seconds == pytest.approx(1 + 2 + 20)
    tied = played(PROFILE, "chimera", 1, model=replace(MODEL, ties=(LayerTie((0, 1), 40.0),)))
    ring = 3 + 4 + 0.1 * 40  # 3 links, 4 owners
    assert tied.broadcast_seconds == pytest.approx(ring + 1 + 2 + 0.1 * (200 - 40))


@pytest.mark.parametrize(
    ("allreduce", "copies", "shared", "seconds"),
    [
        (AllReduce.RING, [1], False, 0.0),
        (AllReduce.RING, [2], False, 1 + 10),
        (AllReduce.RING, [3], False, 2 * (1 + 10)),
        (AllReduce.RING, [1, 1, 1], False, 2 * (2 + 100)),
        (AllReduce.RING, [2, 2], True, 1 + 10 + 2 + 2 * 100),
        (AllReduce.HIERARCHICAL, [1], False, 0.0),
        (AllReduce.HIERARCHICAL, [3], False, 2 + 1 + 10),
        (AllReduce.HIERARCHICAL, [2, 2], True, (2 + 2) + 2 + 100),
    ],
)
def test_a_broadcast_of_a_thousand_bytes(
    allreduce: AllReduce, copies: list[int], shared: bool, seconds: float
) -> None:
    cluster = Cluster("c", 3, 4, 1e9, Link(1, 0.01), Link(2, 0.1), allreduce=allreduce, shared_adapter=shared)
    assert broadcasts(cluster, copies).seconds(1000, 1) == pytest.approx(seconds)


def test_what_a_node_s_one_way_out_carries_takes_its_time() -> None:
    """Two stages side by side on each of two nodes: both groups cross at once."""
    cluster = Cluster("c", 2, 2, 1e6, LINK, LINK, shared_adapter=True)
    play = played(WITH_SIZES, "dapple", 2, cluster=cluster, arrangement=Arrangement.PIPELINE_INSIDE)
    assert play.broadcast_seconds == pytest.approx(2 * 0.1 * 200)
    own = replace(cluster, shared_adapter=False)
    play = played(WITH_SIZES, "dapple", 2, cluster=own, arrangement=Arrangement.PIPELINE_INSIDE)
    assert play.broadcast_seconds == pytest.approx(23)


def test_it_is_tried_where_the_runtime_runs_it() -> None:
    wanted = Constraints(schemes=("dapple", "chimera", "pipedream-2bw"))
    groups, _ = space(MODEL, replace(CLUSTER, devices=4), 8, wanted)
    tried = {(g.scheme, g.depth): g.zero_stages for g in groups}
    assert tried == {
        ("dapple", 1): (0, 1),
        ("dapple", 2): (0, 1),
        ("dapple", 4): (0,),  # nobody else has any stage
        ("chimera", 2): (0, 1),
        ("chimera", 4): (0, 1),
        ("pipedream-2bw", 2): (0,),
        ("pipedream-2bw", 4): (0,),
    }
    asked = replace(MODEL, config={"pipeline": {"zero_stage": 1}})
    groups, omissions = space(asked, replace(CLUSTER, devices=4), 8, wanted)
    assert {g.zero_stages for g in groups if g.scheme == "chimera"} == {(1,)}
    assert [o.what for o in omissions] == ["pipedream-2bw"]
    early = replace(MODEL, config={"pipeline": {"barrier": False}})
    groups, _ = space(early, replace(CLUSTER, devices=4), 8, wanted)
    assert {g.zero_stages for g in groups} == {(0,)}
    with pytest.raises(ConfigError, match="does not happen with barrier = false"):
        space(early, CLUSTER, 8, replace(wanted, zero_stages=(1,)))
    with pytest.raises(ConfigError, match="zero_stage=3: must be 0 or 1"):
        space(MODEL, CLUSTER, 8, replace(wanted, zero_stages=(3,)))


def test_it_is_chosen_where_it_saves_the_memory_that_is_missing() -> None:
    """Where nothing is sent for free the whole copy wins if it fits; of equal ones the one without."""
    wanted = Constraints(schemes=("dapple",), depths=(2,))
    four = replace(CLUSTER, devices=4)
    assert search(MODEL, WITH_SIZES, four, 8, wanted).best[0].play.configuration.zero_stage == 0
    quick = replace(four, inside=Link(0, 0), between=Link(0, 0))
    still = replace(WITH_SIZES, update_seconds_per_byte=0.0)
    found = search(MODEL, still, quick, 8, wanted, count=2)
    assert [plan.play.configuration.zero_stage for plan in found.best] == [0, 1]
    assert found.best[0].seconds == found.best[1].seconds
    tight = replace(four, memory_bytes=700.0)
    found = search(MODEL, WITH_SIZES, tight, 8, wanted)
    assert found.best[0].play.configuration.zero_stage == 1
    assert found.in_more_memory is not None
    assert found.in_more_memory.play.configuration.zero_stage == 0


def test_without_a_flush_it_is_refused() -> None:
    stale = Configuration.of("pipedream", {"stages": 2}, 1, 1, zero_stage=1)
    with pytest.raises(ConfigError, match="which does not happen with no flush in pipedream"):
        predict(MODEL, PROFILE, CLUSTER, stale)
