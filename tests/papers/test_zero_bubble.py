"""Split backwards: Zero Bubble (Qi et al., ICLR 2024), V schedules (NeurIPS 2024), DualPipe (DeepSeek-V3).

p = workers, m = micro-batches, F, I, W = times of a forward, an input gradient and weight gradients. The
papers' cost of a schedule is its longest span: a worker's first start to its last end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from counterflow import Costs, OpKind, Schedule
from counterflow.errors import ConfigError
from counterflow.program.checker import check
from counterflow.program.rules import RULES, CheckSubject, details
from counterflow.schedule.residency import peak_activations
from counterflow.schedule.schemes import (
    dapple,
    dualpipe,
    dualpipe_v,
    interleaved_zb,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from counterflow.simulation import simulate

from .reading import PRINTED, longest_span, orders

DEPTHS = (1, 2, 3, 4, 5, 8, 12)
UNIT = (1, 1, 1)
TIMES = (UNIT, (3, 4, 2), (4, 3, 2), (2, 2, 1), (5, 3, 3))
"""Weight gradients take no longer than a forward or an input gradient, as the papers' formulas assume."""

Build = Callable[..., Schedule]


def costs(forward: float, inputs: float, weights: float, message: float = 0.0) -> Costs:
    return Costs(
        forward=forward,
        backward=inputs + weights,
        input_gradient=inputs,
        weight_gradients=weights,
        p2p=message,
    )


def makespan(schedule: Schedule, times: tuple[int, int, int] = UNIT) -> float:
    return simulate(schedule, costs(*times)).makespan


# --- Zero Bubble, section 2: the orders drawn there ------------------------------------------------------


def test_figure_2_order_of_h1() -> None:
    assert orders(zb_h1(4, 8))[0] == (
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    )
    assert orders(zb_h1(4, 8))[3] == (
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
    )


def test_figure_3_order_of_h2() -> None:
    assert orders(zb_h2(4, 8))[0] == (
        "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7"
    )
    assert orders(zb_h2(4, 8))[3] == (
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7"
    )


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("times", TIMES)
def test_table_1_bubble_of_h1(p: int, times: tuple[int, int, int]) -> None:
    """(p−1)(F+I−W) in the whole schedule, from m = p + 1 on."""
    forward, inputs, weights = times
    for m in (p + 1, 2 * p, 3 * p + 1):
        assert makespan(zb_h1(p, m), times) - m * sum(times) == (p - 1) * (forward + inputs - weights)


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("times", TIMES)
def test_table_1_bubble_of_h2(p: int, times: tuple[int, int, int]) -> None:
    """(p−1)(F+I−2W) in the longest span, from m = 2p − 1 on; the makespan has (p−1)·F of filling besides."""
    forward, inputs, weights = times
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        span = longest_span(zb_h2(p, m), costs(*times))
        assert span - m * sum(times) == (p - 1) * (forward + inputs - 2 * weights)


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("times", TIMES)
def test_few_micro_batches(p: int, times: tuple[int, int, int]) -> None:
    """With m ≤ p: (m+p−1)(F+I) + W, where 1F1B takes (m+p−1)(F+I+W)."""
    forward, inputs, weights = times
    for m in {1, max(1, p - 1), p}:
        expected = (m + p - 1) * (forward + inputs) + weights
        assert makespan(zb_h1(p, m), times) == expected
        assert makespan(zb_h2(p, m), times) == expected
        assert makespan(dapple(p, m), times) == (m + p - 1) * sum(times)


@pytest.mark.parametrize("p", DEPTHS)
def test_table_1_memory_of_h1_and_h2(p: int) -> None:
    """(p−r)M_B + r·M_W and (2p−2r−1)M_B + 2r·M_W: counted until weight gradients are made, p and 2p − 1."""
    for m in (2 * p, 3 * p):
        assert set(peak_activations(zb_h1(p, m))) == {p}
        assert set(peak_activations(zb_h2(p, m))) == {2 * p - 1}
        for r, in_flight in enumerate(forwards_before_input_gradients(zb_h1(p, m))):
            assert in_flight == p - r
        for r, in_flight in enumerate(forwards_before_input_gradients(zb_h2(p, m))):
            assert in_flight == 2 * (p - r) - 1


def forwards_before_input_gradients(schedule: Schedule) -> list[int]:
    """Of each worker the most forwards whose input gradients are still to come."""
    found = []
    for order in schedule.orders:
        ahead = most = 0
        for op in order:
            ahead += op.kind.gives.goes if op.kind.gives else 0
            most = max(most, ahead)
        found.append(most)
    return found


# --- Zero Bubble, Table 5, with the times of Table 9: rate = (cost − m(F+I+W)) / cost --------------------


@pytest.mark.parametrize(
    "row", PRINTED["zero_bubble_table_5"], ids=lambda row: f"p={row[0]} m={row[1]} F={row[2]}"
)
def test_table_5_to_all_printed_digits(row: list[Any]) -> None:
    p, m, *times = row[:6]
    work = m * sum(times[:3])
    rates = []
    for build in (dapple, zb_h1, zb_h2):
        cost = longest_span(build(p, m), costs(*times))
        rates.append(f"{(cost - work) / cost:.4f}")
    assert rates == row[6:]


# --- Zero Bubble, section 6, and the V schedules ---------------------------------------------------------


@pytest.mark.parametrize("p", DEPTHS)
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(p: int) -> None:
    """Where F = I = W: every worker works through, once it has begun."""
    for m in {2 * p, 3 * p + 1}:
        assert longest_span(zb_v(p, m), costs(*UNIT)) == 6 * m
        assert set(peak_activations(zb_v(p, m))) == {2 * p}
    assert set(peak_activations(dapple(p, 3 * p))) == set(range(1, p + 1))


@pytest.mark.parametrize("p", DEPTHS)
def test_memory_of_the_v_schedules(p: int) -> None:
    """About p/2 + 1 and p/3 + 4/3 stages on every worker, each half a stage of the other schemes."""
    for m in (2 * p, 3 * p):
        assert max(peak_activations(v_half(p, m))) == p + 2 - p % 2
        assert max(peak_activations(v_min(p, m))) == 2 * ((p + 4) // 3)
        assert max(peak_activations(zb_v(p, m))) == 2 * p


@pytest.mark.parametrize("p", [4, 8, 16])
def test_bubbles_of_the_v_schedules(p: int) -> None:
    """About a half and two thirds of 1F1B's, which idles (p−1) times six half-stage times."""
    m = 2 * p
    assert makespan(v_half(p, m)) - 6 * m <= 6 * (p - 1) / 2
    assert makespan(v_min(p, m)) - 6 * m <= 6 * (p - 1) * 2 / 3


def test_v_min_bubbles_grow_with_the_micro_batches_where_costs_differ() -> None:
    def bubble(m: int, times: tuple[int, int, int]) -> float:
        return makespan(v_min(4, m), times) - 2 * m * sum(times)

    assert bubble(8, UNIT) == bubble(64, UNIT)
    assert bubble(64, (3, 4, 2)) > 5 * bubble(8, (3, 4, 2))


# --- Chunks, and DualPipe --------------------------------------------------------------------------------


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_zero_bubble(p: int, chunks: int) -> None:
    """p − 1 times of a chunk, and the memory of v·p chunks."""
    for m in (p, 2 * p, 3 * p):
        schedule = interleaved_zb(p, m, chunks)
        assert makespan(schedule) - 3 * chunks * m <= (p - 1) * 1
        assert max(peak_activations(schedule)) <= chunks * p
    assert makespan(interleaved_zb(p, 3 * p, chunks)) - 9 * chunks * p == p - 1


def test_interleaved_zero_bubble_of_one_chunk_is_h1() -> None:
    for p, m in ((3, 7), (4, 8), (5, 2)):
        assert interleaved_zb(p, m, chunks=1).orders == zb_h1(p, m).orders


@pytest.mark.parametrize("p", DEPTHS)
def test_memory_of_dualpipe(p: int) -> None:
    """p + 1 stages, two copies of each; folded into a V, 2p + 1 half stages and one copy."""
    for m in (2 * p, 3 * p, 3 * p + 1):
        assert set(peak_activations(dualpipe_v(p, m))) == {2 * p + 1}
        assert all(len(list(dualpipe_v(p, m).placement.stages_on(w))) == 2 for w in range(p))
    if p % 2 == 0:
        for m in (2 * p, 2 * p + 2, 4 * p):
            schedule = dualpipe(p, m)
            assert set(peak_activations(schedule)) == {p + 1}
            assert all(len(schedule.placement.copies(s)) == 2 for s in range(p))


@pytest.mark.parametrize("p", [2, 4, 8, 12])
def test_dualpipe_and_dualpipe_v_are_one_schedule(p: int) -> None:
    """Folded: the upper half of the workers does for one pipe what the lower half does for the other."""
    for m in (2 * p, 2 * p + 4):
        two, folded = dualpipe(p, m), dualpipe_v(p // 2, m // 2)
        for worker, order in enumerate(folded.orders):
            down = [(op.kind, op.stage, op.micro_batches[0]) for op in order]
            for holder, here, there in ((worker, 0, 1), (p - 1 - worker, 1, 0)):
                first = {here: 0, there: 0} | {1: m // 2}
                found = [(op.kind, op.pipe, op.stage, op.micro_batches[0]) for op in two.orders[holder]]
                expected = [
                    (kind, here if stage < p // 2 else there, stage, batch) for kind, stage, batch in down
                ]
                assert found == [
                    (kind, pipe, stage, batch + first[pipe]) for kind, pipe, stage, batch in expected
                ]


# --- torch's own orders ----------------------------------------------------------------------------------


def torch_orders(name: str, p: int, m: int, stages: tuple[int, ...]) -> list[list[str]]:
    """What torch's schedule class makes of stages that do nothing, for all workers, without idle slots."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    last = p * len(stages) - 1
    stubs = [
        SimpleNamespace(
            group=None,
            group_size=p,
            group_rank=0,
            num_stages=last + 1,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == last,
            submod=torch.nn.Identity(),
            has_backward=False,
        )
        for stage in stages
    ]
    made = getattr(schedules, name)(stubs, m)
    return [
        [str(each) for one in made.pipeline_order[w] if one is not None for each in one.sub_actions or (one,)]
        for w in range(p)
    ]


def in_torchs_words(schedule: Schedule) -> list[list[str]]:
    return [[f"{op.stage}{op.kind.value}{op.micro_batches[0]}" for op in order] for order in schedule.orders]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [-3, -1, 0, 1, 2, 5])
def test_zb_v_is_torchs(p: int, more: int) -> None:
    m = max(1, 2 * p + more)
    assert in_torchs_words(zb_v(p, m)) == torch_orders("ScheduleZBVZeroBubble", p, m, (0, 2 * p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 5])
def test_dualpipe_v_is_torchs(p: int, more: int) -> None:
    m = 2 * p + more
    assert in_torchs_words(dualpipe_v(p, m)) == torch_orders("ScheduleDualPipeV", p, m, (0, 2 * p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved_zero_bubble_is_torchs(p: int, chunks: int, rounds: int) -> None:
    m = rounds * p
    expected = torch_orders("ScheduleInterleavedZeroBubble", p, m, tuple(range(0, p * chunks, p)))
    assert in_torchs_words(interleaved_zb(p, m, chunks)) == expected


# --- What is legal, and what is refused ------------------------------------------------------------------

EVERY = (zb_h1, zb_h2, zb_v, v_half, v_min, interleaved_zb, dualpipe, dualpipe_v)
ON_SCHEDULES = [rule for rule in RULES if not rule.lowered]


@pytest.mark.table
@pytest.mark.parametrize("build", EVERY)
@pytest.mark.parametrize("p", [2, 3, 4, 6, 7, 9, 16, 32])
def test_the_checker_finds_nothing(build: Build, p: int) -> None:
    p = p + p % 2 if build is dualpipe else p
    least = 2 * p if build in (dualpipe, dualpipe_v) else 1
    wanted = {1, 2, p - 1, p, 2 * p - 1, 2 * p, 2 * p + 2, 3 * p + 1} if p < 16 else {3, 2 * p}
    for m in sorted(m + m % 2 if build is dualpipe else m for m in wanted if m >= least):
        subject = CheckSubject(build(p, m))
        assert [details(rule, subject) for rule in ON_SCHEDULES] == [""] * len(ON_SCHEDULES)


@pytest.mark.parametrize("build", EVERY)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 10)])
def test_lowered_the_checker_finds_nothing(build: Build, p: int, m: int) -> None:
    check(build(p, m))


@pytest.mark.parametrize("build", EVERY)
def test_every_backward_of_a_zero_bubble_scheme_is_split(build: Build) -> None:
    kinds = {op.kind for op in build(4, 8).ops()}
    whole = {OpKind.BACKWARD} if build in (dualpipe, dualpipe_v) else set()
    assert kinds == {OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENTS} | whole


@pytest.mark.parametrize("build", EVERY)
def test_refused_numbers(build: Build) -> None:
    depth = "workers" if build in (zb_v, v_half, v_min, interleaved_zb, dualpipe_v) else "stages"
    with pytest.raises(ConfigError, match=f"{depth}=0"):
        build(0, 4)
    with pytest.raises(ConfigError, match="micro_batches=0: must be"):
        build(2, 0)


def test_what_dualpipe_refuses() -> None:
    with pytest.raises(ConfigError, match="stages=3: two directions need an even number of stages"):
        dualpipe(3, 8)
    with pytest.raises(ConfigError, match="micro_batches=7: must be 8 or more: twice the stages"):
        dualpipe(4, 7)
    with pytest.raises(ConfigError, match=r"micro_batches=9: must be even.*; use 8 or 10"):
        dualpipe(4, 9)
    with pytest.raises(ConfigError, match="micro_batches=7: must be 8 or more: twice the workers"):
        dualpipe_v(4, 7)
    with pytest.raises(ConfigError, match="chunks=0: must be 1 or more"):
        interleaved_zb(2, 4, 0)
