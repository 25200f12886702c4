"""What the search takes as known of cuts and arrangements, against looking at all of them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.planning import Arrangement, Cluster, LayerProfile, Link, Model, Predictor, Profile
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.search.space import space
from counterflow.planning.search.worker_cuts import Balance
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement, bidirectional, linear, wave

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


@pytest.mark.parametrize(("nodes", "devices"), [(8, 1), (1, 8)])
def test_arrangements_are_one_where_a_device_is_a_node_or_all_are(nodes: int, devices: int) -> None:
    alone = Cluster("c", nodes, devices, 1e9, Link(0.1, 0.2), Link(0.3, 0.4))
    predictor = Predictor(MODEL, PROFILE, alone)
    for placement, replicas in product((linear(4), bidirectional(4), wave(2, 4)), (1, 2)):
        found = {predictor.network(placement, replicas, arrangement) for arrangement in Arrangement}
        assert len(found) == 1
    constraints = Constraints(schemes=("dapple", "chimera"), depths=(4,), zero_stages=(0,))
    groups, _ = space(MODEL, alone, 8, constraints)
    rejections = search(MODEL, PROFILE, alone, 8, constraints).rejections
    assert sum(r.candidates for r in rejections) == len(groups) * len(Recompute)
