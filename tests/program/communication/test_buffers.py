"""Receive buffers of a plan: the fewest, and a rule that refuses any other table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.program import rules
from counterflow.program.actions import Compute, Matching, Program, Receive
from counterflow.program.checker import inspect
from counterflow.program.communication.buffer_layout import arrange
from counterflow.program.communication.communication_plan import communication_plan
from counterflow.program.communication.receive_buffers import Lifetime, colour, lifetimes
from counterflow.program.lowering import lower, lower_evaluation
from counterflow.program.rules import CheckSubject
from counterflow.schedule import schemes
from counterflow.schedule.ir import Op, OpKind, Schedule

SCHEDULES = [
    schemes.gpipe(4, 5),
    schemes.dapple(4, 8),
    schemes.dapple(4, 8, split=True),
    schemes.interleaved(3, 6, chunks=2),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.hanayo(3, 5, waves=2),
    schemes.zb_v(4, 8),
    schemes.dualpipe_v(4, 8),
    schemes.dualpipe(4, 8),
    schemes.pipedream_2bw(3, 6),
]


def wrong(program: Program, worker: int, slots: tuple[int, ...]) -> list[str]:
    plan = communication_plan(program)
    tables = [*plan.buffers]
    tables[worker] = replace(tables[worker], slots=slots)
    subject = CheckSubject(program.schedule, program, plan=replace(plan, buffers=tuple(tables)))
    return rules.details(rules.BUFFERS, subject).splitlines()


def test_an_input_lives_until_its_backward_and_a_gradient_until_its_op() -> None:
    lives = lifetimes(lower(schemes.dapple(3, 2)), 1)
    assert [(str(life.receive.output), life.start, life.end) for life in lives] == [
        ("F0.0", 0, 8),
        ("F1.0", 1, 10),
        ("B0.2", 6, 8),
        ("B1.2", 7, 10),
    ]


def test_of_a_split_backward_both_live_until_the_weight_gradients() -> None:
    program = lower(schemes.dapple(2, 1, split=True))
    (gradient,) = lifetimes(program, 0)
    (output,) = lifetimes(program, 1)
    weights = [OpKind.WEIGHT_GRADIENTS, 0, (0,)]
    assert program.actions[0][gradient.end] == Compute(Op(*weights))  # type: ignore[arg-type]
    assert program.actions[1][output.end] == Compute(Op(OpKind.WEIGHT_GRADIENTS, 1, (0,)))


@pytest.mark.parametrize("matching", list(Matching))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_as_many_buffers_as_messages_are_in_use_at_once(schedule: Schedule, matching: Matching) -> None:
    program = lower(schedule, matching=matching)
    for worker, table in enumerate(communication_plan(program).buffers):
        lives, actions = table.lifetimes, program.actions[worker]
        assert [life.receive for life in lives] == [a for a in actions if isinstance(a, Receive)]
        at = [{i for i, life in enumerate(lives) if life.start <= x <= life.end} for x in range(len(actions))]
        for live in at:
            assert len({table.slots[i] for i in live}) == len(live)
        assert table.count == max(map(len, at)) == table.in_use
        assert table.peak is None or len(at[table.peak]) == table.in_use
    assert not rules.details(rules.BUFFERS, CheckSubject(schedule, program))


def test_an_evaluation_needs_what_is_posted_ahead() -> None:
    program = lower_evaluation(schemes.dapple(4, 8))
    assert [table.count for table in communication_plan(program).buffers] == [0, 2, 2, 2]


def test_torch_has_43_buffers_for_zb_v_on_four_ranks_and_a_ring_has_a_set_each_way() -> None:
    """pytorch/pytorch 196465 has 43, and would have 33 if all messages of a rank shared buffers; NeMo
    AutoModel 3780 has two rings of S - s + 2."""
    tables = communication_plan(lower(schemes.zb_v(4, 8))).buffers
    assert [table.count for table in tables] == [2, 11, 12, 7]
    tables = communication_plan(lower(schemes.dapple(8, 16))).buffers
    for stage, table in enumerate(tables):
        assert table.count <= 8 - stage + 2


def test_the_rule_refuses_a_buffer_in_use() -> None:
    program = lower(schemes.dapple(3, 3))
    table = communication_plan(program).buffers[1]
    first, second, *others = table.slots
    assert first != second
    line, *_ = wrong(program, 1, (first, first, *others))
    assert line == (
        "worker 1, action 1: ReceiveActivation F1.0 from worker 0 uses buffer 0, which still contains F0.0"
    )


def test_the_rule_refuses_one_buffer_too_many_and_one_missing() -> None:
    program = lower(schemes.dapple(3, 3))
    slots = communication_plan(program).buffers[1].slots
    assert wrong(program, 1, (*slots[:-1], 9)) == [
        "worker 1: 5 receive buffers, but at most 4 messages are in use at once"
    ]
    assert "has no buffer" in wrong(program, 1, slots[:-1])[0]


@pytest.mark.parametrize("schedule", SCHEDULES[:8], ids=str)
def test_the_rule_refuses_every_pair_of_messages_in_one_buffer_that_live_at_once(schedule: Schedule) -> None:
    program = lower(schedule)
    for worker, table in enumerate(communication_plan(program).buffers):
        for i, life in enumerate(table.lifetimes):
            for j, other in enumerate(table.lifetimes[:i]):
                if other.end >= life.start:
                    slots = [*table.slots]
                    slots[i] = slots[j]
                    assert "still contains" in wrong(program, worker, tuple(slots))[0]
                    break


def test_a_wrong_table_breaks_only_its_rule() -> None:
    program = lower(schemes.dapple(3, 3))
    plan = communication_plan(program)
    slots = plan.buffers[1].slots
    table = replace(plan.buffers[1], slots=(slots[0],) * len(slots))
    wrong_plan = replace(plan, buffers=(plan.buffers[0], table, plan.buffers[2]))
    report = inspect(program.schedule, program=program, plan=wrong_plan)
    assert [result.rule for result in report.results if not result.ok] == [rules.BUFFERS.name]


LIVES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(1, 3)), max_size=20)


@given(LIVES)
def test_colours_of_drawn_lives(drawn: list[tuple[int, int, int]]) -> None:
    lives = [Lifetime(None, start, start, start + length) for start, length, _ in sorted(drawn)]  # type: ignore[arg-type]
    table = colour(lives)
    assert table.count == max(sum(a <= x <= b for _, a, _, b in lives) for x in range(31)) == table.in_use
    for i, life in enumerate(lives):
        for j in range(i):
            assert table.slots[i] != table.slots[j] or lives[j].end < life.start


@given(LIVES)
def test_messages_that_live_at_once_do_not_overlap(drawn: list[tuple[int, int, int]]) -> None:
    rows = sorted(drawn)
    lives = [Lifetime(None, start, start, start + length) for start, length, _ in rows]  # type: ignore[arg-type]
    sizes = [size for _, _, size in rows]
    layout = arrange(lives, sizes)
    live = [sum(z for (_, a, _, b), z in zip(lives, sizes, strict=True) if a <= x <= b) for x in range(31)]
    assert layout.in_use == max(live) <= layout.size
    if len({*sizes}) == 1:
        assert layout.size == layout.in_use
    for i, life in enumerate(lives):
        begin, end = layout.offsets[i], layout.offsets[i] + sizes[i]
        assert 0 <= begin <= end <= layout.size
        for j in range(i):
            if lives[j].end >= life.start:
                assert layout.offsets[j] >= end or layout.offsets[j] + sizes[j] <= begin


def test_a_large_message_takes_the_place_of_two_small_ones() -> None:
    lives = [Lifetime(None, start, start, end) for start, end in ((0, 4), (1, 4), (5, 8), (6, 9))]  # type: ignore[arg-type]
    assert arrange(lives, (6, 6, 8, 4)).size == 12
    lives = [Lifetime(None, start, start, end) for start, end in ((0, 9), (1, 4), (2, 4), (6, 8))]  # type: ignore[arg-type]
    layout = arrange(lives, (6, 6, 6, 8))  # buffers of one message each would have 20
    assert layout.size == layout.in_use == 18


WIDTHS = ((256, 128), (512, 96), (64, 256), (384, 200), (8, 8))


@pytest.mark.parametrize("schedule", [*SCHEDULES, schemes.interleaved_zb(4, 8, chunks=2)], ids=str)
def test_blocks_of_unequal_messages_are_hardly_larger_than_what_is_in_use(schedule: Schedule) -> None:
    plan = communication_plan(lower(schedule))
    size = in_use = 0
    for first, last in WIDTHS:
        stages = schedule.stages
        widths = [first + (last - first) * stage // stages for stage in range(stages + 1)]
        for table in plan.buffers:
            sizes = [widths[life.receive.output.boundary + 1] for life in table.lifetimes]
            layout = arrange(table.lifetimes, sizes)
            size, in_use = size + layout.size, in_use + layout.in_use
    assert size <= 1.02 * in_use
