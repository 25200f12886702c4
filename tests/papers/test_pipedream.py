"""PipeDream (Harlap et al., 2018) and PipeDream-2BW (Narayanan et al., ICML 2021).

As Chimera's Table 2 and WPipe's section 2 describe them. D = stages, N = micro-batches of one period.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from counterflow import Costs, Op, OpKind, Schedule
from counterflow.schedule.schemes import pipedream, pipedream_2bw
from counterflow.simulation import simulate

from .reading import EQUAL_SLOTS, grid, orders, staircase

DEPTHS = (1, 2, 3, 4, 6, 8)
TIMES = [Costs(), EQUAL_SLOTS, Costs(forward=2.0, backward=3.0)]


def updates_seen(schedule: Schedule, worker: int) -> Iterator[tuple[Op, int]]:
    """Each op of a one-stage worker, and how many updates its stage has had when the op runs."""
    backwards = 0
    for op in schedule.orders[worker]:
        yield op, backwards // schedule.micro_batches
        backwards += op.kind is OpKind.BACKWARD


def versions_in_use(schedule: Schedule, worker: int) -> int:
    """Most versions kept at once: the newest one, and those a stashed forward needs again."""
    stashed: dict[int, int] = {}
    most = 0
    for op, newest in updates_seen(schedule, worker):
        (batch,) = op.micro_batches
        if op.kind is OpKind.FORWARD:
            stashed[batch] = op.version
        most = max(most, len({newest, *stashed.values()}))
        if op.kind is OpKind.BACKWARD:
            del stashed[batch]
    return most


# --- PipeDream -----------------------------------------------------------------------------------------


def test_wpipe_figure_2b_pipedream() -> None:
    expected = """
        P0  0 1 2 . . . . a a 3 b b 4 c c 5 d d . e e . f f
        P1  . 0 1 . . a a 2 b b 3 c c 4 d d 5 e e . f f . .
        P2  . . 0 a a 1 b b 2 c c 3 d d 4 e e 5 f f . . . .
    """
    assert staircase(pipedream(stages=3, periods=6)) == grid(expected)


@pytest.mark.parametrize("depth", DEPTHS)
def test_pipedream_version_rule(depth: int) -> None:
    """Stage s, micro-batch m: version max(0, m − (D−1−s)), the newest when its forward runs."""
    schedule = pipedream(depth, periods=3 * depth + 2)
    for stage in range(depth):
        for op, newest in updates_seen(schedule, stage):
            (batch,) = op.micro_batches
            assert op.version == max(0, batch - (depth - 1 - stage))
            if op.kind is OpKind.FORWARD:
                assert op.version == newest


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_table_2_pipedream_holds_d_minus_s_versions(depth: int) -> None:
    schedule = pipedream(depth, periods=3 * depth + 2)
    expected = tuple(depth - stage for stage in range(depth))
    assert tuple(versions_in_use(schedule, s) for s in range(depth)) == expected
    assert simulate(schedule).weight_copies == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_table_2_pipedream_activations(depth: int) -> None:
    schedule = pipedream(depth, periods=3 * depth + 2)
    assert simulate(schedule).peak_activations == tuple(depth - s for s in range(depth))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("costs", TIMES)
def test_chimera_table_2_pipedream_has_no_bubbles(depth: int, costs: Costs) -> None:
    for periods in (depth + 1, 2 * depth + 1, 5 * depth + 3):
        assert simulate(pipedream(depth, periods), costs).steady_bubble_ratio == 0
    # With fewer micro-batches the pipeline is never full.
    assert simulate(pipedream(depth, depth), costs).steady_bubble_ratio is None


# --- PipeDream-2BW -------------------------------------------------------------------------------------


def test_wpipe_figure_2c_pipedream_2bw() -> None:
    expected = """
        P0  0 1 . . a a 2 b b 3 c c 4 d d 5 e e . f f
        P1  . 0 a a 1 b b 2 c c 3 d d 4 e e 5 f f . .
    """
    schedule = pipedream_2bw(stages=2, micro_batches=2, periods=3)
    assert staircase(schedule) == grid(expected)
    assert orders(schedule) == [
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_2bw_version_rule(depth: int, extra: int) -> None:
    """Period t uses version max(0, t−1) on every stage, and that version is there when it is used.

    w(t+1) = w(t) − ν∇f(w(t−1)): the gradient of period t is taken one update late.
    """
    schedule = pipedream_2bw(depth, depth + extra, periods=5)
    for stage in range(depth):
        for op, newest in updates_seen(schedule, stage):
            period = op.micro_batches[0] // (depth + extra)
            assert op.version == max(0, period - 1)
            assert op.version <= newest <= op.version + 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_chimera_table_2_2bw_holds_two_versions(depth: int, extra: int) -> None:
    schedule = pipedream_2bw(depth, depth + extra, periods=5)
    assert simulate(schedule).weight_copies == (2,) * depth
    # The last stage could do with one; the rule makes it use the older version all the same.
    assert all(versions_in_use(schedule, stage) == 2 for stage in range(depth))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_chimera_table_2_2bw_activations(depth: int, extra: int) -> None:
    result = simulate(pipedream_2bw(depth, depth + extra, periods=5))
    assert result.peak_activations == tuple(depth - s for s in range(depth))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("costs", TIMES)
def test_chimera_table_2_2bw_has_no_bubbles(depth: int, costs: Costs) -> None:
    for micro_batches in range(depth, 3 * depth + 2):
        result = simulate(pipedream_2bw(depth, micro_batches, periods=4), costs)
        assert result.steady_bubble_ratio == 0
