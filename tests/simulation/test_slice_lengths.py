"""Lengths of slices against every way to cut short sequences."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from counterflow import ConfigError, balanced_slices


def times(lengths: tuple[int, ...], attention: float, fixed: float) -> list[float]:
    """Times of slices, in the whole sequence's."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    shares = [(begin / ends[-1], end / ends[-1]) for begin, end in pairwise(ends)]
    return [fixed + (1 - fixed - attention) * (e - b) + attention * (e * e - b * b) for b, e in shares]


def ways(positions: int, slices: int) -> list[tuple[int, ...]]:
    """Every way to cut a sequence."""
    cuts = combinations(range(1, positions), slices - 1)
    return [tuple(end - begin for begin, end in pairwise((0, *cut, positions))) for cut in cuts]


def test_the_slowest_slice_is_as_fast_as_it_can_be() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        positions = drawn.randint(1, 12)
        slices, attention = drawn.randint(1, positions), drawn.random()
        found = balanced_slices(positions, slices, attention=attention)
        assert len(found) == slices
        assert sum(found) == positions
        best = min(max(times(way, attention, 0.0)) for way in ways(positions, slices))
        assert max(times(found, attention, 0.0)) == pytest.approx(best), (positions, slices, attention)


def test_the_number_of_slices_is_the_best_one() -> None:
    """TeraPipe's objective, over every number of slices and every way to cut."""
    drawn = random.Random(2)
    for _ in range(60):
        positions, workers, batches = drawn.randint(1, 9), drawn.randint(1, 8), drawn.randint(1, 4)
        attention, fixed = drawn.uniform(0, 0.6), drawn.uniform(0, 0.3)

        def step(
            lengths: tuple[int, ...],
            attention: float = attention,
            fixed: float = fixed,
            batches: int = batches,
            workers: int = workers,
        ) -> float:
            each = times(lengths, attention, fixed)
            return batches * sum(each) + (workers - 1) * max(each)

        found = balanced_slices(
            positions, attention=attention, fixed=fixed, workers=workers, micro_batches=batches
        )
        best = min(step(way) for n in range(1, positions + 1) for way in ways(positions, n))
        assert step(found) == pytest.approx(best)


def test_multiples_and_what_cannot_be_cut() -> None:
    found = balanced_slices(1000, 4, attention=0.5, multiple=64)
    assert sum(found) == 1000
    assert all(length % 64 == 0 for length in found[:-1])
    with pytest.raises(ConfigError, match="slices=5: must be between 1 and 4, the multiples of 64 in 256"):
        balanced_slices(256, 5, multiple=64)
    with_rounding = balanced_slices(256, 2, attention=0.4, fixed=0.6 + 1e-15)
    assert with_rounding == balanced_slices(256, 2, attention=0.4, fixed=0.6)
    with pytest.raises(ConfigError, match="are shares of one time"):
        balanced_slices(256, 2, attention=0.7, fixed=0.4)
    with pytest.raises(ConfigError, match="all must be 1 or more"):
        balanced_slices(0, 1)
