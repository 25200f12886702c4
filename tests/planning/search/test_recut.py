"""Plans whose layers are moved by simulated steps: never slower, and no further move is faster."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from counterflow.errors import ConfigError
from counterflow.planning import Cluster, LayerProfile, Link, Model, Predictor, Profile
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.task import load_example

Task = tuple[Model, Profile, Cluster, int]


def drawn(rng: Random) -> Task:
    """Four workers of six layers, two replicas over a slow link."""

    def layer() -> LayerProfile:
        forward = rng.choice((0.5, 1.0, 2.0))
        return LayerProfile((1.0,), (forward,), (2 * forward,), (1.0,), rng.choice((1.0, 100.0, 400.0)), 1.0)

    kinds = tuple("abcdef")
    profile = Profile("p", "a device", "2026-01-01", {kind: layer() for kind in kinds})
    model = Model("m", kinds, optimizer_states=2.0)
    between = Link(0.01, rng.choice((0.001, 0.01, 0.05)))
    return model, profile, Cluster("c", 2, 3, 1e6, inside=Link(0.0, 0.0), between=between), 8


@pytest.mark.parametrize("seed", range(8))
def test_no_move_of_a_layer_makes_a_plan_faster(seed: int) -> None:
    task = drawn(Random(seed))
    limits = Constraints(schemes=("dapple", "zb-v", "chimera"), depths=(2, 3))
    rules = search(*task, limits, count=3)
    moved = search(*task, replace(limits, recut=True), count=3)
    seconds = {plan.play.configuration.scheme: plan.seconds for plan in rules.of_schemes}
    assert moved.best[0].seconds <= rules.best[0].seconds
    assert moved.best[0].seconds == min(plan.seconds for plan in moved.of_schemes)
    for plan in moved.of_schemes:
        play = plan.play
        assert plan.seconds == play.seconds <= seconds[play.configuration.scheme]
        predictor = Predictor(*task[:3]).at(play.configuration.degrees)
        layers = len(task[0].layers)
        for stage in range(len(play.stages.cuts)):
            for by in (-1, 1):
                cuts = [*play.stages.cuts]
                cuts[stage] += by
                ends = [0, *cuts, layers]
                if ends[stage] < ends[stage + 1] < ends[stage + 2]:
                    neighbour = replace(play.configuration, cuts=tuple(cuts))
                    assert predictor.play(neighbour, task[3]).seconds >= plan.seconds * (1 - 1e-9)


def test_gradient_sums_move_layers() -> None:
    """The third layer has most weights, and copies of a stage sum its gradients: it goes where these are
    complete first.
    """
    costs = (1.0,), (1.0,), (2.0,), (1.0,)
    layers = {"heavy": LayerProfile(*costs, 400.0, 1.0), "light": LayerProfile(*costs, 1.0, 1.0)}
    profile = Profile("p", "a device", "2026-01-01", layers)
    model = Model("m", ("light", "light", "heavy", *["light"] * 5), optimizer_states=0.0)
    cluster = Cluster("c", 2, 2, 1e6, inside=Link(0.0, 0.0), between=Link(0.0, 0.05))
    task = model, profile, cluster, 4
    limits = Constraints(schemes=("chimera",), depths=(2,), samples=(1,))
    rule, moved = (search(*task, replace(limits, recut=on), count=1).best[0] for on in (False, True))
    assert (rule.play.stages.cuts, moved.play.stages.cuts) == ((4,), (2,))
    explicit = [search(*task, replace(limits, cuts=(cut,)), count=1).best[0].seconds for cut in range(1, 8)]
    assert moved.seconds == min(explicit) < 0.89 * rule.seconds


def test_a_plan_of_a_paper_is_faster() -> None:
    task = load_example("chimera-bert48")
    where = task.model, task.profile, task.cluster, task.mini_batch
    limits = Constraints(schemes=("chimera",), depths=(8,), samples=(8,))
    rule, moved = (search(*where, replace(limits, recut=on), count=1).best[0] for on in (False, True))
    assert moved.seconds < 0.99 * rule.seconds
    assert moved.play.fits


def test_given_cuts_are_not_moved() -> None:
    with pytest.raises(ConfigError, match="recut: cannot be combined with cuts"):
        Constraints(cuts=(2,), recut=True)
