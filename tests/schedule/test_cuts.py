"""Cutting layers into stages: literal cuts, every cut tried by brute force, what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.errors import ConfigError
from counterflow.schedule.cuts import balance, explicit, stage_layers

Rank = tuple[Fraction, Fraction, tuple[int, ...]]


def rank(costs: Sequence[float], cuts: tuple[int, ...]) -> Rank:
    """What ``balance`` minimises, in exact arithmetic."""
    exact = [Fraction(cost) for cost in costs]
    sums = [sum(exact[a:b], Fraction()) for a, b in pairwise((0, *cuts, len(costs)))]
    return max(sums), sum((s * s for s in sums), Fraction()), cuts


@pytest.mark.parametrize(
    ("costs", "stages", "cuts"),
    [
        ([1, 1, 1, 1], 1, ()),
        ([1, 1, 1, 1], 2, (2,)),
        ([1, 1, 1, 1], 4, (1, 2, 3)),
        # An embedding that costs nothing and a head of 2 blocks: the last stage has fewer blocks.
        ([0, 1, 1, 1, 1, 1, 1, 2], 2, (5,)),
        ([0, 1, 1, 1, 1, 1, 1, 2], 4, (3, 5, 7)),
        # The head alone sets the limit; the rest is still spread evenly.
        ([1, 1, 1, 1, 1, 1, 9], 3, (3, 6)),
        # 0.1 + 0.2 is not 0.3 in floats: sums are exact, so the cut does not depend on rounding.
        ([0.1, 0.2, 0.3, 0.6], 2, (3,)),
        ([0, 0, 0], 2, (1,)),
    ],
)
def test_literal_cuts(costs: list[float], stages: int, cuts: tuple[int, ...]) -> None:
    assert balance(costs, stages) == cuts


costs_and_stages = st.lists(
    st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e6)), min_size=1, max_size=8
).flatmap(lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs))))


@settings(deadline=None)
@given(costs_and_stages)
def test_no_other_cut_is_better(case: tuple[list[float], int]) -> None:
    costs, stages = case
    every = combinations(range(1, len(costs)), stages - 1)
    assert balance(costs, stages) == min(rank(costs, cuts) for cuts in every)[2]


@settings(deadline=None)
@given(layers=st.integers(1, 60), data=st.data())
def test_equal_layers_differ_by_at_most_one(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = [len(own) for own in stage_layers(balance([3.5] * layers, stages), layers)]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)  # the first stages hold the most activations


def test_a_deep_model_in_many_stages() -> None:
    cuts = balance([0.01, *[1.0] * 768, 3.3], 64)
    assert len(cuts) == 63
    assert max(map(len, stage_layers(cuts, 770))) == 13


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        (
            [1, 1],
            3,
            "a model of 2 layers for 3 stages: every stage needs at least one layer; choose at most 2 stages",
        ),
        ([], 1, "a model of 0 layers for 1 stage: .* the model has no layers"),
        ([1, 1], 0, "stages=0: must be 1 or more"),
        ([1, -1], 2, "cost of layer 1 is -1: must be a finite number, 0 or more"),
        ([float("nan")], 1, "cost of layer 0 is nan"),
        ([1, float("inf")], 1, "cost of layer 1 is inf"),
    ],
)
def test_costs_that_are_refused(costs: list[float], stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance(costs, stages)


def test_the_users_own_cuts() -> None:
    assert explicit([1, 4], layers=6, stages=3) == (1, 4)
    assert explicit([], layers=6, stages=1) == ()


@pytest.mark.parametrize(
    ("cuts", "stages", "message"),
    [
        ([2], 3, "cuts=[2]: 1 cuts make 2 stages, not 3; give 2"),
        ([0, 2], 3, "cuts=[0, 2]: stage 1 begins at layer 0; cuts must increase and lie between 1 and 5"),
        ([2, 2], 3, "cuts=[2, 2]: stage 2 begins at layer 2"),
        ([3, 2], 3, "cuts=[3, 2]: stage 2 begins at layer 2"),
        ([3, 6], 3, "cuts=[3, 6]: stage 2 begins at layer 6"),
        ([1, 2, 3, 4, 5, 6], 7, "a model of 6 layers for 7 stages"),
    ],
)
def test_cuts_that_are_refused(cuts: list[int], stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        explicit(cuts, layers=6, stages=stages)
