"""Computed orders of plans: they win by what they take, fit, and are played like any other."""

from __future__ import annotations

from dataclasses import replace

import pytest

import counterflow as cf
from counterflow.planning import Cluster, LayerProfile, Link, Model, Predictor, Profile
from counterflow.planning.cost.stages import Cutting
from counterflow.planning.orders import SYNTHESIZED, Orders, compute_orders, with_orders
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.search.search_result import SearchResult
from counterflow.planning.why import why
from counterflow.schedule.modes import Recompute
from counterflow.synthesis import Objective


def layer(forward: float, weights: float) -> LayerProfile:
    return LayerProfile(
        (1.0, 2.0), (forward, 2 * forward), (1.7 * forward, 3.4 * forward), (10.0, 20.0), weights, 2.0
    )


LAYERS = {"embedding": layer(0.4, 50.0), "block": layer(1.0, 40.0), "head": layer(0.9, 60.0)}
PROFILE = Profile("p", "a device", "2026-01-01", LAYERS, op_overhead_seconds=0.01)
MODEL = Model("m", ("embedding", *["block"] * 15, "head"))
CLUSTER = Cluster("c", 4, 1, 1200.0, Link(0, 0), Link(0.3, 0.2))
WANTED = Constraints(
    schemes=("dapple", "zb-h1", "v-half"), depths=(4,), samples=(1,), recompute=(Recompute.NONE,)
)


def computed(
    model: Model = MODEL, cluster: Cluster = CLUSTER, wanted: Constraints = WANTED
) -> tuple[SearchResult, Orders]:
    found = search(model, PROFILE, cluster, 8, wanted)
    return found, compute_orders(found, wanted, moves=200)


def test_an_order_that_wins_is_a_plan_like_any_other() -> None:
    found, orders = computed()
    best = orders.best
    assert best is not None
    assert orders.named is found.best[0]
    assert orders.gain == pytest.approx(1 - best.seconds / found.best[0].seconds)
    assert 0.01 < orders.gain < 0.5
    for one in orders.computed:
        cf.check(one.play.schedule)
        assert one.bound_seconds <= one.seconds
        assert one.play.fits
        assert one.synthesis.objective is Objective.MAKESPAN
        # Played afresh, as a file of the order and its cuts would be, it takes the same.
        again = Predictor(MODEL, PROFILE, CLUSTER).play_order(one.play.configuration, one.play.schedule, 8)
        assert again.seconds == pytest.approx(one.seconds)
    ranked = with_orders(found, orders)
    assert ranked.best[0].play is best.play
    assert len(ranked.best) == len(found.best)
    assert [p.play.configuration.scheme for p in ranked.of_schemes] == [
        SYNTHESIZED,
        *(p.play.configuration.scheme for p in found.of_schemes),
    ]
    explained = why(ranked)
    assert explained.second is found.of_schemes[0]
    parts = explained.parts
    assert sum(getattr(parts, name) for name in type(parts).__slots__) == pytest.approx(best.seconds)


def test_workers_that_share_cores() -> None:
    cluster = replace(CLUSTER, nodes=1, devices=4, inside=Link(0.3, 0.2), cores=2)
    found, orders = computed(cluster=cluster)
    assert orders.named is found.best[0]
    for order in orders.computed:
        assert order.bound_seconds <= order.seconds
        assert order.seconds >= sum(order.play.timing.work) / 2


def test_the_same_moves_compute_the_same_orders() -> None:
    first, again = (computed()[1] for _ in range(2))
    assert [one.seconds for one in first.computed] == [one.seconds for one in again.computed]


def test_cuts_and_order_are_improved_in_turns() -> None:
    model = Model("m", ("embedding", *["block"] * 7, "head"))
    profile = replace(PROFILE, layers=LAYERS | {"head": layer(2.4, 60.0)})
    wanted = replace(WANTED, schemes=("dapple",))
    found = search(model, profile, CLUSTER, 8, wanted)
    free = compute_orders(found, wanted, moves=200)
    kept = compute_orders(found, replace(wanted, cuts=found.best[0].play.stages.cuts), moves=200)
    assert free.best is not None
    assert free.best.recut
    assert free.best.play.stages.cuts != found.best[0].play.stages.cuts
    assert free.best.seconds < kept.computed[0].seconds
    assert not any(one.recut for one in kept.computed)


def test_memory_that_a_plan_has_left_is_used_and_no_more() -> None:
    tight, dapple = replace(CLUSTER, memory_bytes=1060.0), replace(WANTED, schemes=("dapple",))
    found, orders = computed(cluster=tight, wanted=dapple)
    assert orders.computed
    for one in orders.computed:
        assert one.play.fits
        assert max(worker.total for worker in one.play.memory) <= tight.usable_bytes
    loose = computed(wanted=dapple)[1]
    assert loose.computed[0].seconds < orders.computed[0].seconds < found.best[0].seconds


def test_what_cannot_win_is_told_and_not_computed() -> None:
    wanted = replace(WANTED, recompute=(Recompute.NONE, Recompute.STAGE))
    found, orders = computed(wanted=wanted)
    assert {one.play.configuration.recompute for one in orders.computed} == {Recompute.NONE}
    told = [omission for omission in orders.omissions if "recompute stage" in omission.what]
    assert len(told) == 4  # two placements, whole and split
    for omission in told:
        bound = float(omission.reason.split()[7])
        assert "no order of it takes less than" in omission.reason
        assert bound >= found.best[0].seconds * 0.999
    nothing = Orders(found.best[0], (), (), stopped=False)
    assert nothing.best is None
    assert nothing.gain == 0
    assert with_orders(found, nothing) is found


def test_without_a_barrier_the_steady_step_is_ranked_and_made_small() -> None:
    model = replace(MODEL, config={"pipeline": {"barrier": False, "clip_norm": 0.0}})
    wanted = replace(WANTED, cuts=Cutting.EVEN)
    found, orders = computed(model, wanted=wanted)
    assert [p.seconds for p in found.of_schemes] == [p.play.steady_seconds for p in found.of_schemes]
    with_barrier = search(MODEL, PROFILE, CLUSTER, 8, wanted)
    assert found.best[0].seconds < 0.99 * with_barrier.best[0].seconds
    for one in orders.computed:
        assert one.synthesis.objective is Objective.STEADY
        assert one.bound_seconds <= one.seconds == one.play.steady_seconds
    clipped = replace(MODEL, config={"pipeline": {"barrier": False}})
    for plan in search(clipped, PROFILE, CLUSTER, 8, wanted).of_schemes:
        assert plan.seconds == pytest.approx(plan.play.simulation.steady_step_clipped)
