"""DAPPLE (Fan et al., PPoPP 2021), synchronous 1F1B, as Chimera's Figure 2 and Table 2 describe it."""

from __future__ import annotations

import pytest

from counterflow import Costs, OpKind
from counterflow.schedule.schemes import dapple, gpipe
from counterflow.simulation import simulate

from .reading import grid, orders, staircase

DEPTHS = (1, 2, 3, 4, 5, 8, 12)


def test_chimera_figure_2_staircase() -> None:
    expected = """
        P0  0 1 2 3 . . . . . . a a . b b . c c . d d
        P1  . 0 1 2 . . . . a a 3 b b . c c . d d . .
        P2  . . 0 1 . . a a 2 b b 3 c c . d d . . . .
        P3  . . . 0 a a 1 b b 2 c c 3 d d . . . . . .
    """
    assert staircase(dapple(stages=4, micro_batches=4)) == grid(expected)


def test_orders() -> None:
    assert orders(dapple(stages=3, micro_batches=4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 17])
def test_order_is_warm_up_then_alternation_then_drain(depth: int, micro_batches: int) -> None:
    for stage, order in enumerate(dapple(depth, micro_batches).orders):
        kinds = "".join(op.kind.value for op in order)
        warm_up = min(depth - stage, micro_batches)
        steady = micro_batches - warm_up
        assert kinds == "F" * warm_up + "BF" * steady + "B" * warm_up
        for kind in (OpKind.FORWARD, OpKind.BACKWARD):
            batches = [op.micro_batches[0] for op in order if op.kind is kind]
            assert batches == list(range(micro_batches))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 3)])
def test_chimera_table_2_bubbles_are_those_of_gpipe(
    depth: int, micro_batches: int, forward: int, backward: int
) -> None:
    costs = Costs(forward=forward, backward=backward)
    result = simulate(dapple(depth, micro_batches), costs)
    assert result.makespan == simulate(gpipe(depth, micro_batches), costs).makespan
    assert set(result.idle) == {(depth - 1) * (forward + backward)}
    ratio = (depth - 1) / (micro_batches + depth - 1)
    assert result.bubble_ratio == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_chimera_table_2_memory(depth: int, micro_batches: int) -> None:
    result = simulate(dapple(depth, micro_batches))
    assert set(result.weight_copies) == {1}
    assert result.peak_activations == tuple(min(depth - stage, micro_batches) for stage in range(depth))
