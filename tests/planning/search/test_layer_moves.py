"""Numbers of cuts with one layer moved, against writing every one of them out."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.planning import LayerProfile, Model, Profile
from counterflow.planning.search.layer_moves import Floats, Ints, Moves
from counterflow.planning.search.worker_cuts import Balance
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import looped


def _written_out(ends: list[int], sources: tuple[int, ...]) -> list[list[int]]:
    found = [ends]
    for source in sources:
        for target in range(len(ends) - 1):
            if target != source:
                sizes = np.diff(ends)
                sizes[source] -= 1
                sizes[target] += 1
                found.append([0, *np.cumsum(sizes).tolist()])
    return found


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=7), st.integers(0, 1000))
def test_each_move_has_the_sums_and_the_maximum_of_its_cuts(sizes: list[int], seed: int) -> None:
    made = np.random.default_rng(seed)
    ends = [0, *np.cumsum(sizes).tolist()]
    layers = np.concatenate(([0.0], np.cumsum(made.random(sum(sizes)))))
    weights, others = made.random((2, len(sizes), 3))
    sources = tuple(stage for stage, size in enumerate(sizes) if size > 1)
    moves = Moves(np.array(ends), sources)

    def seconds(begin: Ints, end: Ints) -> Floats:
        each: Floats = layers[end] - layers[begin]
        return each

    def before(begin: Ints, _end: Ints) -> Floats:
        each: Floats = layers[begin]
        return each

    def of(ends: list[int]) -> tuple[Floats, Floats]:
        begin, end = np.array(ends[:-1]), np.array(ends[1:])
        return seconds(begin, end), before(begin, end)

    cuts = _written_out(ends, sources)
    assert len(moves) == len(cuts)
    assert [moves.after(move).tolist() for move in range(len(moves))] == cuts
    expected = [first @ weights + second @ others for first, second in map(of, cuts)]
    found = moves.sums(expected[0], (seconds, weights), (before, others))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert moves.most(seconds).tolist() == [of(each)[0].max() for each in cuts]


def test_cuts_of_a_deep_model_are_found_in_little_memory() -> None:
    """512 stages of 770 layers on 64 workers: all moves from a worker's stages are 4,088 cuts, of 17 MB."""
    layer = LayerProfile((1.0,), (1.0,), (2.0,), (40.0,), 10.0, 4.0)
    profile = Profile("p", "a device", "2026-01-01", {"end": layer, "block": layer})
    model = Model("deep", ("end", *["block"] * 768, "end"), optimizer_states=1.0)
    balance = Balance(model, profile, looped(64, 8), 128, 1, Recompute.STAGE, 1e9)
    cuts = (*range(2, 517, 2), *range(517, 770))  # stages of two layers, then of one
    tracemalloc.start()
    try:
        found = balance.balanced(cuts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 511
    assert peak < 50e6
