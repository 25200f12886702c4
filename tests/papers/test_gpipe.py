"""GPipe (Huang et al., NeurIPS 2019) as Chimera's Table 2 and WPipe's appendix A.4 describe it."""

from __future__ import annotations

import pytest

from counterflow import Costs
from counterflow.schedule.schemes import gpipe
from counterflow.simulation import simulate

from .reading import EQUAL_SLOTS, grid, staircase

DEPTHS = (1, 2, 3, 4, 5, 8, 12)


def test_chimera_figure_2_staircase() -> None:
    expected = """
        P0  0 1 2 3 . . . . . . . . . d d c c b b a a
        P1  . 0 1 2 3 . . . . . . d d c c b b a a . .
        P2  . . 0 1 2 3 . . . d d c c b b a a . . . .
        P3  . . . 0 1 2 3 d d c c b b a a . . . . . .
    """
    assert staircase(gpipe(stages=4, micro_batches=4)) == grid(expected)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 3)])
def test_chimera_table_2_bubbles(depth: int, micro_batches: int, forward: int, backward: int) -> None:
    result = simulate(gpipe(depth, micro_batches), Costs(forward=forward, backward=backward))
    assert set(result.idle) == {(depth - 1) * (forward + backward)}
    ratio = (depth - 1) / (micro_batches + depth - 1)
    assert result.bubble_ratio == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_chimera_table_2_memory(depth: int, micro_batches: int) -> None:
    result = simulate(gpipe(depth, micro_batches))
    assert set(result.weight_copies) == {1}
    assert set(result.peak_activations) == {micro_batches}


def test_chimera_section_2_bubbles_in_slots() -> None:
    """2(D−1) bubbles, D−1 in the forwards and D−1 in the backwards."""
    assert set(simulate(gpipe(6, 6), EQUAL_SLOTS).idle) == {2 * (6 - 1)}


def test_wpipe_figure_15_two_groups_halve_the_bubble() -> None:
    """Two workers, four partitions in two groups; ops last half as long as those of two partitions."""
    plain = simulate(gpipe(2, 4), Costs(forward=2.0, backward=4.0))
    grouped = simulate(gpipe(2, 4, groups=2), Costs(forward=1.0, backward=2.0))
    assert set(plain.idle) == {6}
    assert set(grouped.idle) == {3}
    assert grouped.schedule.placement.pipes_stages == ((0, 1, 0, 1),)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 3, 8])
def test_wpipe_appendix_a_4_groups_divide_the_idle_time(depth: int, groups: int, extra: int) -> None:
    """1/g for the same model, with at least as many micro-batches as workers."""
    micro_batches = depth + extra
    # One worker's share of the model takes 24 forward and 48 backward in every case.
    plain = simulate(gpipe(depth, micro_batches), Costs(forward=24.0, backward=48.0))
    costs = Costs(forward=24.0 / groups, backward=48.0 / groups)
    grouped = simulate(gpipe(depth, micro_batches, groups), costs)
    assert [idle * groups for idle in grouped.idle] == list(plain.idle)
    assert grouped.busy == plain.busy
    # In chunks of 1/g of a stage: as many activations.
    assert [peak / groups for peak in grouped.peak_activations] == list(plain.peak_activations)


def test_wpipe_appendix_a_4_fewer_micro_batches_than_workers_gain_less() -> None:
    """The first chunk's last forward is then not back when a worker is ready for the second chunk."""
    plain = simulate(gpipe(4, 2), Costs(forward=2.0, backward=4.0))
    grouped = simulate(gpipe(4, 2, groups=2), Costs(forward=1.0, backward=2.0))
    assert plain.idle[0] / 2 < grouped.idle[0] < plain.idle[0]
