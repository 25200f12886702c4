"""Plans against the same search with even cuts, and with those that memory did not move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.planning import (
    Arrangement,
    Cluster,
    Configuration,
    LayerProfile,
    Link,
    Model,
    Predictor,
    Profile,
)
from counterflow.planning.cost.stages import Cutting
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.task import EXAMPLES, load_example
from counterflow.schedule.cuts import stage_layers
from counterflow.schedule.modes import Recompute

DEPTHS = {"wpipe-bert768": (16,)}
"""Depths of examples whose search takes minutes otherwise."""


@pytest.mark.table
@pytest.mark.parametrize("example", EXAMPLES)
def test_no_example_is_faster_with_even_cuts(example: str) -> None:
    """The best plan of every scheme."""
    task = load_example(example)
    where = task.model, task.profile, task.cluster, task.mini_batch
    free, even = (
        search(*where, Constraints(stale=True, cuts=cuts, depths=DEPTHS.get(example)), count=1).of_schemes
        for cuts in (Cutting.BALANCED, Cutting.EVEN)
    )
    seconds = {plan.play.configuration.scheme: plan.seconds for plan in free}
    slower = {
        plan.play.configuration.scheme
        for plan in even
        if plan.seconds < seconds[plan.play.configuration.scheme] * (1 - 1e-9)
    }
    assert not slower


def test_wpipe_s_deepest_model_is_faster_with_balanced_cuts() -> None:
    """BERT of 768 layers on 16 workers: 24 layers a stage, and 21 beside the head."""
    task = load_example("wpipe-bert768")
    predictor = Predictor(task.model, task.profile, task.cluster)
    even = replace(
        Configuration.of("wpipe", {"workers": 16, "micro_batches": 16}, replicas=4, samples=8),
        recompute=Recompute.STAGE,
        arrangement=Arrangement.REPLICAS_INSIDE,
        cuts=Cutting.EVEN,
    )
    plays = [predictor.play(replace(even, cuts=cuts), task.mini_batch) for cuts in Cutting]
    assert [play.seconds for play in plays] == pytest.approx([4.628, 4.844], abs=1e-3)
    layers = stage_layers(plays[0].stages.cuts, len(task.model.layers))
    assert list(map(len, layers)) == [25, *[24] * 27, 25, 25, 25, 22]


def test_no_plan_is_slower_in_more_memory() -> None:
    """A schedule holds less than what moves balanced cuts: one micro-batch, and a share of the state."""

    def layer(forward: float, weights: float, output: float) -> LayerProfile:
        return LayerProfile((1.0,), (forward,), (2.4 * forward,), (5.0,), weights, output)

    layers = {"a": layer(0.5, 100.0, 1.0), "b": layer(1.0, 200.0, 1.0), "c": layer(0.5, 200.0, 10.0)}
    profile = Profile("p", "a device", "2026-01-01", layers, update_seconds_per_byte=1e-4)
    model = Model("m", ("a", "b", "c"), optimizer_states=2.0)
    between = Link(0.01, 0.01)
    cluster = Cluster("c", 2, 4, 1700.0, inside=Link(0.0, 0.0), between=between, shared_adapter=True)
    found = [
        search(model, profile, replace(cluster, memory_bytes=memory), 4, Constraints(schemes=("zb-h1",)))
        for memory in (1101.0, 1257.0, 1434.0, 1700.0)
    ]
    assert [result.best[0].play.stages.cuts for result in found] == [(1,)] * 4
    assert len({result.best[0].seconds for result in found}) == 1
