"""Experts, contexts and sharded weights in plans: a position by hand, and the search over degrees."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.common.parallel_degrees import Degrees
from counterflow.errors import ConfigError
from counterflow.planning import (
    AllReduce,
    Arrangement,
    Cluster,
    Configuration,
    Contexts,
    Cutting,
    Division,
    Experts,
    LayerProfile,
    LayerTie,
    Link,
    Model,
    NodeKind,
    Predictor,
    Profile,
    predict,
)
from counterflow.planning.cost.degrees import PositionGroups, places
from counterflow.planning.cost.positions import positioned
from counterflow.planning.cost.stages import may_cut
from counterflow.planning.inputs.input_files import dumps, load_profile
from counterflow.planning.search.bounds import common
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.cut_free_bound import CutFreeBound
from counterflow.planning.search.degrees_tried import degrees_tried
from counterflow.planning.search.path_bounds import HopCosts
from counterflow.planning.search.search import search
from counterflow.planning.search.shape import shape_of
from counterflow.planning.search.space import space
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.op import B, F, I, W

FREE = Link(0.0, 0.0)
EXPERTS = Experts(4, 60.0, forward=0.5, backward=0.5, saved=0.4, peaks=0.5, sent_bytes=8.0)
BLOCK = LayerProfile(
    (1.0, 2.0),
    (0.5, 1.0),
    (1.0, 2.0),
    (10.0, 20.0),
    100.0,
    output_bytes=4.0,
    experts=EXPERTS,
    contexts=Contexts(6.0),
)
DENSE = replace(BLOCK, experts=None)
PROFILE = Profile("p", "a device", "2026-01-01", {"block": BLOCK, "dense": DENSE})
MODEL = Model("m", ("block",) * 8, input_bytes=4.0)
CLUSTER = Cluster("c", 1, 8, 1e6, FREE, FREE)
ONE = Degrees()


def configured(stages: int, micro_batches: int, degrees: Degrees = ONE, **more: int) -> Configuration:
    options = {"stages": stages, "micro_batches": micro_batches}
    return Configuration.of("dapple", options, more.get("replicas", 1), 1, degrees=degrees)


def of_position(degrees: Degrees, cluster: Cluster = CLUSTER, block: LayerProfile = BLOCK) -> LayerProfile:
    return positioned(MODEL, replace(PROFILE, layers={"block": block}), cluster, degrees).layer("block")


def test_experts_by_hand() -> None:
    """Two positions: half of 8 bytes to the other one, and back; the count of tokens before."""
    linked = replace(CLUSTER, inside=Link(0.25, 0.5), allreduce_inside=FREE)
    even = of_position(Degrees(2, 1, 1, 2), linked)
    assert even.seconds(F, 1) == pytest.approx(0.5 + 0.25 + 2 * (0.25 + 0.5 * 8 / 2))
    assert even.seconds(B, 1) == pytest.approx(1 + 2 * (0.25 + 0.5 * 8 / 2))
    assert even.seconds(I, 1) == pytest.approx(0.5 + 2 * (0.25 + 0.5 * 8 / 2))
    assert even.seconds(W, 1) == pytest.approx(0.5)
    # The position with the most has 1.5 times as many tokens: half of the layer takes 1.5 times as long.
    uneven = replace(BLOCK, experts=replace(EXPERTS, load=1.5, overhead_seconds=0.125))
    loaded = of_position(Degrees(2, 1, 1, 2), linked, uneven)
    exchanges = 2 * (0.25 + 0.5 * 1.5 * 8 / 2) + 0.125
    assert loaded.seconds(F, 1) == pytest.approx(0.5 * 1.25 + 0.25 + exchanges)
    assert loaded.seconds(B, 1) == pytest.approx(1.25 + exchanges)
    assert loaded.saved(1) == pytest.approx(10 * (0.6 + 0.4 * 1.5))
    # All experts on each position: nothing is sent, and the load of experts is that of their sum.
    alone = of_position(Degrees(2, 1, 1, 1), linked, uneven)
    assert alone.seconds(F, 1) == 0.5
    assert of_position(Degrees(), linked, uneven) is uneven


def test_an_exchange_by_the_links_that_it_crosses() -> None:
    two = Cluster("c", 4, 2, 1e6, Link(0.5, 1.0), Link(2.0, 10.0))
    shared = replace(two, shared_adapter=True)

    def exchange(degrees: Degrees, cluster: Cluster) -> tuple[float, float]:
        cost = PositionGroups(cluster, degrees).exchange()
        return cost.latency_seconds, cost.seconds_per_byte

    assert exchange(Degrees(2, 1, 1, 2), two) == (0.5, 1 / 2)
    assert exchange(Degrees(4, 1, 1, 4), two) == (2.0, 10 * 2 / 4)  # beside it, a quarter inside
    assert exchange(Degrees(4, 1, 1, 4), shared) == (2.0, 2 * 10 * 2 / 4)
    # Experts are on the devices of tensor parallelism first; if 2 does not divide 3, on those of three nodes.
    assert exchange(Degrees(4, 1, 2, 4), two) == (2.0, 10 * 2 / 4)
    assert exchange(Degrees(3, 1, 2, 3), two) == (2.0, 10 * 2 / 3)
    assert exchange(Degrees(1, 1, 2, 2), two) == (0.5, 1 / 2)
    gather = PositionGroups(two, Degrees(4, 1, 2, 4)).token_gather()
    assert (gather.latency_seconds, gather.seconds_per_byte) == (0.5, 1 / 2)
    assert PositionGroups(two, Degrees(3, 1, 2, 3)).token_gather().seconds(100) == 0
    quick = replace(two, between=Link(2.0, 0.1))
    assert exchange(Degrees(4, 1, 1, 4), quick) == (2.0, 1 / 4)  # the link inside is the slower one


def test_memory_of_experts_by_hand() -> None:
    """100 bytes, 60 of them of experts, on two positions that have half of the experts each."""
    config = configured(2, 2, Degrees(2, 1, 1, 2))
    found = predict(MODEL, PROFILE, CLUSTER, config)
    # Shards of all weights; gradients of the dense ones and of its own experts; Adam's states of the shards;
    # an op gathers the dense weights of a layer, and experts are where they are used.
    assert [worker.weights for worker in found.memory] == [4 * (50 + (40 + 30) + 2 * 50) + 40] * 2
    # On four positions experts are sharded over two, so an op gathers these as well.
    wide = predict(MODEL, PROFILE, CLUSTER, configured(2, 2, Degrees(4, 1, 1, 2)))
    assert [worker.weights for worker in wide.memory] == [4 * (25 + (40 + 30) + 2 * 25) + 40 + 30] * 2
    # Without experts that are divided, all gradients are whole.
    plain = predict(MODEL, PROFILE, CLUSTER, configured(2, 2, Degrees(2, 1, 1, 1)))
    assert [worker.weights for worker in plain.memory] == [4 * (50 + 100 + 2 * 50) + 100] * 2


def test_contexts_by_hand() -> None:
    linked = replace(CLUSTER, inside=FREE, allreduce_inside=Link(0.25, 0.5))
    half = of_position(Degrees(1, 2, 1, 1), linked, replace(BLOCK, weights_bytes=0.0, experts=None))
    # Two gathers of two positions, of 6 bytes of keys and values.
    gathers = 2 * 0.25 + 0.5 * 6 / 2
    assert half.seconds(F, 2) == pytest.approx(0.5 + 2 * 0.25 + 0.5 * 12 / 2)
    assert half.seconds(F, 1) == pytest.approx(0.25 + gathers)
    assert half.seconds(B, 1) == pytest.approx(0.5 + gathers)
    assert half.seconds(W, 1) == pytest.approx(0.25)
    # Saved: half, with the keys and values of the other position; messages are half.
    assert half.saved(1) == 5 + 3
    assert half.output_bytes == 2
    whole = replace(
        BLOCK, weights_bytes=0.0, experts=None, contexts=None, attention_share=0.5, fixed_share=0.2
    )
    shared = of_position(Degrees(1, 2, 1, 1), linked, whole)
    assert shared.seconds(F, 1) == pytest.approx(0.5 * (0.2 + 0.8 / 2))
    assert shared.saved(1) == 5


def test_a_step_of_sharded_weights_by_hand() -> None:
    """Dense weights of 100 bytes a layer on two positions, gathered in each op and summed once."""
    model = replace(MODEL, layers=("dense",) * 8)
    linked = replace(CLUSTER, allreduce_inside=Link(0.125, 0.01))
    found = predict(model, PROFILE, linked, configured(2, 2, Degrees(2, 1, 1, 1)))
    gather = 0.125 + 0.01 * 100 / 2
    forward, backward = 4 * (0.5 + gather), 4 * (1 + gather)
    # The sum of a stage is its layers' reduce-scatters: as many bytes as their gathers.
    assert found.step_seconds == pytest.approx(3 * (forward + backward) + 4 * gather)
    assert found.mini_batch == 2 * 2
    # Two copies of it sum shards of 50 bytes.
    copies = predict(model, PROFILE, linked, configured(2, 2, Degrees(2, 1, 1, 1), replicas=2))
    assert copies.step_seconds == pytest.approx(found.step_seconds + 2 * 0.125 + 0.01 * 4 * 50)
    assert copies.mini_batch == 2 * 2 * 2
    assert copies.mesh is not None
    assert (len(copies.mesh), len(copies.mesh[0][0])) == (2, 2)


def test_positions_of_several_nodes() -> None:
    nodes = Cluster("c", 8, 2, 1e6, FREE, Link(0.5, 0.25), shared_adapter=True)
    spread = places(nodes, Degrees(4, 1, 1, 4))
    assert (spread.size, spread.devices, spread.nodes) == (4, 1, 4)
    assert spread.between.seconds_per_byte == 0.5  # both devices of a node send at one time
    for degrees in (Degrees(3, 1, 1, 1), Degrees(32, 1, 1, 1)):
        with pytest.raises(ConfigError, match="has to be a part of the 2 of a node of cluster c, or whole"):
            places(nodes, degrees)
    mixed = replace(nodes, kinds=(NodeKind("a", 4), NodeKind("b", 4)))
    with pytest.raises(ConfigError, match="dp_shard 4: a worker has 4 devices"):
        places(mixed, Degrees(4, 1, 1, 1))


TIED = replace(MODEL, ties=(LayerTie((0, 7), 4.0),))
BY_TENSORS = replace(BLOCK, tensor_parallel=Division(weights=0.5))


@pytest.mark.parametrize(
    ("limits", "profile", "model", "message"),
    [
        ({"experts": (8,)}, PROFILE, MODEL, "expert_parallel=8: must divide the 4 experts of layers of kind"),
        ({"experts": (0,)}, PROFILE, MODEL, "experts=0: must be 1 or more"),
        ({"contexts": (0,)}, PROFILE, MODEL, "contexts=0: must be 1 or more"),
        ({"shards": (0,)}, PROFILE, MODEL, "shards=0: must be 1 or more"),
        ({"experts": (4,), "shards": (2,)}, PROFILE, MODEL, "experts=4: must divide shards · contexts"),
        ({"experts": (2,)}, PROFILE, replace(MODEL, layers=("dense",) * 8), "has no experts; give a kind"),
        ({"contexts": (2,)}, PROFILE, TIED, "cp 2: layers share a weight with others, which no plan shards"),
        ({"contexts": (3,)}, PROFILE, MODEL, "cp 3: a worker has 3 devices"),
        ({"contexts": (2,), "slices": (2,)}, PROFILE, MODEL, "slices=2: plans with cp 2 have whole"),
        ({"contexts": (2,), "zero_stages": (1,)}, PROFILE, MODEL, "cp 2: cannot be combined with zero_st"),
        (
            {"contexts": (2,)},
            PROFILE,
            replace(MODEL, config={"pipeline": {"zero_stage": 1}}),
            "cp 2: cannot be combined with pipeline.zero_stage = 1",
        ),
        (
            {"contexts": (2,)},
            PROFILE,
            replace(MODEL, config={"pipeline": {"gradient_compression": "bfloat16"}}),
            "cp 2: cannot be combined with pipeline.gradient_compression",
        ),
        ({"contexts": (2,)}, replace(PROFILE, positions=6), MODEL, "contexts=2: each position has a head"),
        (
            {"tensor_parallel": (2,)},
            replace(PROFILE, layers={"block": BY_TENSORS}),
            MODEL,
            "divides 0.5 of the weights, but all but 0.4 are of experts",
        ),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be_are_refused(
    limits: dict[str, tuple[int, ...]], profile: Profile, model: Model, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        search(model, profile, CLUSTER, 8, Constraints(("dapple",), **limits))  # type: ignore[arg-type]


def test_asynchronous_schemes_and_slices_are_refused_and_omitted() -> None:
    degrees = Degrees(1, 2, 1, 1)
    config = Configuration.of("pipedream", {"stages": 2}, 1, 1, degrees=Degrees(cp=2))
    with pytest.raises(ConfigError, match="pipedream with cp 2: positions that share sequences"):
        predict(MODEL, PROFILE, CLUSTER, config)
    sliced = configured(2, 2, degrees)
    sliced = replace(sliced, options=(*sliced.options, ("slices", "1+1")))
    with pytest.raises(ConfigError, match="cp 2: plans with them have whole sequences; give slices=1"):
        predict(MODEL, replace(PROFILE, positions=64), CLUSTER, sliced)
    found = search(
        MODEL, PROFILE, CLUSTER, 8, Constraints(("dapple", "pipedream"), contexts=(2,), experts=(1,))
    )
    assert [each.what for each in found.omissions] == ["pipedream"]
    assert "positions of a worker need a synchronous scheme" in found.omissions[0].reason


def test_degrees_that_are_tried() -> None:
    def tried(model: Model = MODEL, cluster: Cluster = CLUSTER, **limits: tuple[int, ...]) -> list[Degrees]:
        return degrees_tried(model, PROFILE, cluster, Constraints(**limits))  # type: ignore[arg-type]

    assert tried() == [Degrees(), Degrees(2, 1, 1, 2), Degrees(4, 1, 1, 4)]
    # As few shards as experts need beside contexts.
    assert tried(contexts=(1, 2)) == [
        *tried(), Degrees(1, 2, 1, 1), Degrees(1, 2, 1, 2), Degrees(2, 2, 1, 4),
    ]  # fmt: skip
    assert tried(shards=(2, 4), experts=(1, 4)) == [
        Degrees(dp_shard=2),
        Degrees(dp_shard=4),
        Degrees(4, 1, 1, 4),
    ]
    # What nobody asked for is left out where it is refused.
    assert tried(cluster=replace(CLUSTER, devices=2)) == [Degrees(), Degrees(2, 1, 1, 2)]
    assert tried(zero_stages=(1,)) == tried(slices=(2,)) == tried(TIED) == [Degrees()]
    assert tried(replace(MODEL, layers=("dense",) * 8)) == [Degrees()]


LINKED = Cluster(
    "c", 2, 4, 1400.0, Link(0.001, 0.001), Link(0.02, 0.01), allreduce=AllReduce.RING, shared_adapter=True
)


@pytest.mark.parametrize("memory", [1e4, 1400.0])
def test_the_search_finds_the_best_of_all(memory: float) -> None:
    """Every candidate of a small space is simulated: none is better, and none is quicker than its bound."""
    cluster = replace(LINKED, memory_bytes=memory)
    limits = Constraints(("dapple", "chimera"), samples=(1, 2), contexts=(1, 2))
    tried = degrees_tried(MODEL, PROFILE, cluster, limits)
    assert len(tried) == 6
    predictor, best = Predictor(MODEL, PROFILE, cluster), None
    for degrees in tried:
        at = predictor.at(degrees)
        groups, _ = space(MODEL, at.cluster, 8, limits.at(degrees, tried, cluster), degrees=degrees)
        choices = product(groups, Recompute, (Sync.END, Sync.EAGER, Sync.EAGER_OPT), Arrangement, Cutting)
        for group, recompute, sync, arrangement, cuts in choices:
            if not may_cut(MODEL, cuts, group.stages):
                continue
            for zero_stage in group.zero_stages:
                config = Configuration(
                    group.scheme, group.options, group.replicas, group.samples, recompute, sync, arrangement,
                    cuts, zero_stage=zero_stage, degrees=degrees,
                )  # fmt: skip
                play = at.play(config, 8)
                assert play.updates == 1
                if play.fits and (best is None or play.seconds < best.seconds):
                    best = play
    assert best is not None
    found = search(MODEL, PROFILE, cluster, 8, limits, count=1).best[0]
    assert found.seconds == pytest.approx(best.seconds, rel=1e-12)
    assert found.play.configuration.degrees.positions > 1 or memory > 1400


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Cluster, Profile, Configuration]:
    experts = replace(
        EXPERTS,
        weights_bytes=draw(st.sampled_from((0.0, 60.0, 100.0))),
        load=draw(st.sampled_from((1.0, 1.7))),
        sent_bytes=draw(st.sampled_from((0.0, 30.0))),
    )
    block = replace(BLOCK, experts=experts, contexts=draw(st.sampled_from((None, Contexts(40.0, 0.1)))))
    cluster = Cluster(
        "c",
        draw(st.sampled_from((1, 2, 4))),
        4,
        1e6,
        Link(draw(st.sampled_from((0.0, 0.1))), 0.01),
        Link(0.1, draw(st.sampled_from((0.01, 0.5)))),
        allreduce=draw(st.sampled_from(AllReduce)),
        shared_adapter=draw(st.booleans()),
        cores=draw(st.sampled_from((None, 2))),
    )
    profile = replace(PROFILE, layers={"block": block}, op_overhead_seconds=draw(st.sampled_from((0.0, 0.1))))
    limits = Constraints(("dapple", "gpipe", "chimera", "zb-h1", "hanayo"), contexts=(1, 2))
    tried = degrees_tried(MODEL, profile, cluster, limits)
    degrees = draw(st.sampled_from([each for each in tried if each.positions > 1]))
    groups, _ = space(
        MODEL, places(cluster, degrees), 16, limits.at(degrees, tried, cluster), degrees=degrees
    )
    group = draw(st.sampled_from(groups))
    return (
        cluster,
        profile,
        Configuration(
            group.scheme,
            group.options,
            group.replicas,
            group.samples,
            draw(st.sampled_from(Recompute)),
            Sync.EAGER,
            draw(st.sampled_from(Arrangement)),
            degrees=degrees,
        ),
    )


@settings(max_examples=60, deadline=None)
@given(candidates())
def test_no_candidate_beats_its_bound(drawn: tuple[Cluster, Profile, Configuration]) -> None:
    cluster, profile, configuration = drawn
    play = Predictor(MODEL, profile, cluster).play(configuration, 16)
    shape, here = shape_of(registry.scheme(configuration.scheme), configuration.options), play.inputs
    bounds = common(shape, play.stages, play.network, here.cluster, configuration.recompute)
    bound = bounds.bounds(shape.most_stashed)
    assert bound.seconds * play.updates <= play.seconds * (1 + 1e-9)
    assert bound.least_bytes <= max(worker.total for worker in play.memory) * (1 + 1e-9)
    cut_free = CutFreeBound.of(
        shape, here.model, here.profile, configuration.samples, configuration.recompute
    )
    least = cut_free.seconds(shape, HopCosts.of(shape.placement, play.network), play.network)
    assert least * play.updates <= play.seconds * (1 + 1e-9)


def test_a_file_says_what_experts_and_attention_need(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(dumps(PROFILE), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert "[layers.block.experts]" in text
    assert "[layers.dense.contexts]" in text
    assert load_profile(path) == PROFILE
    path.write_text(text.replace("load = 1.0", "load = 0.5"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"layers\.block\.experts\.load=0\.5: the fullest position"):
        load_profile(path)
    for changed, message in (
        ({"count": 0}, "count=0: must be 1 expert or more"),
        ({"forward": 1.5}, "forward=1.5: is a share"),
        ({"weights_bytes": 101.0}, r"experts\.weights_bytes=101: is a part of weights_bytes=100"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(BLOCK, experts=replace(EXPERTS, **changed))
