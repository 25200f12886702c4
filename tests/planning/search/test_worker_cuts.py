"""What the search takes as known of cuts and arrangements, against looking at all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.search.space import space
from counterflow.planning.search.worker_cuts import Balance
from counterflow.schedule.cuts import balance, stage_layers
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave

from ...tables import examples

PROFILE = Profile(
    "p",
    "a device",
    "2026-01-01",
    {
        "wide": LayerProfile((1.0,), (1.0,), (2.0,), (40.0,), 10.0, 4.0),
        "heavy": LayerProfile((1.0,), (3.0,), (5.0,), (20.0,), 90.0, 1.0),
    },
)
MODEL = Model("m", ("heavy", *["wide"] * 9, "heavy"), optimizer_states=1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([linear(4), bidirectional(4), wave(2, 2), linear(1)]),
    st.sampled_from(list(Recompute)),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
    st.floats(100.0, 2500.0),
)
def test_what_cannot_fit_is_left_as_looking_for_cuts_would_leave_it(
    placement: Placement, recompute: Recompute, passes: int, samples: int, usable: float
) -> None:
    """Where all workers together have too little, no cuts are looked for: none would have been found."""

    class Thorough(Balance):
        _may_fit = True

    given_ = MODEL, PROFILE, placement, passes, samples, recompute, usable
    cuts = tuple(range(1, placement.stages))
    assert Balance(*given_).fitting(cuts) == Thorough(*given_).fitting(cuts)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("placement", [linear(4), bidirectional(4), wave(2, 2)], ids=str)
def test_cuts_that_fit_are_looked_for(placement: Placement, recompute: Recompute) -> None:
    """In the least memory that any cuts need, they may fit; what is needed grows with the stashes."""
    layers = range(1, len(MODEL.layers))
    for passes in (1, 2, 5):
        given_ = MODEL, PROFILE, placement, passes, 1, recompute
        least = min(
            Balance(*given_, 0.0)._excess(cuts) for cuts in combinations(layers, placement.stages - 1)
        )
        assert Balance(*given_, least)._may_fit
        assert not Balance(*given_, least / 2)._may_fit


def test_what_may_fit_by_hand() -> None:
    """A layer's weights, gradients and states are 30, its stash is 40; buffers are 8."""
    two, three = (Model("m", ("wide",) * n, optimizer_states=1.0) for n in (2, 3))
    for model, usable, fits in (
        # The first stage has two stashes: 30 + 2 · 40 + 8.
        (two, 117.0, False),
        (two, 118.0, True),
        # A layer takes 110 bytes of the first worker, or 70 of the second one: 3 / (1 / 110 + 1 / 70) + 8.
        (three, 136.0, False),
        (three, 137.0, True),
    ):
        assert Balance(model, PROFILE, linear(2), 3, 1, Recompute.NONE, usable)._may_fit is fits


def test_weights_have_two_versions_without_a_flush() -> None:
    """In addition to what fits with a flush, 10 bytes of weights."""
    model = Model("m", ("wide",) * 2, optimizer_states=1.0)
    for synchronous, usable, fits in ((True, 118.0, True), (False, 127.0, False), (False, 128.0, True)):
        given_ = model, PROFILE, linear(2), 3, 1, Recompute.NONE, usable
        assert Balance(*given_, synchronous=synchronous)._may_fit is fits


def of_seconds(*seconds: float) -> tuple[Model, Profile]:
    """Layers of these forwards, with backwards twice as long, which need no memory."""
    layers = {
        str(each): LayerProfile((1.0,), (each,), (2 * each,), (0.0,), 0.0, 0.0) for each in set(seconds)
    }
    return Model("m", tuple(map(str, seconds))), Profile("p", "a device", "2026-01-01", layers)


def longest(seconds: Sequence[float], cuts: Sequence[int], workers: int) -> list[float]:
    """The longest stage of each chunk of ``workers`` stages."""
    stages = [sum(seconds[layers.start : layers.stop]) for layers in stage_layers(cuts, len(seconds))]
    return [max(stages[first : first + workers]) for first in range(0, len(stages), workers)]


@pytest.mark.parametrize(
    ("seconds", "cuts", "longest_stages"),
    [
        # Equal layers: equal stages.
        ([1.0] * 12, (3, 6, 9), (3, 3)),
        # Both stages of 3 in one group, because one in each would make 3 and 3.
        ([1.0] * 10, (2, 4, 7), (2, 3)),
        # The head sets the pace of its group, so the other group has fewer layers: not 2, 2, 3 and 5.
        ([1.0] * 7 + [5.0], (1, 2, 7), (1, 5)),
    ],
)
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_cuts_of_wpipe_by_hand(
    seconds: list[float], cuts: tuple[int, ...], longest_stages: tuple[int, int], micro_batches: int
) -> None:
    """A micro-batch takes the longest stage of both groups, and the second worker their difference once."""
    model, profile = of_seconds(*seconds)
    cluster = Cluster("c", 2, 1, 1e9, Link(0, 0), Link(0, 0))
    options: dict[str, OptionValue] = {"workers": 2, "micro_batches": micro_batches}
    play = Predictor(model, profile, cluster).play(Configuration.of("wpipe", options, replicas=1, samples=1))
    assert play.stages.cuts == cuts
    assert tuple(longest(seconds, cuts, workers=2)) == longest_stages
    first, second = longest_stages
    assert play.seconds == pytest.approx(3 * (micro_batches * (first + second) + second - first))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, 5.0]), min_size=6, max_size=9),
)
def test_no_other_cuts_of_two_chunks_have_a_shorter_period(
    workers: int, more: int, seconds: list[float]
) -> None:
    model, profile = of_seconds(*seconds)
    passes = workers + more
    given_ = model, profile, looped(workers, 2), passes, 1, Recompute.NONE, 1e9
    cuts = Balance(*given_, synchronous=False).balanced(balance(seconds, 2 * workers))

    def period(cuts: tuple[int, ...]) -> float:
        first, second = longest(seconds, cuts, workers)
        return passes * (first + second) + (workers - 1) * abs(first - second)

    every = combinations(range(1, len(seconds)), 2 * workers - 1)
    assert period(cuts) == min(map(period, every))


def test_a_slow_worker_has_fewer_layers_in_the_steady_state() -> None:
    """Of nine equal layers a worker half as fast has three, whatever the number of micro-batches."""
    model, profile = of_seconds(*[1.0] * 9)
    for passes in (1, 8):
        given_ = model, profile, linear(2), passes, 1, Recompute.NONE, 1e9
        slow = Balance(*given_, slowness=(2.0, 1.0), synchronous=False)
        assert slow.balanced((5,)) == (3,)


@pytest.mark.parametrize(("nodes", "devices"), [(8, 1), (1, 8)])
def test_arrangements_are_one_where_a_device_is_a_node_or_all_are(nodes: int, devices: int) -> None:
    alone = Cluster("c", nodes, devices, 1e9, Link(0.1, 0.2), Link(0.3, 0.4))
    predictor = Predictor(MODEL, PROFILE, alone)
    for placement, replicas in product((linear(4), bidirectional(4), wave(2, 4)), (1, 2)):
        found = {predictor.network(placement, replicas, arrangement) for arrangement in Arrangement}
        assert len(found) == 1
    constraints = Constraints(schemes=("dapple", "chimera"), depths=(4,), zero_stages=(0,), cuts=(3, 6, 8))
    groups, _ = space(MODEL, alone, 8, constraints)
    rejections = search(MODEL, PROFILE, alone, 8, constraints).rejections
    assert sum(r.candidates for r in rejections) == len(groups) * len(Recompute)
