"""Recomputations as ops of their own: where they are, what they save of a step, and what is wrong of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.checker import check, inspect
from counterflow.schedule import schemes, torch_csv
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import OpKind, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.recompute_ops import (
    as_recomputed,
    with_recomputations,
    without_recomputations,
)
from counterflow.simulation import ByteCosts, Costs, lower, peak_bytes, simulate

SCHEDULES = [
    schemes.gpipe(4, 6),
    schemes.dapple(4, 6),
    schemes.interleaved(2, 4, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 4),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.mixpipe(4, 8),
    schemes.hanayo(2, 4, waves=2),
    schemes.zb_h1(4, 6),
    schemes.zb_h2(3, 6),
    schemes.zb_v(2, 5),
    schemes.interleaved_zb(2, 4),
    schemes.dualpipe(4, 8),
    schemes.dualpipe_v(2, 4),
    schemes.dapple(stages=4, micro_batches=3, slices=3),
    schemes.zb_h1(stages=3, micro_batches=4, slices=2),
    schemes.chimera(stages=2, micro_batches=2, slices=(3, 1)),
    schemes.pipedream(3),
    schemes.pipedream_2bw(3, 4),
    schemes.wpipe(3, 4),
]


def staircase(schedule: Schedule, p2p: float) -> list[str]:
    """One line a worker, one character a unit of time: digit forward, ' recomputation, a to b backward."""
    result = simulate(schedule, Costs(p2p=p2p, recompute="stage"))
    rows = [["."] * int(result.makespan) for _ in range(schedule.workers)]
    for span in result.timeline:
        (batch,) = span.op.micro_batches
        letter = "A" if span.op.kind is OpKind.WEIGHT_GRADIENTS else "a"
        marks = {OpKind.FORWARD: str(batch), OpKind.RECOMPUTATION: "'"}
        for time in range(int(span.start), int(span.end)):
            rows[span.worker][time] = marks.get(span.op.kind, chr(ord(letter) + batch))
    return [" ".join(row) for row in rows]


@pytest.mark.parametrize(
    ("schedule", "p2p", "expected"),
    [
        (schemes.dapple(2, 1), 0, ["0 ' . . . a a", ". 0 ' a a . ."]),
        (schemes.dapple(2, 1), 1, ["0 ' . . . . . a a", ". . 0 ' a a . . ."]),
        (schemes.dapple(2, 2), 1, ["0 1 ' . . . . a a ' . b b", ". . 0 ' a a 1 ' b b . . ."]),
        (schemes.chimera(2, 2), 0, ["0 1 ' b b ' a a", "1 0 ' a a ' b b"]),
        (schemes.chimera(2, 2), 1, ["0 . 1 ' b b ' a a", "1 . 0 ' a a ' b b"]),
        (schemes.zb_h1(2, 2), 1, ["0 1 ' . . . a A ' b B", ". . 0 ' a 1 ' b A B ."]),
        (
            schemes.hanayo(2, 2),
            0,
            ["0 1 . 0 ' a a 1 ' b b ' a a ' . . . b b", ". 0 0 1 1 ' . a a ' a a ' b b ' b b . ."],
        ),
        (
            schemes.wpipe(2, 2, periods=1),
            0,
            ["0 1 0 1 ' . . a a ' . b b ' a a ' b b", ". 0 1 0 ' a a 1 ' b b ' a a ' b b . ."],
        ),
    ],
    ids=str,
)
def test_a_worker_recomputes_while_it_waits(schedule: Schedule, p2p: float, expected: list[str]) -> None:
    assert staircase(schedule, p2p) == expected


def test_a_message_is_hidden() -> None:
    """WPipe, Figure 13: of 10 with two messages of 1 between two workers, 1 is hidden."""
    one = schemes.dapple(2, 1)
    assert simulate(one, Costs(p2p=1, recompute="stage")).makespan == 9
    assert simulate(one, Costs(p2p=1, recompute="layer")).makespan == 10
    assert simulate(one, Costs(p2p=1, recompute="stage", recompute_ahead=False)).makespan == 10
    both = (simulate(one, Costs(p2p=0, recompute=kind)).makespan for kind in ("stage", "layer"))
    assert tuple(both) == (7, 8)
    assert simulate(schemes.dapple(1, 4), Costs(recompute="stage")).makespan == 16  # nothing to wait for


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_step_takes_longer_and_none_needs_more(schedule: Schedule) -> None:
    """Than with backwards that recompute by themselves; the work is the same."""
    memory = ByteCosts(activations=7.0, inputs=2.0, kept_for_weights=3.0, weights=1.0)
    for p2p in (0.0, 0.25, 1.0, 3.0):
        costs = Costs(p2p=p2p, recompute="stage", memory=memory, input_gradient=1.5)
        apart = simulate(schedule, costs)
        inside = simulate(schedule, replace(costs, recompute_ahead=False))
        assert inside.schedule is schedule
        assert apart.makespan <= inside.makespan
        if schedule.synchronous:
            assert apart.steady_step is not None
            assert inside.steady_step is not None
            assert apart.steady_step <= inside.steady_step * (1 + 1e-9)
        assert apart.busy == pytest.approx(inside.busy)
        assert apart.peak_bytes == pytest.approx(inside.peak_bytes)
        assert apart.peak_bytes == pytest.approx(peak_bytes(schedule, costs))
        assert apart.peak_activations == simulate(schedule).peak_activations
        program = lower(schedule, costs)
        played = simulate(program, costs)
        assert (played.start.tolist(), played.end.tolist()) == (apart.start.tolist(), apart.end.tolist())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_recomputation_is_just_before_its_backward(schedule: Schedule) -> None:
    found = with_recomputations(schedule)
    for order in found.orders:
        for op, after in pairwise(order):
            if op.kind is OpKind.RECOMPUTATION:
                assert after.kind.again is not None
                assert after.kind.makes
                assert op[1:] == after[1:]
    assert found == with_recomputations(found)
    assert found is with_recomputations(schedule)
    assert without_recomputations(found) == schedule
    assert without_recomputations(schedule) is schedule
    check(found)
    read = loads(dumps(found), "x.json")
    assert read == found
    if found.steady is not None:
        rows = zip(found.orders, found.steady, schedule.orders, schedule.steady or (), strict=True)
        for order, (begin, stop), before, (first, last) in rows:
            others = [op for op in order[begin:stop] if op.kind is not OpKind.RECOMPUTATION]
            assert others == list(before[first:last])
        assert simulate(found).steady_step == pytest.approx(
            simulate(schedule, Costs(recompute="stage")).steady_step
        )


def test_rules_of_recomputations() -> None:
    found = with_recomputations(schemes.dapple(1, 2))
    (order,) = found.orders
    assert [str(op) for op in order] == ["F0.0", "R0.0", "B0.0", "F1.0", "R1.0", "B1.0"]

    def broken(*places: int) -> list[str]:
        wrong = replace(found, orders=(tuple(order[place] for place in places),))
        return [result.rule for result in inspect(wrong).results if result.ok is False]

    assert broken(0, 3, 1, 4, 5, 2) == []  # earlier than just before it is allowed
    assert broken(0, 2, 1, 3, 4, 5) == ["recomputation before its backward"]
    assert broken(1, 0, 2, 3, 4, 5) == ["forward before its backward"]
    assert broken(0, 1, 2, 3, 5) == ["every op exactly once"]
    with pytest.raises(ScheduleError, match=r"worker 0, op 1: B0\.0 comes before its recomputation"):
        check(replace(found, orders=(tuple(order[place] for place in (0, 2, 1, 3, 4, 5)),)))


def test_a_schedule_says_what_is_recomputed() -> None:
    plain = schemes.dapple(2, 2)
    found = with_recomputations(plain)
    assert simulate(found).makespan == simulate(plain, Costs(recompute="stage")).makespan
    assert as_recomputed(plain, Recompute.LAYER) is plain
    assert as_recomputed(found, Recompute.STAGE) is found
    words = r"dapple\(stages=2, micro_batches=2\) recomputes whole stages \(R\), but recompute='{}'"
    for kind in ("none", "layer"):
        with pytest.raises(ConfigError, match=words.format(kind)):
            as_recomputed(found, Recompute(kind))
    with pytest.raises(ConfigError, match=words.format("layer")):
        simulate(found, Costs(recompute="layer"))
    with pytest.raises(ConfigError, match="has recomputations as ops of their own, which torch's CSV"):
        torch_csv.dumps(found)
    evaluated = replace(plain, workload=plain.workload.evaluation())
    assert with_recomputations(evaluated) is evaluated
