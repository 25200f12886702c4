"""Chimera (Li & Hoefler, SC'21): its figures, tables and the numbers found by exact simulation.

D = stages and workers, N = micro-batches, f = pairs of pipes, K = N/D units. F = 1 and B = 2 unless a
test says equal slots.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from counterflow import Costs, OpKind, Schedule
from counterflow.schedule.placement import bidirectional
from counterflow.schedule.schemes import chimera, hanayo
from counterflow.simulation import simulate

from .reading import EQUAL_SLOTS, grid, orders, staircase

EVEN_DEPTHS = (2, 4, 6, 8, 10, 12, 16)
DEPTHS_AND_PAIRS = [
    (depth, pairs) for depth in EVEN_DEPTHS for pairs in range(1, depth // 2 + 1) if (depth // 2) % pairs == 0
]
CONCATS = ("direct", "forward-doubling", "backward-halving")


def published_slots(depth: int, pairs: int) -> dict[tuple[OpKind, int, int, int], tuple[int, int]]:
    """(kind, pipe, j-th micro-batch of the pipe, stage) -> (slot, worker), written from the paper."""
    down = [[(i * depth // pairs + s) % depth for s in range(depth)] for i in range(pairs)]
    pipes = down + [list(reversed(pipe)) for pipe in down]
    slots = {}
    for pipe, workers in enumerate(pipes):
        for j in range(depth // (2 * pairs)):
            for stage, worker in enumerate(workers):
                slots[OpKind.FORWARD, pipe, j, stage] = (2 * j + stage, worker)
                slots[OpKind.BACKWARD, pipe, j, stage] = (2 * j + 2 * depth - 1 - stage, worker)
    return slots


# --- Section 3.1, Figures 2 and 3: two pipelines -------------------------------------------------------


def test_figure_3_orders_of_two_pipelines() -> None:
    assert orders(chimera(stages=4, micro_batches=4)) == [
        "F0 F1 F2 B2 F3 B3 B0 B1",
        "F0 F2 F1 F3 B2 B0 B3 B1",
        "F2 F0 F3 F1 B0 B2 B1 B3",
        "F2 F3 F0 B0 F1 B1 B2 B3",
    ]


def test_figure_3_practical_staircase_has_backwards_of_two_units() -> None:
    expected = """
        P0  0 1 . 2 c c 3 d d . a a . . b b
        P1  . 0 2 1 3 . c c a a d d b b . .
        P2  . 2 0 3 1 . a a c c b b d d . .
        P3  2 3 . 0 a a 1 b b . c c . . d d
    """
    schedule = chimera(stages=4, micro_batches=4)
    assert staircase(schedule) == grid(expected)
    result = simulate(schedule)
    assert result.makespan == 16
    assert set(result.idle) == {4}
    assert list(result.peak_activations) == [3, 4, 4, 3]
    assert result.bubble_ratio == 0.25


def test_figure_3_micro_batches_are_numbered_down_first() -> None:
    schedule = chimera(stages=4, micro_batches=4)
    assert {(m, op.pipe) for op in schedule.ops() for m in op.micro_batches} == {
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    }


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_section_3_1_no_two_ops_share_a_worker_and_a_slot(depth: int, pairs: int) -> None:
    slots = published_slots(depth, pairs)
    assert len(set(slots.values())) == len(slots) == 2 * depth * depth


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_section_3_1_order_is_by_slot(depth: int, pairs: int) -> None:
    slots = published_slots(depth, pairs)
    each = depth // (2 * pairs)
    for worker, order in enumerate(chimera(depth, depth, pairs).orders):
        places = [slots[o.kind, o.pipe, o.micro_batches[0] % each, o.stage] for o in order]
        assert {w for _, w in places} == {worker}
        assert [slot for slot, _ in places] == sorted(slot for slot, _ in places)


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_section_3_1_equal_slots_play_as_the_slots_say(depth: int, pairs: int) -> None:
    """Every backward starts in its slot, and no forward later than in its slot.

    A forward may start early: stage 0 waits for nothing (P0 of Figure 3 has its second forward in slot
    2 and runs it in slot 1).
    """
    slots = published_slots(depth, pairs)
    each = depth // (2 * pairs)
    result = simulate(chimera(depth, depth, pairs), EQUAL_SLOTS)
    for span in result.timeline:
        op = span.op
        slot, _ = slots[op.kind, op.pipe, op.micro_batches[0] % each, op.stage]
        assert span.start <= slot
        if op.kind is OpKind.BACKWARD:
            assert span.start == slot
    assert result.makespan == max(slot for slot, _ in slots.values()) + 1


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_section_3_6_equal_slots_makespan_and_idle(depth: int, pairs: int) -> None:
    result = simulate(chimera(depth, depth, pairs), EQUAL_SLOTS)
    bubbles = depth // pairs - 2
    assert result.makespan == 2 * depth + bubbles
    assert set(result.idle) == {bubbles}


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_section_2_bubbles_are_half_of_the_flush_with_equal_slots(depth: int) -> None:
    """D/2−1 in the forwards and as many in the backwards, against 2(D−1) of GPipe and DAPPLE."""
    result = simulate(chimera(depth, depth), EQUAL_SLOTS)
    assert set(result.idle) == {2 * (depth / 2 - 1)}


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_section_2_bubble_ratio_with_backwards_twice_as_long(depth: int) -> None:
    result = simulate(chimera(depth, depth))
    expected = Fraction(2 * (depth - 2), 3 * depth + 2 * (depth - 2))
    assert expected == Fraction(depth - 2) / (Fraction(3 * depth, 2) + depth - 2)
    assert result.bubble_ratio == pytest.approx(float(expected), rel=1e-12)
    assert set(result.idle) == {2 * (depth - 2)}


# --- Section 3.1: fewer micro-batches than stages ------------------------------------------------------


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_section_3_1_fewer_micro_batches_are_spread_as_evenly_as_possible(depth: int, pairs: int) -> None:
    for micro_batches in range(1, depth):
        schedule = chimera(depth, micro_batches, pairs)
        shares = shares_of_pipes(schedule)
        assert sum(shares) == micro_batches
        assert max(shares) - min(shares) <= 1


def test_section_3_1_one_micro_batch_uses_one_pipe() -> None:
    schedule = chimera(stages=4, micro_batches=1)
    assert shares_of_pipes(schedule) == [1, 0]
    assert simulate(schedule).makespan == 4 * (1 + 2)


def shares_of_pipes(schedule: Schedule) -> list[int]:
    return [
        len({m for op in schedule.ops() if op.pipe == pipe for m in op.micro_batches})
        for pipe in range(schedule.pipes)
    ]


# --- Section 3.4, Figure 6: the critical path ----------------------------------------------------------


def test_figure_6_critical_path_has_6_forwards_and_10_backwards() -> None:
    assert critical_path(6) == (6, 10)
    assert simulate(chimera(6, 6)).makespan == 6 + 10 * 2


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_section_3_4_critical_path_has_d_forwards_and_2d_minus_2_backwards(depth: int) -> None:
    assert critical_path(depth) == (depth, 2 * depth - 2)


def critical_path(depth: int) -> tuple[float, float]:
    """(C_f, C_b): how much longer it takes when a forward, or a backward, takes a little longer.

    Taken to both sides, so that it is the same on every critical path.
    """
    schedule, small = chimera(depth, depth), 2.0**-10

    def makespan(forward: float, backward: float) -> float:
        return simulate(schedule, Costs(forward=forward, backward=backward)).makespan

    forwards = {
        (makespan(1 + small, 2) - makespan(1, 2)) / small,
        (makespan(1, 2) - makespan(1 - small, 2)) / small,
    }
    backwards = {
        (makespan(1, 2 + small) - makespan(1, 2)) / small,
        (makespan(1, 2) - makespan(1, 2 - small)) / small,
    }
    assert len(forwards) == len(backwards) == 1
    return forwards.pop(), backwards.pop()


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (1, 3), (2, 3), (3, 4)])
def test_equation_1_compute_time(depth: int, forward: int, backward: int) -> None:
    """F·C_f + B·C_b, for backwards no shorter than forwards (recomputation: B = 3F)."""
    result = simulate(chimera(depth, depth), Costs(forward=forward, backward=backward))
    assert result.makespan == depth * forward + (2 * depth - 2) * backward


# --- Section 3.5, Figure 7: more micro-batches ---------------------------------------------------------


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("units", [1, 2, 3, 4, 7])
def test_section_3_5_direct_concatenation_is_seamless_with_equal_slots(depth: int, units: int) -> None:
    result = simulate(chimera(depth, units * depth), EQUAL_SLOTS)
    assert set(result.idle) == {depth - 2}
    n = units * depth
    assert result.bubble_ratio == pytest.approx((depth - 2) / (2 * n + depth - 2), rel=1e-12)


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("units", [1, 2, 3, 4, 7])
def test_section_3_5_direct_concatenation_leaves_middle_bubbles(depth: int, units: int) -> None:
    result = simulate(chimera(depth, units * depth))
    assert set(result.idle) == {2 * (depth - 2) + (units - 1) * (depth - 2)}
    assert max(result.peak_activations) <= depth


def test_figure_7b_direct_concatenation() -> None:
    schedule = chimera(stages=4, micro_batches=8)
    assert orders(schedule)[0] == "F0 F1 F4 B4 F5 B5 B0 F2 B1 F3 F6 B6 F7 B7 B2 B3"
    assert {m for op in schedule.ops() if op.pipe == 0 for m in op.micro_batches} == {0, 1, 2, 3}
    assert simulate(schedule).makespan == 30
    assert set(simulate(schedule).idle) == {6}


def test_figure_7d_forward_doubling() -> None:
    p0 = "F(0,1) F(2,3) F(4,5) B4 F(6,7) B5 B0 B6 B1 B7 B2 B3"
    p1 = "F(0,1) F(4,5) F(2,3) F(6,7) B4 B0 B5 B1 B6 B2 B7 B3"
    swap = str.maketrans("01234567", "45670123")
    assert orders(chimera(stages=4, micro_batches=8, concat="forward-doubling")) == [
        p0,
        p1,
        p1.translate(swap),
        p0.translate(swap),
    ]


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_section_3_5_forward_doubling_has_d_minus_2_bubbles(depth: int, units: int) -> None:
    """A doubled forward lasts 2, a backward 2: idle is D−2 such slots however many units there are."""
    result = simulate(chimera(depth, 2 * depth * units, concat="forward-doubling"))
    assert set(result.idle) == {2 * (depth - 2)}
    assert max(result.peak_activations) == 2 * depth


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("doubled", [1, 2, 3])
def test_section_3_5_forward_doubling_ends_an_odd_k_with_a_basic_unit(depth: int, doubled: int) -> None:
    micro_batches = 2 * depth * doubled + depth
    schedule = chimera(depth, micro_batches, concat="forward-doubling")
    for order in schedule.orders:
        single = [op for op in order if op.kind is OpKind.FORWARD and len(op.micro_batches) == 1]
        pairs = [op for op in order if op.kind is OpKind.FORWARD and len(op.micro_batches) == 2]
        assert (len(single), len(pairs)) == (depth, depth * doubled)
    # MixPipe, section III-C: more bubbles than K-maximizing when N/D is odd.
    assert set(simulate(schedule).idle) == {3 * (depth - 2)}


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_section_3_5_forward_doubling_with_n_equal_d_is_the_basic_unit(depth: int) -> None:
    assert chimera(depth, depth, concat="forward-doubling").orders == chimera(depth, depth).orders


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_section_3_5_forward_doubling_shares_no_slot(depth: int) -> None:
    taken: set[tuple[int, int]] = set()
    for pipe in range(2):
        for j in range(depth // 2):
            for s in range(depth):
                worker = s if pipe == 0 else depth - 1 - s
                slots = [2 * j + s]
                slots += [depth + 2 * k + depth - 1 - s for k in (2 * j, 2 * j + 1)]
                for slot in slots:
                    assert (worker, slot) not in taken
                    taken.add((worker, slot))


def test_section_3_5_backward_halving_is_the_order_of_forward_doubling() -> None:
    """One forward of one micro-batch for a doubled one, its two halves for the two backwards."""
    for depth in (2, 4, 6, 8):
        for units in (1, 2, 3):
            doubled = chimera(depth, 2 * depth * units, concat="forward-doubling")
            halved = chimera(depth, depth * units, concat="backward-halving")
            for two, half in zip(doubled.orders, halved.orders, strict=True):
                assert [(op.kind, op.pipe, op.stage) for op in two] == [
                    (op.kind, op.pipe, op.stage) for op in half
                ]
                for a, b in zip(two, half, strict=True):
                    assert a.micro_batches[0] == 2 * b.micro_batches[0] + b.part
                    assert b.parts == (1 if b.kind is OpKind.FORWARD else 2)


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_section_3_5_backward_halving_has_d_minus_2_bubbles(depth: int, units: int) -> None:
    """F = 1 and half a backward = 1 are equal slots without recomputation."""
    halved = simulate(chimera(depth, depth * units, concat="backward-halving"))
    direct = simulate(chimera(depth, depth * units))
    assert set(halved.idle) == {depth - 2}
    assert max(halved.peak_activations) <= depth
    assert max(halved.peak_activations) <= max(direct.peak_activations)


@pytest.mark.parametrize("concat", CONCATS)
@pytest.mark.parametrize(("depth", "pairs"), [(2, 1), (4, 1), (4, 2), (6, 1), (6, 3), (8, 2)])
def test_section_3_5_any_number_of_micro_batches(concat: str, depth: int, pairs: int) -> None:
    for micro_batches in range(1, 4 * depth + 2):
        schedule = chimera(depth, micro_batches, pairs, concat)
        result = simulate(schedule)
        assert sum(result.busy) == 3 * depth * micro_batches
        shares = shares_of_pipes(schedule)
        # Every unit is even to one micro-batch, and only the last one is not full.
        assert max(shares) - min(shares) <= 1


# --- Section 3.6, Figure 8, Table 3: more than two pipelines -------------------------------------------


def test_figure_8_four_pipelines_with_eight_stages() -> None:
    down0, down1, up0, up1 = bidirectional(stages=8, pairs=2).pipes_stages
    assert down0 == (0, 1, 2, 3, 4, 5, 6, 7)
    assert down1 == (4, 5, 6, 7, 0, 1, 2, 3)
    assert up0 == (7, 6, 5, 4, 3, 2, 1, 0)
    assert up1 == (3, 2, 1, 0, 7, 6, 5, 4)


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_figure_8_placement_rule(depth: int, pairs: int) -> None:
    pipes = bidirectional(depth, pairs).pipes_stages
    for i in range(pairs):
        assert pipes[i] == tuple((i * depth // pairs + s) % depth for s in range(depth))
        assert pipes[pairs + i] == pipes[i][::-1]


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
def test_section_3_6_f_equal_q_is_data_parallelism(depth: int) -> None:
    result = simulate(chimera(depth, depth, pairs=depth // 2))
    assert set(result.idle) == {0}
    assert result.makespan == 3 * depth


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_table_3_bubble_ratio(depth: int, pairs: int) -> None:
    result = simulate(chimera(depth, depth, pairs), EQUAL_SLOTS)
    expected = (depth - 2 * pairs) / (2 * pairs * depth + depth - 2 * pairs)
    assert result.bubble_ratio == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_table_3_weights_memory(depth: int, pairs: int) -> None:
    assert set(simulate(chimera(depth, depth, pairs)).weight_copies) == {2 * pairs}


@pytest.mark.parametrize(("depth", "pairs"), DEPTHS_AND_PAIRS)
def test_table_3_activations_memory(depth: int, pairs: int) -> None:
    """From D − D/(2f) + 1 on the workers that hold a pipe's first stage (the outer ones) to D."""
    schedule = chimera(depth, depth, pairs)
    peaks = simulate(schedule).peak_activations
    assert min(peaks) == depth - depth // (2 * pairs) + 1
    assert max(peaks) == depth
    outer = {pipe[0] for pipe in schedule.placement.pipes_stages}
    assert {peaks[w] for w in outer} == {min(peaks)}


# --- Table 2: the schemes compared ---------------------------------------------------------------------


@pytest.mark.parametrize("depth", EVEN_DEPTHS)
@pytest.mark.parametrize("units", [1, 2, 4])
def test_table_2_chimera(depth: int, units: int) -> None:
    result = simulate(chimera(depth, units * depth), EQUAL_SLOTS)
    n = units * depth
    assert result.bubble_ratio == pytest.approx((depth - 2) / (2 * n + depth - 2), rel=1e-12)
    assert set(result.weight_copies) == {2}
    assert min(result.peak_activations) == depth / 2 + 1
    assert max(result.peak_activations) == depth


@pytest.mark.parametrize("depth", [4, 8, 16])
def test_hanayo_figure_5_chimera_wave_has_the_times_of_chimera(depth: int) -> None:
    """Swapping halves of the workers turns one pipe of Chimera into a wave of Hanayo (Figure 5)."""
    pair = simulate(chimera(depth, depth))
    one = simulate(hanayo(workers=depth // 2, micro_batches=depth // 2))
    down = {
        (s.op.kind, s.op.stage, s.op.micro_batches): (s.start, s.end, min(s.worker, depth - 1 - s.worker))
        for s in pair.timeline
        if s.op.pipe == 0
    }
    wave = {(s.op.kind, s.op.stage, s.op.micro_batches): (s.start, s.end, s.worker) for s in one.timeline}
    assert down == wave
