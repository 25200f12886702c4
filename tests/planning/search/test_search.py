"""The search against brute force, its bounds against simulations, its space against the registry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import ConfigError
from counterflow.errors import PlanError
from counterflow.planning import (
    Arrangement,
    Cluster,
    Configuration,
    LayerProfile,
    LayerTie,
    Link,
    Model,
    NodeKind,
    Predictor,
    Profile,
)
from counterflow.planning.cost.device_placement import network
from counterflow.planning.cost.stages import Cuts, Cutting, may_cut
from counterflow.planning.play import Play
from counterflow.planning.search.bounds import common
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.cut_free_bound import CutFreeBound
from counterflow.planning.search.node_orders import node_orders
from counterflow.planning.search.path_bounds import HopCosts
from counterflow.planning.search.search import search
from counterflow.planning.search.shape import shape_of
from counterflow.planning.search.shared_bounds import SharedBounds
from counterflow.planning.search.slicings import slicings_of
from counterflow.planning.search.space import COPIES, space
from counterflow.planning.search.sync_free_bound import SyncFreeBounds, sync_free_seconds
from counterflow.planning.why import why
from counterflow.schedule import registry
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.placement import linear
from counterflow.schedule.scheme import MICRO_BATCHES, Option, Scheme
from counterflow.schedule.schemes import dapple, pipedream
from counterflow.schedule.workload import plain

from ...tables import WHOLE, examples

SIZES = (1.0, 2.0, 4.0)


def layer(forward: float, weights: float, output: float, saved: float) -> LayerProfile:
    """Twice the samples take 1.6 times as long: larger micro-batches pay."""
    return LayerProfile(
        SIZES,
        tuple(forward * 1.6**i for i in range(3)),
        tuple(1.9 * forward * 1.6**i for i in range(3)),
        tuple(saved * n for n in SIZES),
        weights,
        output,
    )


PROFILE = Profile(
    "p",
    "a device",
    "2026-01-01",
    {"block": layer(0.5, 100.0, 4.0, 20.0), "head": layer(0.8, 150.0, 1.0, 30.0)},
    update_seconds_per_byte=1e-4,
    op_overhead_seconds=0.07,
    step_overhead_seconds=0.3,
)
WITH_SIZES = replace(
    PROFILE,
    layers={
        "block": replace(PROFILE.layers["block"], parameter_bytes=(60.0, 3.0, 30.0, 7.0)),
        "head": replace(PROFILE.layers["head"], parameter_bytes=(150.0,)),
    },
)
SLICED = replace(
    PROFILE,
    positions=64,
    layers={
        "block": replace(PROFILE.layers["block"], attention_share=0.4, fixed_share=0.01, state_bytes=4.0),
        "head": replace(PROFILE.layers["head"], fixed_share=0.02),
    },
    op_overhead_seconds=0.01,
)
"""A profile that knows what slices cost."""
MODEL = Model("m", (*["block"] * 7, "head"), optimizer_states=1.0)
CLUSTER = Cluster(
    "c",
    nodes=2,
    devices=2,
    memory_bytes=1500.0,
    inside=Link(0.01, 0.01),
    between=Link(0.05, 0.02),
    reserve_bytes=100.0,
    shared_adapter=True,
    sync_slowdown=0.1,
)


def unequal(slowness: float, memory_bytes: float, devices: int | None = None) -> Cluster:
    """Two nodes like those of ``CLUSTER`` and two that are slower, with other links and other memory."""
    kinds = (
        NodeKind("plain", 1 if devices is None else 2),
        NodeKind(
            "other", 1 if devices is None else 2, devices, memory_bytes, slowness, between=Link(0.1, 0.03)
        ),
    )
    return replace(CLUSTER, nodes=sum(kind.nodes for kind in kinds), kinds=kinds)


def everything(
    model: Model, cluster: Cluster, mini_batch: int, constraints: Constraints, profile: Profile = PROFILE
) -> Iterator[tuple[str, Play]]:
    """Every candidate of the space played, one after the other, with nothing pruned."""
    predictor = Predictor(model, profile, cluster)
    slicings = slicings_of(model, profile, constraints.slices)
    groups, _ = space(model, cluster, mini_batch, constraints, slicings)
    rules: tuple[Cuts, ...] = (constraints.cuts,)
    if constraints.cuts is Cutting.BALANCED:
        rules = (*rules, Cutting.EVEN)
    for group in groups:
        for cuts, recompute, sync, arrangement, nodes, zero_stage in product(
            [rule for rule in rules if may_cut(model, rule, group.stages)],
            constraints.recompute,
            constraints.sync,
            constraints.arrangements,
            node_orders(cluster),
            group.zero_stages,
        ):
            configuration = Configuration(
                group.scheme,
                group.options,
                group.replicas,
                group.samples,
                recompute,
                sync,
                arrangement,
                cuts,
                nodes=nodes,
                zero_stage=zero_stage,
            )
            yield group.scheme, predictor.play(configuration, mini_batch)


FEWER: dict[str, Any] = {"recompute": (Recompute.NONE, Recompute.LAYER), "sync": (Sync.END, Sync.EAGER_OPT)}
"""In some cases, so that others have them all."""


@pytest.mark.parametrize(
    ("cluster", "mini_batch", "constraints"),
    [
        (CLUSTER, 4, Constraints(more_updates=True, stale=True, **FEWER)),
        (replace(CLUSTER, memory_bytes=2500.0), 4, Constraints(more_samples=(3,), stale=True, **FEWER)),
        (replace(CLUSTER, memory_bytes=1150.0, reserve_bytes=0.0), 8 if WHOLE else 4, Constraints()),
        (replace(CLUSTER, between=Link(0.5, 0.5), overlap=False), 4, Constraints(cuts=Cutting.EVEN, **FEWER)),
        (replace(CLUSTER, cores=1), 6, Constraints(depths=(2, 4), samples=(1, 2, 3), **FEWER)),
        (replace(CLUSTER, nodes=1, devices=4), 6, Constraints(sync=(Sync.END,), schemes=("chimera", "1f1b"))),
        (unequal(0.5, 1100.0), 4, Constraints(schemes=("1f1b", "chimera", "zb-v"), **FEWER)),
        (
            unequal(3.0, 1700.0, devices=1),
            6,
            Constraints(schemes=("hanayo", "1f1b", "pipedream"), **FEWER),
        ),
    ],
)
def test_the_search_finds_what_brute_force_finds(
    cluster: Cluster, mini_batch: int, constraints: Constraints
) -> None:
    plays = list(everything(MODEL, cluster, mini_batch, constraints))
    fitting = [(scheme, play) for scheme, play in plays if play.fits]
    found = search(MODEL, PROFILE, cluster, mini_batch, constraints, count=3)
    assert found.best[0].seconds == pytest.approx(min(play.seconds for _, play in fitting))
    best: dict[str, float] = {}
    for scheme, play in fitting:
        best[scheme] = min(play.seconds, best.get(scheme, play.seconds))
    mine = {plan.play.configuration.scheme: plan.seconds for plan in found.of_schemes}
    assert mine == pytest.approx(best)
    # The next best: a plan is the quickest sync mode and the better cuts of a configuration, and arrangements
    # between which no message and no all-reduce differs are one.
    alike: dict[object, float] = {}
    for _, play in fitting:
        c = play.configuration
        key = (c.scheme, c.options, c.replicas, c.samples, c.recompute, c.zero_stage, play.network)
        alike[key] = min(play.seconds, alike.get(key, play.seconds))
    assert [plan.seconds for plan in found.best] == pytest.approx(sorted(alike.values())[:3])
    assert all(plan.play.fits for plan in (*found.best, *found.of_schemes))
    # More memory: what is quickest of all, if that does not fit.
    quickest = min(play.seconds for _, play in plays)
    if found.in_more_memory is None:
        assert quickest == pytest.approx(found.best[0].seconds)
    else:
        assert found.in_more_memory.seconds == pytest.approx(quickest)
        assert not found.in_more_memory.play.fits
    for rejected in found.rejections:
        assert rejected.candidates == rejected.too_large + rejected.slower + rejected.simulated


def test_tied_and_frozen_weights_are_searched_like_all_others() -> None:
    """The bounds know them: brute force finds the same, and no asynchronous scheme is tried."""
    half = replace(PROFILE, layers={k: replace(v, frozen_bytes=60.0) for k, v in PROFILE.layers.items()})
    model = replace(MODEL, ties=(LayerTie((0, 7), 40.0), LayerTie((2, 3), 20.0)))
    constraints = Constraints(stale=True, schemes=None, depths=(2, 4), **FEWER)
    cluster = replace(CLUSTER, memory_bytes=1000.0)
    plays = [p for _, p in everything(model, cluster, 4, constraints, half) if p.fits]
    found = search(model, half, cluster, 4, constraints, count=1)
    assert found.best[0].seconds == pytest.approx(min(play.seconds for play in plays))
    assert all(plan.play.schedule.synchronous for plan in found.of_schemes)
    assert {o.what for o in found.omissions if "shared weights need a synchronous scheme" in o.reason} == {
        "pipedream",
        "pipedream-2bw",
        "wpipe",
    }


def test_slices_are_searched_like_all_others() -> None:
    """Brute force finds the same; they win where micro-batches are few, and where memory is short."""
    for memory, constraints in (
        (4000.0, Constraints(depths=(4,), recompute=(Recompute.NONE,), sync=FEWER["sync"])),
        (900.0, Constraints(depths=(2, 4), schemes=("1f1b", "zb-v", "chimera"), slices=(1, 3, 8), **FEWER)),
        (4000.0, Constraints(depths=(4,), schemes=("gpipe", "zb-h1", "hanayo"), slices=(2,))),
    ):
        cluster = replace(CLUSTER, memory_bytes=memory)
        plays = [play for _, play in everything(MODEL, cluster, 2, constraints, SLICED) if play.fits]
        found = search(MODEL, SLICED, cluster, 2, constraints, count=1)
        assert found.best[0].seconds == pytest.approx(min(play.seconds for play in plays))
        assert "slices" in dict(found.best[0].play.configuration.options)
    whole = search(MODEL, SLICED, CLUSTER, 2, Constraints(depths=(4,), slices=(1,)), count=1)
    sliced = search(MODEL, SLICED, CLUSTER, 2, Constraints(depths=(4,)), count=1)
    assert sliced.best[0].seconds < whole.best[0].seconds
    with pytest.raises(ConfigError, match="profile p has no positions"):
        search(MODEL, PROFILE, CLUSTER, 2, Constraints(slices=(2,)))
    with pytest.raises(ConfigError, match="a sequence has 64 positions; give fewer slices"):
        search(MODEL, SLICED, CLUSTER, 2, Constraints(slices=(65,)))


def test_pruning_happens() -> None:
    found = search(MODEL, PROFILE, CLUSTER, 8, count=1)
    assert sum(r.slower for r in found.rejections) > sum(r.simulated for r in found.rejections)


@cache
def groups_by_scheme(nodes: int, mini_batch: int, *, sliced: bool) -> dict[str, list[Any]]:
    """The space on a cluster of so many nodes; it is the same whatever their memory and links."""
    found: dict[str, list[Any]] = {}
    constraints = Constraints(depths=(2, 4, 8), more_samples=(3,), more_updates=True)
    slicings = ((1,), (1,) * 3, (30, 20, 14)) if sliced else ((1,),)
    groups, _ = space(MODEL, replace(CLUSTER, nodes=nodes), mini_batch, constraints, slicings)
    for group in groups:
        found.setdefault(group.scheme, []).append(group)
    return found


@st.composite
def candidates(draw: st.DrawFn, *, sliced: bool = False) -> tuple[Cluster, Configuration]:
    """Any scheme and options on a cluster of four nodes of two."""
    cluster = replace(
        CLUSTER,
        nodes=4,
        memory_bytes=draw(st.sampled_from([1000.0, 1500.0, 4000.0])),
        between=Link(draw(st.floats(0, 0.5)), draw(st.floats(0, 0.3))),
        overlap=draw(st.booleans()),
        sync_slowdown=draw(st.sampled_from([0.0, 0.3])),
    )
    if draw(st.booleans()):
        slow, small = draw(st.floats(0.3, 4.0)), draw(st.sampled_from([900.0, 1500.0, None]))
        few = draw(st.integers(1, 3))
        kinds = NodeKind("plain", 4 - few), NodeKind("other", few, None, small, slow)
        cluster = replace(cluster, kinds=kinds)
    by_scheme = groups_by_scheme(cluster.nodes, draw(st.sampled_from([8, 16, 24])), sliced=sliced)
    group = draw(st.sampled_from(by_scheme[draw(st.sampled_from(sorted(by_scheme)))]))
    return cluster, Configuration(
        group.scheme,
        group.options,
        group.replicas,
        group.samples,
        draw(st.sampled_from(list(Recompute))),
        draw(st.sampled_from(list(Sync))),
        draw(st.sampled_from(list(Arrangement))),
        nodes=draw(st.sampled_from(node_orders(cluster))),
        zero_stage=draw(st.sampled_from(group.zero_stages)),
    )


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(
    st.one_of(
        st.tuples(candidates(), st.sampled_from([PROFILE, WITH_SIZES])),
        st.tuples(candidates(sliced=True), st.just(SLICED)),
    )
)
def test_no_candidate_beats_its_bound(drawn: tuple[tuple[Cluster, Configuration], Profile]) -> None:
    (cluster, configuration), profile = drawn
    predictor = Predictor(MODEL, profile, cluster)
    play = predictor.play(configuration)
    shape = shape_of(registry.scheme(configuration.scheme), configuration.options)
    where = configuration.replicas, configuration.arrangement
    links = network(cluster, shape.placement, *where, nodes=configuration.nodes)
    assert links == play.network
    bound = common(
        shape,
        play.stages,
        links,
        cluster,
        configuration.recompute,
        update_seconds_per_byte=1e-4,
        step_overhead_seconds=0.3,
        sharded=play.sharded,
    ).bounds(shape.most_stashed, configuration.zero_stage, shape.most_in_flight)
    assert bound.seconds_in_any_memory <= play.seconds * (1 + 1e-9)
    cut_free = CutFreeBound.of(shape, MODEL, profile, configuration.samples, configuration.recompute)
    least = cut_free.seconds(shape, HopCosts.of(shape.placement, links), links)
    assert least <= bound.seconds_in_any_memory * (1 + 1e-9)
    assert sync_free_seconds(play) <= play.seconds * (1 + 1e-9)
    assert bound.least_bytes <= max(w.total for w in play.memory) * (1 + 1e-9)
    assert bound.too_many_bytes <= 0 or not play.fits
    if play.fits:
        assert bound.seconds <= play.seconds * (1 + 1e-9)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(candidates())
def test_shapes_are_those_of_the_schedules(drawn: tuple[Cluster, Configuration]) -> None:
    _, configuration = drawn
    known = registry.scheme(configuration.scheme)
    schedule = registry.build(configuration.scheme, dict(configuration.options))
    shape = shape_of(known, configuration.options)
    assert shape.placement == schedule.placement
    assert shape.synchronous == known.synchronous
    passes = [0.0] * schedule.pipes
    for op in schedule.ops():
        if op.kind is OpKind.FORWARD and op.stage == 0:
            passes[op.pipe] += op.work / schedule.periods
    assert list(shape.passes) == passes


def test_mixpipe_s_case_is_placed_as_the_paper_places_it() -> None:
    """Figure 5: D=4, W=2, two servers of 4, slow between: all copies of a stage in one server."""
    servers = Cluster("two servers", 2, 4, 1e6, Link(1e-3, 1e-4), Link(5e-3, 1e-2), shared_adapter=True)
    wanted = Constraints(schemes=("mixpipe",), depths=(4,), samples=(1,))
    found = search(MODEL, PROFILE, servers, 8, wanted, count=5)
    assert found.best[0].play.configuration.arrangement is Arrangement.COPIES_INSIDE
    # Where messages cost more than gradients, the pipeline stays inside.
    heavy = replace(PROFILE, layers={k: replace(v, output_bytes=2000.0) for k, v in PROFILE.layers.items()})
    found = search(MODEL, heavy, servers, 8, wanted, count=5)
    assert found.best[0].play.configuration.arrangement is Arrangement.PIPELINE_INSIDE


def test_constraints_are_kept() -> None:
    wanted = Constraints(
        schemes=("dapple", "hanayo"), depths=(2,), samples=(2,), recompute=(Recompute.STAGE,)
    )
    found = search(MODEL, PROFILE, replace(CLUSTER, memory_bytes=5000.0), 8, wanted)
    for plan in (*found.best, *found.of_schemes):
        configuration = plan.play.configuration
        assert configuration.scheme in ("dapple", "hanayo")
        assert (plan.play.schedule.workers, configuration.samples) == (2, 2)
        assert configuration.recompute is Recompute.STAGE


def test_schemes_without_a_flush_are_tried_when_asked_for_and_never_on_one_worker() -> None:
    stale = {"pipedream", "pipedream-2bw", "wpipe"}
    flushed = search(MODEL, PROFILE, CLUSTER, 8)
    assert all(plan.play.schedule.synchronous for plan in flushed.of_schemes)
    assert {
        o.what for o in flushed.omissions if "only tried where stale plans are allowed" in o.reason
    } == stale
    groups, omissions = space(MODEL, CLUSTER, 8, Constraints(stale=True))
    assert stale <= {group.scheme for group in groups}
    assert not stale & {omission.what for omission in omissions}
    assert all(group.depth > 1 for group in groups if group.scheme in stale)
    groups, _ = space(MODEL, CLUSTER, 8, Constraints(schemes=("pipedream-2bw",)))
    assert {group.depth for group in groups} == {2, 4}
    with pytest.raises(PlanError, match="one worker has no bubbles to save; no candidate at depth 1"):
        search(MODEL, PROFILE, CLUSTER, 8, Constraints(schemes=("wpipe",), depths=(1,)))


def test_the_user_s_own_micro_batch_is_tried() -> None:
    groups, _ = space(MODEL, CLUSTER, 12, Constraints(more_samples=(3,)))
    assert {g.samples for g in groups if g.scheme != "pipedream"} == {1, 2, 3, 4}
    assert all(12 % (g.replicas * g.samples) == 0 for g in groups)


@pytest.mark.parametrize(
    ("mini_batch", "constraints", "message"),
    [
        (0, Constraints(), "mini_batch=0: must be 1 or more"),
        (8, Constraints(depths=(3,)), "depth=3: must divide the 4 devices of cluster c; legal: 1, 2, 4"),
        (8, Constraints(schemes=("chimaera",)), "did you mean 'chimera'"),
        (8, Constraints(samples=(0,)), "micro_batch=0: must be 1 or more samples"),
    ],
)
def test_impossible_constraints_are_refused(mini_batch: int, constraints: Constraints, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(MODEL, PROFILE, CLUSTER, mini_batch, constraints)


def test_where_nothing_fits_every_scheme_says_what_it_needs() -> None:
    tiny = replace(CLUSTER, memory_bytes=200.0)
    with pytest.raises(PlanError, match=r"has 100 B (?s:.*)dapple: needs at least 762 B"):
        search(MODEL, PROFILE, tiny, 8)
    with pytest.raises(PlanError, match="chimera: needs an even depth; no candidate at depth 1"):
        search(MODEL, PROFILE, CLUSTER, 8, Constraints(schemes=("chimera",), depths=(1,)))


def test_parts_of_the_space_without_a_candidate_are_told() -> None:
    _, omissions = space(MODEL, replace(CLUSTER, nodes=16), 48, Constraints(samples=(5, 12), stale=True))
    assert [(o.what, o.reason) for o in omissions][:4] == [
        ("depth 1", "a mini-batch of 48 cannot be divided evenly among 32 replicas"),
        ("depth 2", "a replica's share of 3 samples cannot be cut into micro-batches of 5, 12"),
        ("depth 4", "a replica's share of 6 samples cannot be cut into micro-batches of 5, 12"),
        ("depths 16, 32", "more workers than the model's 8 layers"),
    ]
    # Depth 8 is left: a layer for each worker, one micro-batch.
    reasons = {o.what: o.reason for o in omissions[4:]}
    two = ["hanayo", "interleaved", "wpipe", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v"]
    assert sorted(reasons) == sorted([*two, "pipedream-2bw", "dualpipe"])
    assert reasons["wpipe"] == (
        "needs two layers for each worker, and as many micro-batches as workers; no candidate at depth 8"
    )
    assert reasons["zb-v"] == "needs two layers for each worker; no candidate at depth 8"
    with pytest.raises(PlanError, match=r"depth 2: a replica's share of 1 sample cannot"):
        search(MODEL, PROFILE, CLUSTER, 2, Constraints(depths=(2,), samples=(3,)))
    with pytest.raises(PlanError, match=r"^no plan meets the constraints\n  depth 4: a replica's share of 8"):
        search(MODEL, PROFILE, CLUSTER, 8, Constraints(depths=(4,), samples=(3,)))


def test_layers_whose_copies_would_differ_have_one_copy() -> None:
    layers = {**PROFILE.layers, "head": replace(PROFILE.layers["head"], one_copy=True)}
    single = replace(PROFILE, layers=layers)
    model, cluster = Model("m", (*["block"] * 3, "head")), replace(CLUSTER, nodes=1, memory_bytes=1e9)
    limits = Constraints(schemes=("chimera", "dapple"))
    copies = search(model, PROFILE, cluster, 4, limits)
    assert any(plan.play.configuration.scheme == "chimera" for plan in copies.of_schemes)
    result = search(model, single, cluster, 4, limits)
    for plan in result.of_schemes:
        assert plan.play.configuration.replicas == 1
        placement = plan.play.schedule.placement
        assert all(len(placement.copies(stage)) == 1 for stage in range(placement.stages))
    reason = "training changes buffers or weights of head, and each copy would change its own"
    assert [omission.reason for omission in result.omissions if omission.what == COPIES] == [reason]
    with pytest.raises(PlanError, match=f"several copies of a stage: {reason}"):
        search(model, single, cluster, 4, Constraints(depths=(1,)))
    assert (
        search(replace(model, layers=("block",) * 4), single, cluster, 4, limits).omissions
        == copies.omissions
    )


def test_why_the_second_does_not_win() -> None:
    found = search(MODEL, PROFILE, CLUSTER, 8)
    explained = why(found)
    best, second = found.of_schemes[:2]
    parts = [getattr(explained.parts, name) for name in type(explained.parts).__slots__]
    assert sum(parts) == pytest.approx(best.seconds)
    assert explained.second is second
    for change in explained.break_evens:
        changed = [
            replace(plan.play, p2p_scale=change.times).seconds
            if change.what == "messages"
            else replace(plan.play, allreduce_scale=change.times).seconds
            for plan in (best, second)
        ]
        assert changed[0] == pytest.approx(changed[1], rel=1e-6)


def test_the_search_tells_how_far_it_is() -> None:
    told: list[tuple[int, int, str]] = []
    search(MODEL, PROFILE, CLUSTER, 8, progress=lambda *now: told.append(now))
    done = [d for d, _, what in told if what != "bounds"]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]


def test_options_that_count_are_tried_in_steps() -> None:
    """Every value as far as few matter, then steps; each of them builds."""
    model = Model("long", ("block",) * 200)
    wide = replace(CLUSTER, nodes=64, devices=1)
    groups, _ = space(model, wide, 64, Constraints(depths=(4, 64), samples=(1,)))

    def values(scheme: str, depth: int, *names: str) -> list[Any]:
        chosen = [dict(g.options) for g in groups if g.scheme == scheme and g.depth == depth]
        return [tuple(options.get(name) for name in names) for options in chosen]

    assert [v for (v,) in values("gpipe", 4, "groups")] == [*range(1, 9), 12, 16, 24, 32, 48]
    assert [v for (v,) in values("interleaved", 64, "chunks")] == [2, 3]
    assert values("mixpipe", 4, "injected", "early_forwards") == [(2, 0), (2, 1), (4, 0)]
    assert [*registry.scheme("wpipe").planner(4, 12, 20)] == [{"groups": 2}, {"groups": 3}, {"groups": 4}]
    assert [*registry.scheme("wpipe").planner(4, 10, 20)] == [{"groups": 2}]
    planned = [*registry.scheme("mixpipe").planner(6, 12, 48)]
    assert planned[0] == {"injected": 2, "early_forwards": 1, "asymmetric": True}
    assert all("asymmetric" not in options for options in registry.scheme("mixpipe").planner(6, 9, 48))
    coarse = values("mixpipe", 64, "injected", "early_forwards")
    assert coarse[:4] == [(8, 0), (8, 28), (16, 0), (16, 24)]
    assert coarse[-1] == (64, 0)


def test_pipedream_updates_once_a_mini_batch_unless_more_is_allowed() -> None:
    wide = replace(CLUSTER, memory_bytes=1e6)
    once = search(MODEL, PROFILE, wide, 8, Constraints(schemes=("pipedream",)), count=20)
    assert {plan.play.prediction().updates for plan in once.best} == {1}
    often = search(MODEL, PROFILE, wide, 8, Constraints(schemes=("pipedream",), more_updates=True), count=20)
    assert {plan.play.prediction().updates for plan in often.best} == {1, 2, 4, 8}


# --- Schemes that are none of ours ------------------------------------------------------------------------


def _split(stages: int, micro_batches: int) -> Schedule:
    """All forwards, all input gradients, then all weight gradients: what is made late, nothing waits for."""
    kinds = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENTS)
    orders = tuple(
        tuple(Op(kind, stage, (m,)) for kind in kinds for m in range(micro_batches))
        for stage in range(stages)
    )
    options = (("stages", stages), ("micro_batches", micro_batches))
    return Schedule("split", options, plain(linear(stages), micro_batches, split=True), orders)


SPLIT = Scheme("split", _split, "", "", (Option("stages", "", ""), MICRO_BATCHES))


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(("depth", "samples"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("scheme", ["split", "zb-h2", "v-half"])
def test_no_split_candidate_beats_its_bound(
    scheme: str, depth: int, samples: int, recompute: Recompute
) -> None:
    cluster = replace(CLUSTER, nodes=4, between=Link(0.5, 0.3))
    halves = {
        kind: replace(
            layer,
            input_gradient_seconds=tuple(0.4 * b for b in layer.backward_seconds),
            weight_gradients_seconds=tuple(0.7 * b for b in layer.backward_seconds),
        )
        for kind, layer in PROFILE.layers.items()
    }
    with registry.registered(SPLIT):
        groups, _ = space(
            MODEL, cluster, 64, Constraints(schemes=(scheme,), depths=(depth,), samples=(samples,))
        )
        predictor = Predictor(MODEL, replace(PROFILE, layers=halves), cluster)
        for group in groups:
            play = predictor.play(
                Configuration(scheme, group.options, group.replicas, samples, recompute=recompute)
            )
            shared = common(group.shape, play.stages, play.network, cluster, recompute)
            bound = shared.bounds(group.shape.most_stashed, 0, group.shape.most_in_flight)
            cut_free = CutFreeBound.of(group.shape, MODEL, predictor.profile, samples, recompute)
            hops = HopCosts.of(group.shape.placement, play.network)
            least = cut_free.seconds(group.shape, hops, play.network)
            assert 0 < least <= bound.seconds_in_any_memory * (1 + 1e-9)
            assert bound.seconds_in_any_memory <= play.seconds * (1 + 1e-9)
            assert bound.seconds <= play.seconds * (1 + 1e-9) or not play.fits
            assert bound.least_bytes <= max(worker.total for worker in play.memory)


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("concat", ["direct", "forward-doubling", "backward-halving"])
def test_a_closer_bound_of_halves_is_not_above_a_sketch(concat: str, recompute: Recompute) -> None:
    """Both are known without building a schedule; only where every backward is halved it says more."""
    cluster = replace(CLUSTER, nodes=4, between=Link(0.5, 0.3))
    predictor = Predictor(MODEL, PROFILE, cluster)
    wanted = Constraints(schemes=("chimera",), depths=(4,), samples=(2,), options=(("concat", (concat,)),))
    (group, *_), _ = space(MODEL, cluster, 32, wanted)
    play = predictor.play(Configuration("chimera", group.options, group.replicas, 2, recompute=recompute))
    place = (Arrangement.PIPELINE_INSIDE, ()), play.network
    shared, cuts = SharedBounds(predictor), Cutting.BALANCED
    plain = shared.of(group, recompute, *place, cuts=cuts, zero_stage=0).seconds_in_any_memory
    closer = play.step_seconds(shared.of_halves(group, recompute, *place, cuts))
    assert max(plain, closer) <= sync_free_seconds(play) * (1 + 1e-9)
    assert (closer >= plain) is (concat == "backward-halving")
    flowing = Predictor(replace(MODEL, config={"pipeline": {"barrier": False}}), PROFILE, cluster)
    assert SharedBounds(flowing).of_halves(group, recompute, *place, cuts) == 0


def test_candidates_whose_ops_take_the_same_time_share_a_sketch() -> None:
    predictor = Predictor(MODEL, PROFILE, CLUSTER)
    whole = Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, replicas=1, samples=1)
    layer = predictor.play(replace(whole, recompute=Recompute.LAYER))
    plays = [predictor.play(whole), layer, layer.with_zero_stage(1)]
    sync_free = SyncFreeBounds()
    assert sync_free.seconds(plays[1], 2.0, "again") == math.inf
    assert sync_free.seconds(plays[2], 1.0, "again") == math.inf
    none, again, sharded = map(sync_free_seconds, plays)
    assert 2 < none < again == sharded < 1000
    # Within a later limit it is played, once.
    assert [sync_free.seconds(play, 1000.0, "again") for play in (plays[2], plays[1])] == [again] * 2
    assert sync_free.seconds(plays[1], 1.0, "again") == again
    assert sync_free.seconds(plays[0], 1000.0, "none") == none


def test_what_a_scheme_refuses_is_no_candidate() -> None:
    def refusing(stages: int, micro_batches: int) -> Schedule:
        if stages != 4:
            raise ConfigError(f"stages={stages}: must be 4")
        return dapple(stages, micro_batches)

    scheme = replace(SPLIT, name="refusing", build=refusing, needs="four workers")
    with registry.registered(scheme):
        groups, omissions = space(MODEL, CLUSTER, 8, Constraints(schemes=("refusing",)))
        assert {group.depth for group in groups} == {4}
        assert not omissions
        _, omissions = space(MODEL, CLUSTER, 8, Constraints(schemes=("refusing",), depths=(1, 2)))
        assert [o.reason for o in omissions] == ["needs four workers; no candidate at depths 1, 2"]


def test_without_a_flush_a_scheme_has_to_say_what_is_steady() -> None:
    def never(stages: int, periods: int = 8) -> Schedule:
        return replace(pipedream(stages, periods), scheme="never", steady=None)

    known = registry.scheme("pipedream")
    with registry.registered(replace(known, name="never", build=never)):
        configuration = Configuration.of("never", {"stages": 2}, 1, 1)
        with pytest.raises(ConfigError, match="is timed by its steady part"):
            Predictor(MODEL, PROFILE, CLUSTER).play(configuration)
