"""MixPipe (Zhang et al., 2023): Table I, Figures 3 and 6, section III's idle time.

D = stages and workers, K = ``injected``, Γ = ``early_forwards``; F = 1, B = 2. The paper's idle time
5D−3K−4−3Γ is reported, never required: exact simulation decides (see each test).
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import chain, product
from typing import Any

import pytest

from counterflow import OpKind, Simulation
from counterflow.program import player
from counterflow.program.checker import check
from counterflow.schedule.orders import mixpipe_plan
from counterflow.schedule.schemes import chimera, mixpipe
from counterflow.simulation import simulate

from .reading import PRINTED, orders


def legal(depths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Every (D, K, Γ) with K even in 2..D and Γ in 0..(D−K)/2."""
    return [
        (depth, injected, early)
        for depth in depths
        for injected in range(2, depth + 1, 2)
        for early in range((depth - injected) // 2 + 1)
    ]


def published_idle(depth: int, injected: int, early: int) -> int:
    """Section III-A, in units of F."""
    return 5 * depth - 3 * injected - 4 - 3 * early


@cache
def played(depth: int, micro_batches: int, injected: int | str, early: int = 0) -> Simulation:
    """A schedule, built once for all tests, with F = 1 and B = 2."""
    return simulate(mixpipe(depth, micro_batches, injected, early))


def idle(depth: int, injected: int | str, early: int = 0, micro_batches: int | None = None) -> float:
    """The idle time of every worker, which all workers share."""
    (each,) = set(played(depth, micro_batches or depth, injected, early).idle)
    return each


# --- Figure 3: D = 4 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", PRINTED["mixpipe_figure_3"], ids=lambda row: f"K={row['injected']} Γ={row['early_forwards']}"
)
def test_figure_3_orders(row: dict[str, Any]) -> None:
    p0, p1, injected, early = (row[name] for name in ("P0", "P1", "injected", "early_forwards"))
    schedule = mixpipe(4, 4, injected, early)
    mirror = str.maketrans("0123", "1032")
    assert orders(schedule) == [p0, p1, p1.translate(mirror), p0.translate(mirror)]
    result = simulate(schedule)
    assert result.makespan == row["makespan"]
    assert max(result.peak_activations) == row["peak"] == injected + early


@pytest.mark.parametrize(("injected", "early"), [(4, 0), (2, 0), (2, 1)])
def test_figure_3_the_published_idle_time_is_exact_at_depth_4(injected: int, early: int) -> None:
    assert idle(4, injected, early) == published_idle(4, injected, early)


def test_figure_3_one_forward_early_saves_one_bubble_and_costs_one_activation() -> None:
    assert idle(4, 2, 0) - idle(4, 2, 1) == 3
    assert max(played(4, 4, 2, 0).peak_activations) == 2
    assert max(played(4, 4, 2, 1).peak_activations) == 3


@pytest.mark.parametrize("depth", [2, 4, 6, 8])
def test_section_iii_a_micro_batches_alternate_down_and_up(depth: int) -> None:
    schedule = mixpipe(depth, 2 * depth)
    assert {op.pipe for op in schedule.ops()} == {0, 1}
    assert all(op.pipe == op.micro_batches[0] % 2 for op in schedule.ops())
    assert schedule.placement.pipes_stages == (
        tuple(range(depth)),
        tuple(reversed(range(depth))),
    )


@pytest.mark.parametrize(("depth", "injected", "early"), legal((4, 6, 8, 12)))
def test_section_iii_a_first_stage_injects_half_of_k(depth: int, injected: int, early: int) -> None:
    """Each pipe's first stage runs K/2 forwards before its worker's first backward."""
    order = played(depth, depth, injected, early).schedule.orders
    for worker in (0, depth - 1):
        kinds = [(op.kind, op.stage) for op in order[worker]]
        first = next(i for i, (kind, _) in enumerate(kinds) if kind is OpKind.BACKWARD)
        assert kinds[:first].count((OpKind.FORWARD, 0)) == injected // 2


@pytest.mark.parametrize(("depth", "injected", "early"), legal((2, 4, 6, 8, 10, 12, 16)))
def test_section_iii_a_peak_is_at_most_k_plus_gamma(depth: int, injected: int, early: int) -> None:
    others = (1, 3, depth + 1, 2 * depth) if depth <= 8 else ()
    for micro_batches in (depth, *others):
        peaks = played(depth, micro_batches, injected, early).peak_activations
        assert max(peaks) <= injected + early


# --- Section III-A: the idle time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "injected", "early"),
    [c for c in legal((2, 4, 6, 8, 10, 12)) if c[1] >= c[0] / 2],
)
def test_section_iii_a_idle_for_k_at_least_half_of_d(depth: int, injected: int, early: int) -> None:
    assert idle(depth, injected, early) <= published_idle(depth, injected, early)


@pytest.mark.parametrize(("depth", "injected", "early"), [c for c in legal((14, 16)) if c[1] >= c[0] / 2])
def test_section_iii_a_idle_for_k_at_least_half_of_d_in_deeper_pipelines(
    depth: int, injected: int, early: int
) -> None:
    assert idle(depth, injected, early) <= published_idle(depth, injected, early)


@pytest.mark.parametrize(
    ("depth", "injected", "early", "reached"), [(14, 8, 0, 37), (16, 8, 0, 49), (16, 8, 1, 44)]
)
def test_section_iii_a_aim_at_half_of_d(depth: int, injected: int, early: int, reached: int) -> None:
    """Longer searches found 36, 48 and 43; the last injects more than K/2 micro-batches a pipe first."""
    assert idle(depth, injected, early) == reached <= published_idle(depth, injected, early)


OPTIMA = {
    (4, 2, 0): 9,
    (4, 2, 1): 6,
    (4, 4, 0): 4,
    (6, 4, 0): 12,
    (6, 4, 1): 9,
    (6, 6, 0): 8,
    (8, 4, 0): 23,
    (8, 4, 1): 18,
    (8, 4, 2): 15,
    (8, 6, 0): 15,
    (8, 6, 1): 13,
}
"""Proven: the least idle time at a peak of K+Γ. Figure 3's two orders with K = 2 take one more."""

SYMMETRIC = {
    # D: for each K from 2 on, by Γ
    6: ((26, 20, 14), (12, 10), (8,)),
    8: ((51, 39, 26, 23), (23, 19, 17), (15, 14), (12,)),
    10: ((84, 64, 42, 35, 30), (39, 32, 27, 24), (24, 22, 20), (18, 18), (16,)),
    12: (
        (125, 95, 61, 52, 42, 38),
        (56, 47, 37, 34, 31),
        (35, 31, 29, 27),
        (27, 25, 24),
        (22, 22),
        (20,),
    ),
}
"""Proven: the least idle time of symmetric orders with exactly K/2 forwards first, at a peak of K+Γ."""


@pytest.mark.parametrize("depth", SYMMETRIC)
def test_section_iii_a_idle_is_the_least_of_symmetric_orders(depth: int) -> None:
    settings = [(2 * k, early) for k, row in enumerate(SYMMETRIC[depth], 1) for early in range(len(row))]
    assert [(depth, *setting) for setting in settings] == legal((depth,))
    assert [idle(depth, *setting) for setting in settings] == list(chain(*SYMMETRIC[depth]))


def test_section_iii_a_published_idle_is_reached_by_some_settings_with_k_below_half_of_d() -> None:
    reached = [each for each in legal((6, 8, 10, 12)) if idle(*each) <= published_idle(*each)]
    assert [each for each in reached if 2 * each[1] < each[0]] == [
        (6, 2, 2),
        (10, 4, 2),
        (10, 4, 3),
        (12, 4, 2),
        (12, 4, 3),
        (12, 4, 4),
    ]


@pytest.mark.parametrize("depth", [6, 8, 10, 12])
def test_stored_orders_are_symmetric(depth: int) -> None:
    """Worker D−1−w does with micro-batch m ^ 1 what worker w does with m; one micro-batch less is none."""
    for setting in legal((depth,)):
        orders_of = mixpipe_plan.mixpipe_orders(depth, depth, *setting[1:])
        mirrored = [[(kind, m ^ 1) for kind, m in order] for order in orders_of]
        assert mirrored == orders_of[::-1]
        fewer = mixpipe_plan.mixpipe_orders(depth, depth - 1, *setting[1:])
        assert fewer == [[op for op in order if op[1] < depth - 1] for order in orders_of]


@pytest.mark.parametrize(("setting", "optimum"), OPTIMA.items())
def test_section_iii_a_idle_is_not_below_the_proven_optimum(
    setting: tuple[int, int, int], optimum: int
) -> None:
    found = idle(*setting)
    assert optimum <= found
    if setting[1] >= setting[0] / 2:
        assert found <= published_idle(*setting)


@pytest.mark.parametrize("depth", [4, 6, 8, 12, 16])
def test_section_iii_a_k_equal_d_takes_at_most_the_time_of_chimera(depth: int) -> None:
    """K = D: 2D−4 idle, with MixPipe's peak of D."""
    assert published_idle(depth, depth, 0) == 2 * depth - 4
    assert idle(depth, depth, 0) <= simulate(chimera(depth, depth)).idle[0]


# --- Section III-C, Figure 6: direct concatenation ------------------------------------------------------


RANGE = [
    *((depth, 2 * depth, *setting) for depth, *setting in legal((2, 4, 6, 8, 10, 12))),
    *((depth, 4 * depth, *setting) for depth, *setting in legal((2, 4, 6, 8))),
    *((depth, depth + 1, *setting) for depth, *setting in legal((6, 8, 10))),
    *((depth, 2 * depth, 2, early) for depth in (14, 16) for early in (5, 6)),
    (16, 32, 2, 7),
]


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 10, 12, 14, 16])
def test_figure_6b_no_order_is_longer_than_direct_concatenation(depth: int) -> None:
    """Units of N = D one after another; the last may have fewer micro-batches."""
    for stages, micro_batches, injected, early in RANGE:
        if stages != depth:
            continue
        units = mixpipe(depth, depth, injected, early).orders
        order = mixpipe(depth, micro_batches, injected, early)
        concatenated = [
            tuple(
                op._replace(micro_batches=(first + op.micro_batches[0],))
                for first in range(0, micro_batches, depth)
                for op in unit
                if first + op.micro_batches[0] < micro_batches
            )
            for unit in units
        ]
        direct = simulate(replace(order, orders=tuple(concatenated)))
        result = simulate(order)
        assert result.makespan <= direct.makespan, order
        assert max(result.peak_activations) <= injected + early


def test_figure_6b_makespans() -> None:
    """List schedules of all micro-batches at once would take 130, 199, 255 and 132."""
    spans = [
        played(*shape).makespan for shape in ((10, 20, 2, 4), (14, 28, 2, 6), (16, 32, 2, 7), (10, 12, 2, 1))
    ]
    assert spans == [120, 188, 222, 124]


# --- Section III-A: asymmetric orders, left to future work ----------------------------------------------

ASYMMETRIC_IDLE = {
    # (D, K, Γ): idle time of the best symmetric order with K/2 first, of any symmetric one, of any
    (6, 2, 1): (20, 19, 17),
    (8, 2, 1): (39, 38, 34),
    (10, 2, 1): (64, 63, 55),
    (10, 4, 1): (32, 31, 29),
    (12, 2, 1): (95, 94, 81),
    (12, 4, 1): (47, 46, 45),
}
"""All proved to be the least (benchmarks/results/mixpipe_asymmetric.txt)."""


@pytest.mark.parametrize("setting", ASYMMETRIC_IDLE)
def test_section_iii_a_asymmetric_orders(setting: tuple[int, int, int]) -> None:
    depth, injected, early = setting
    injected_first, symmetric, asymmetric = ASYMMETRIC_IDLE[setting]
    result = simulate(mixpipe(depth, depth, injected, early, asymmetric=True))
    assert set(result.idle) == {asymmetric}
    assert result.makespan == 3 * depth + asymmetric < 3 * depth + symmetric
    assert max(result.peak_activations) == injected + early
    assert idle(depth, injected, early) == injected_first
    for options in ({"split": True}, {"micro_batches": 2 * depth}, {"slices": 2}):
        changed: dict[str, Any] = {"stages": depth, "micro_batches": depth, "injected": injected}
        changed["early_forwards"] = early
        check(mixpipe(**(changed | options), asymmetric=True))


def test_section_iii_a_asymmetric_order_of_depth_6() -> None:
    schedule = mixpipe(6, 6, 2, 1, asymmetric=True)
    assert orders(schedule) == [
        "F0 F2 F1 B1 F3 B3 F4 B0 F5 B5 B2 B4",
        "F0 F1 F3 B1 F2 B3 B0 F4 F5 B5 B2 B4",
        "F0 F1 F3 B1 B0 F2 B3 F5 F4 B5 B2 B4",
        "F1 F0 F3 B0 B1 F5 F2 B3 F4 B2 B4 B5",
        "F1 F3 F0 B0 F5 B1 F2 B3 F4 B2 B4 B5",
        "F1 F3 F0 B0 F5 B1 F2 B2 F4 B4 B3 B5",
    ]
    mirror = str.maketrans("012345", "103254")
    assert orders(schedule)[5] != orders(schedule)[0].translate(mirror)
    assert str(schedule).endswith("early_forwards=1, asymmetric=True)")


# --- Section III-C, Figure 6: K maximizing -------------------------------------------------------------


@pytest.mark.parametrize("depth", [4, 6, 8, 12, 16])
@pytest.mark.parametrize("units", [2, 4, 8])
def test_figure_6c_k_maximizing(depth: int, units: int) -> None:
    """Idle (D/2−1)(F+B) exactly, at a peak of 3D/2−1 exactly."""
    result = played(depth, units * depth, "max")
    assert set(result.idle) == {3 * (depth // 2 - 1)}
    assert max(result.peak_activations) == 3 * depth // 2 - 1


@pytest.mark.parametrize("depth", [2, 4, 10, 22, 34])
def test_figure_6c_k_maximizing_for_every_even_number_of_micro_batches(depth: int) -> None:
    for micro_batches in range(2 * depth, 2 * depth + 16, 2):
        result = played(depth, micro_batches, "max")
        assert set(result.idle) == {3 * (depth // 2 - 1)}
        assert max(result.peak_activations) <= max(2, 3 * depth // 2 - 1)


@pytest.mark.parametrize("depth", [4, 6, 8])
def test_figure_6c_k_maximizing_needs_less_memory_than_forward_doubling(depth: int) -> None:
    maximized = played(depth, 4 * depth, "max")
    doubled = simulate(chimera(depth, 4 * depth, concat="forward-doubling"))
    assert max(maximized.peak_activations) < max(doubled.peak_activations) == 2 * depth


@pytest.mark.parametrize("depth", [4, 6, 8])
def test_figure_6c_k_maximizing_has_fewer_bubbles_than_doubling_when_h_is_odd(depth: int) -> None:
    doubled = simulate(chimera(depth, 3 * depth, concat="forward-doubling"))
    assert idle(depth, "max", micro_batches=3 * depth) < doubled.idle[0]


# --- Table I and building ------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "injected", "early"), legal((4, 8)))
def test_table_i_parameters_memory(depth: int, injected: int, early: int) -> None:
    assert set(played(depth, depth, injected, early).weight_copies) == {2}


@pytest.mark.parametrize(
    ("depth", "injected", "early"),
    [c for c in legal((22, 32, 64)) if c[1] in (2, 16, 32, 64) and c[2] in (0, 1, 8, 31)],
)
def test_no_deadlock_in_deep_pipelines(depth: int, injected: int, early: int) -> None:
    result = simulate(mixpipe(depth, depth, injected, early))
    assert set(result.busy) == {3 * depth}
    assert max(result.peak_activations) <= injected + early


@pytest.mark.parametrize(("depth", "injected", "early"), [(16, 8, 0), (16, 8, 4), (16, 2, 0)])
def test_building_takes_less_than_a_second(depth: int, injected: int, early: int) -> None:
    began = time.process_time()
    mixpipe(depth, depth, injected, early)
    assert time.process_time() - began < 1


def test_compiled_plans_are_the_same() -> None:
    """Planning loads numba, and compiles the loop of the plans with it."""
    player.load_numba()
    compiled = player.accelerated(mixpipe_plan.played)
    for depth, pairs, room, first in product((2, 4, 8), (1, 3, 8), (2, 5, 9), (-1, 1)):
        due = [7 * number % 23 - 5 for number in range(2 * depth * pairs)]
        for takes in ((0, 1, 2), (2, 2, 1)):
            args = depth, pairs, room, first, due, *takes
            assert compiled(*args) == mixpipe_plan.played(*args), args
