"""Tensor parallelism in plans: a position by hand, and the search over several numbers of positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.common.parallel_degrees import Degrees
from counterflow.errors import ConfigError, PlanError
from counterflow.planning import (
    AllReduce,
    Arrangement,
    Cluster,
    Configuration,
    Division,
    LayerProfile,
    LayerTie,
    Link,
    Model,
    NodeKind,
    Predictor,
    Profile,
    predict,
)
from counterflow.planning.cost.degrees import places
from counterflow.planning.cost.positions import positioned
from counterflow.planning.inputs.cluster import all_reduce
from counterflow.planning.inputs.input_files import dumps, load_profile
from counterflow.planning.search.bounds import common
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.cut_free_bound import CutFreeBound
from counterflow.planning.search.path_bounds import HopCosts
from counterflow.planning.search.search import search
from counterflow.planning.search.shape import shape_of
from counterflow.planning.search.space import space
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.op import B, F, I, W

FREE = Link(0.0, 0.0)
DIVIDED = Division(
    weights=0.75, forward=0.5, backward=0.5, saved=0.4, peaks=0.2, forward_sums=2, backward_sums=2
)
BLOCK = LayerProfile(
    (1.0, 2.0), (0.5, 1.0), (1.0, 2.0), (10.0, 20.0), 100.0, output_bytes=4.0, tensor_parallel=DIVIDED
)
WHOLE = replace(BLOCK, tensor_parallel=None)
PROFILE = Profile("p", "a device", "2026-01-01", {"block": BLOCK, "whole": WHOLE})
MODEL = Model("m", ("block",) * 8)
CLUSTER = Cluster("c", 4, 2, 1e6, FREE, FREE)


def configured(stages: int, micro_batches: int) -> Configuration:
    return Configuration.of("dapple", {"stages": stages, "micro_batches": micro_batches}, 1, 1)


def test_a_step_by_hand() -> None:
    one = configured(4, 4)
    halved = predict(MODEL, PROFILE, CLUSTER, replace(one, degrees=Degrees(tp=2)))
    # Half of each layer's seconds is divided by 2: 3/4 is left. Two blocks a stage, F = 3/4 and B = 3/2.
    assert halved.step_seconds == pytest.approx(7 * 2.25)
    assert predict(MODEL, PROFILE, CLUSTER, one).step_seconds == pytest.approx(7 * 3)
    # Two all-reduces of 4 bytes a layer, of 2 positions: 2·(0.25 + 0.5·4/2) seconds more a forward; backwards
    # have as many.
    linked = replace(CLUSTER, allreduce_inside=Link(0.125, 0.5))
    summing = predict(MODEL, PROFILE, linked, replace(one, degrees=Degrees(tp=2)))
    each = 2 * 2 * (2 * 0.125 + 2 * 0.5 * 4 / 2)
    assert summing.step_seconds == pytest.approx(7 * (2.25 + 2 * each))
    again = replace(one, degrees=Degrees(tp=2), recompute=Recompute.STAGE)
    # Worker 3 computes 4 micro-batches; before, a forward goes down to it, and after, a backward back alone.
    forward, backward = 0.75 + each, 1.5 + each
    expected = 4 * (2 * forward + backward) + 3 * (forward + backward)
    assert predict(MODEL, PROFILE, linked, again).step_seconds == pytest.approx(expected)


def test_memory_by_hand() -> None:
    plain = Cluster("c", 2, 2, 1e6, FREE, FREE)
    found = predict(MODEL, PROFILE, plain, replace(configured(2, 2), degrees=Degrees(tp=2)))
    # 4 layers of 100 · (1 − 3/4 + 3/8) = 62.5 bytes, gradients and Adam's two; 8 of 10 bytes are kept.
    assert [worker.weights for worker in found.memory] == [4 * 62.5 * 4] * 2
    assert found.memory[0].activations == 2 * 4 * 8.0
    assert found.memory[0].buffers == 2 * 4.0


def test_what_is_not_divided_is_whole_at_every_position() -> None:
    found = predict(
        replace(MODEL, layers=("whole",) * 8),
        PROFILE,
        CLUSTER,
        replace(configured(4, 4), degrees=Degrees(tp=2)),
    )
    alone = predict(replace(MODEL, layers=("whole",) * 8), PROFILE, CLUSTER, configured(4, 4))
    assert found.step_seconds == alone.step_seconds
    assert found.memory == alone.memory


def test_of_nodes_that_differ_the_slowest_links_count() -> None:
    kinds = NodeKind("quick", 1), NodeKind("slow", 1, inside=Link(0.5, 0.0))
    two = Cluster("c", 2, 2, 1e6, FREE, FREE, kinds=kinds)
    # Of two positions an all-reduce has two latencies; a block two of them in a forward.
    assert positioned(MODEL, PROFILE, two, Degrees(tp=2)).layer("block").seconds(F, 1) == pytest.approx(
        0.375 + 2 * 2 * 0.5
    )


def test_positions_share_the_way_out_of_a_node() -> None:
    cluster = Cluster("c", 2, 2, 1e6, FREE, Link(0.25, 0.5), shared_adapter=True)
    one = replace(configured(2, 1), degrees=Degrees(tp=2))
    # F = 4 · 3/8, B twice; a message of 4 bytes each way, and of every position at one time.
    assert predict(MODEL, PROFILE, cluster, one).step_seconds == pytest.approx(2 * 4.5 + 2 * (0.25 + 0.5 * 8))
    own = replace(cluster, shared_adapter=False)
    assert predict(MODEL, PROFILE, own, one).step_seconds == pytest.approx(2 * 4.5 + 2 * (0.25 + 0.5 * 4))
    # Gradients of one stage of 8 · 62.5 bytes over two replicas, of both positions at one time.
    two = replace(configured(1, 1), replicas=2, degrees=Degrees(tp=2))
    assert predict(MODEL, PROFILE, cluster, two).step_seconds == pytest.approx(9 + 2 * 0.25 + 2 * 500 / 2)
    assert predict(MODEL, PROFILE, own, two).step_seconds == pytest.approx(9 + 2 * 0.25 + 500 / 2)


def test_split_backwards_sum_in_the_input_gradient() -> None:
    linked = replace(CLUSTER, allreduce_inside=Link(1.0, 0.0))
    layer = positioned(MODEL, PROFILE, linked, Degrees(tp=2)).layer("block")
    assert layer.seconds(B, 1) == pytest.approx(0.75 + 2 * 2)
    assert layer.seconds(I, 1) == pytest.approx(0.375 + 2 * 2)
    assert layer.seconds(W, 1) == pytest.approx(0.375)


def test_dividing_has_its_overhead_and_fewer_samples_their_curve() -> None:
    curved = replace(BLOCK, forward_seconds=(0.5, 0.6), backward_seconds=(1.0, 2.0))
    curved = replace(curved, tensor_parallel=Division(forward=1.0, overhead_seconds=0.25))
    found = positioned(MODEL, replace(PROFILE, layers={"block": curved}), CLUSTER, Degrees(tp=2)).layer(
        "block"
    )
    # Two samples take what one takes whole; one what half of one would: on the line of the first two.
    assert found.forward_seconds == pytest.approx((0.45 + 0.25, 0.5 + 0.25))
    assert found.backward_seconds == pytest.approx((1.25, 2.25))
    assert found.seconds(I, 1) + found.seconds(W, 1) == pytest.approx(1.25)


def test_workers_of_all_positions_share_the_cores() -> None:
    few = Cluster("c", 1, 4, 1e6, FREE, FREE, cores=2)
    whole = predict(MODEL, PROFILE, few, configured(4, 4))
    halved = predict(MODEL, PROFILE, few, replace(configured(2, 4), degrees=Degrees(tp=2)))
    assert whole.step_seconds == pytest.approx(4 * 8 * 1.5 / 2 + 3)  # and some waits of the order
    assert halved.step_seconds == pytest.approx(4 * 8 * 1.5 * 3 / 4 * 2 / 2)
    assert "4 workers of a node share 2 cores" in halved.notes[0]


@pytest.mark.parametrize(
    ("positions", "profile", "model", "message"),
    [
        (3, PROFILE, MODEL, "tensor_parallel=3: must divide the 2 devices of a node of cluster c"),
        (0, PROFILE, MODEL, r"(tp = |tensor_parallel=)0: must be 1 or more"),
        (
            2,
            replace(PROFILE, layers={"block": replace(BLOCK, tensor_parallel=replace(DIVIDED, parts=3))}),
            MODEL,
            "layers of kind 'block' are divided by their 3 parts, which it has to divide",
        ),
        (
            2,
            PROFILE,
            replace(MODEL, config={"pipeline": {"zero_stage": 1}}),
            "zero_stage = 1 of the profiled",
        ),
        (2, PROFILE, replace(MODEL, ties=(LayerTie((0, 7), 4.0),)), "share a weight with others"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    positions: int, profile: Profile, model: Model, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Predictor(model, profile, CLUSTER).at(Degrees(tp=positions))
    with pytest.raises(ConfigError, match=message):
        search(model, profile, CLUSTER, 8, Constraints(tensor_parallel=(positions,)))


def test_shares_are_shares() -> None:
    with pytest.raises(ConfigError, match=r"weights=1\.5: is a share; must be 1 or less"):
        Division(weights=1.5)
    with pytest.raises(ConfigError, match="forward_sums=-1: must be"):
        Division(forward_sums=-1)


LINKED = Cluster(
    "c", 2, 4, 3000.0, Link(0.001, 0.001), Link(0.02, 0.01), allreduce=AllReduce.RING, shared_adapter=True
)


@pytest.mark.parametrize("memory", [3000.0, 900.0])
def test_several_numbers_of_positions_are_searched_like_each_alone(memory: float) -> None:
    cluster = replace(LINKED, memory_bytes=memory)
    divided = replace(DIVIDED, weights=1.0, forward=1.0, backward=1.0)
    profile = replace(PROFILE, layers={"block": replace(BLOCK, tensor_parallel=divided)})
    schemes = ("dapple", "gpipe", "chimera")
    alone = []
    for positions in (1, 2, 4):
        try:
            alone.append(
                search(
                    MODEL, profile, cluster, 4, Constraints(schemes, tensor_parallel=(positions,)), count=10
                )
            )
        except PlanError:
            assert memory < 3000
    together = search(MODEL, profile, cluster, 4, Constraints(schemes, tensor_parallel=(1, 2, 4)), count=10)
    best = sorted((plan for found in alone for plan in found.best), key=lambda plan: plan.seconds)[:10]
    assert [plan.seconds for plan in together.best] == [plan.seconds for plan in best]
    assert {plan.play.configuration.degrees.tp for plan in together.best} & {2, 4}
    for scheme in schemes:
        of_each = [plan for found in alone for plan in found.of_schemes]
        least = min(p.seconds for p in of_each if p.play.configuration.scheme == scheme)
        mine = next(p for p in together.of_schemes if p.play.configuration.scheme == scheme)
        assert mine.seconds == least
        candidates = [
            sum(r.candidates for found in searches for r in found.rejections if r.scheme == scheme)
            for searches in (alone, [together])
        ]
        assert candidates[1] >= candidates[0]


def test_depths_that_only_some_positions_allow_are_told() -> None:
    found = search(MODEL, PROFILE, LINKED, 16, Constraints(("dapple",), depths=(8,), tensor_parallel=(1, 2)))
    assert found.best[0].play.configuration.degrees.tp == 1
    told = [(each.what, each.reason) for each in found.omissions]
    assert told == [("with tensor parallelism over 2, depth 8", "does not divide the 4 places of 2 devices")]
    with pytest.raises(ConfigError, match="depth=3: must divide"):
        search(MODEL, PROFILE, LINKED, 16, Constraints(("dapple",), depths=(3,), tensor_parallel=(1, 2)))


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Cluster, Profile, Configuration]:
    shares = st.sampled_from((0.0, 0.3, 1.0))
    division = Division(
        weights=draw(shares),
        forward=draw(shares),
        backward=draw(shares),
        saved=draw(shares),
        forward_sums=draw(st.integers(0, 2)),
        backward_sums=draw(st.integers(0, 2)),
        sum_bytes=draw(st.sampled_from((None, 30.0))),
    )
    layers = {"block": replace(BLOCK, tensor_parallel=division)}
    overhead = draw(st.sampled_from((0.0, 0.1)))
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
    positions = draw(st.sampled_from((2, 4)))
    profile = replace(PROFILE, layers=layers, op_overhead_seconds=overhead)
    wanted = Constraints(("dapple", "gpipe", "chimera", "zb-h1", "hanayo"), tensor_parallel=(positions,))
    groups, _ = space(MODEL, places(cluster, Degrees(tp=positions)), 16, wanted)
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
            degrees=Degrees(tp=positions),
        ),
    )


@settings(max_examples=60, deadline=None)
@given(candidates())
def test_no_candidate_beats_its_bound(drawn: tuple[Cluster, Profile, Configuration]) -> None:
    cluster, profile, configuration = drawn
    found = search(
        MODEL,
        profile,
        cluster,
        16,
        Constraints(
            (configuration.scheme,),
            samples=(configuration.samples,),
            tensor_parallel=(configuration.degrees.tp,),
        ),
        count=1,
    )
    play = Predictor(MODEL, profile, cluster).play(configuration, 16)
    assert found.best[0].seconds <= play.seconds * (1 + 1e-9)
    shape = shape_of(registry.scheme(configuration.scheme), configuration.options)
    here = play.inputs
    bounds = common(shape, play.stages, play.network, here.cluster, configuration.recompute)
    bound = bounds.bounds(shape.most_stashed)
    assert bound.seconds * play.updates <= play.seconds * (1 + 1e-9)
    assert bound.least_bytes <= max(worker.total for worker in play.memory) * (1 + 1e-9)
    cut_free = CutFreeBound.of(shape, MODEL, here.profile, configuration.samples, configuration.recompute)
    least = cut_free.seconds(shape, HopCosts.of(shape.placement, play.network), play.network)
    assert least * play.updates <= play.seconds * (1 + 1e-9)


def test_all_reduces_of_positions_find_the_links_inside() -> None:
    cluster = Cluster("c", 2, 4, 1e6, Link(1.0, 2.0), FREE, allreduce_inside=Link(0.5, 0.25))
    assert all_reduce(cluster, [4]).seconds(8) == 2 * 2 * 0.5 + 2 * 3 * 0.25 * 8 / 4


def test_a_file_says_what_is_divided(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(dumps(PROFILE), encoding="utf-8")
    assert "[layers.block.tensor_parallel]" in path.read_text(encoding="utf-8")
    assert load_profile(path) == PROFILE
    path.write_text(
        path.read_text(encoding="utf-8").replace("weights = 0.75", "weights = 7.5"), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"layers\.block\.tensor_parallel\.weights=7\.5: is a share"):
        load_profile(path)
