"""GEMS (Jain et al., SC'20) as Chimera's Figure 2 and Table 2 and MixPipe's Table I describe it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from counterflow import Costs, OpKind
from counterflow.schedule.schemes import gems
from counterflow.simulation import simulate

from .reading import grid, staircase

EVEN_DEPTHS = (2, 4, 6, 8, 12)


def test_chimera_figure_2_staircase() -> None:
    expected = """
        P0  0 . . . . . . . . . a a 1 b b . . . . . .
        P1  . 0 . . . . . . a a 1 . . . . b b . . . .
        P2  . . 0 . . . a a 1 . . . . . . . . b b . .
        P3  . . . 0 a a 1 . . . . . . . . . . . . b b
    """
    assert staircase(gems(stages=4, micro_batches=2)) == grid(expected)


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (1, 3), (3, 5)])
def test_makespan_is_exact(depth: int, micro_batches: int, forward: int, backward: int) -> None:
    """D·F + N·D·B + (N−1)·F, for backwards no shorter than forwards."""
    result = simulate(gems(depth, micro_batches), Costs(forward=forward, backward=backward))
    expected = depth * forward + micro_batches * depth * backward + (micro_batches - 1) * forward
    assert result.makespan == expected


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_chimera_table_2_bubble_ratio_is_a_limit(depth: int) -> None:
    """(D−1)/(D+1/2) is reached from above as N grows."""
    limit = Fraction(depth - 1) / (depth + Fraction(1, 2))
    exact = []
    for n in (1, 2, 4, 8, 32, 512):
        makespan = depth + 2 * n * depth + n - 1
        exact.append(Fraction(makespan - 3 * n, makespan))
        assert simulate(gems(depth, n)).bubble_ratio == pytest.approx(float(exact[-1]), rel=1e-12)
    assert exact == sorted(exact, reverse=True)
    assert limit < exact[-1] < limit + Fraction(1, 512)


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("micro_batches", [2, 3, 8])
def test_chimera_table_2_memory(depth: int, micro_batches: int) -> None:
    result = simulate(gems(depth, micro_batches))
    assert set(result.weight_copies) == {2}
    assert set(result.peak_activations) == {1}


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_directions_alternate_and_a_forward_follows_the_backward_before_it(depth: int) -> None:
    for order in gems(depth, 5).orders:
        assert [(op.kind, op.micro_batches[0]) for op in order] == [
            (kind, m) for m in range(5) for kind in (OpKind.FORWARD, OpKind.BACKWARD)
        ]
        assert all(op.pipe == op.micro_batches[0] % 2 for op in order)
