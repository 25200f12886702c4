"""Workloads: what has to be computed, in no order; products by exact fractions; split backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.checker import check, inspect
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.schedule import registry, schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, OpKind, Product, Schedule
from counterflow.schedule.placement import linear
from counterflow.schedule.residency import peak_activations
from counterflow.schedule.workload import Pass, Share, Workload, passes_of, plain
from counterflow.simulation import ByteCosts, Costs, simulate

from ..program.test_checker import broken, every_scheme

EVERY = Product.OUTPUT, Product.INPUT_GRADIENT, Product.WEIGHT_GRADIENTS


def split_1f1b() -> Schedule:
    """Two stages, two micro-batches: weight gradients where the worker would wait, or at the end.

    With F = I = W = 1:  P0  0 1 . i i w w      P1  . 0 i 1 i w w
    """
    rows = "F0.0 F1.0 I0.0 I1.0 W0.0 W1.0", "F0.1 I0.1 F1.1 I1.1 W0.1 W1.1"
    return schedule_of(*rows, split=True)


def schedule_of(*rows: str, split: bool = False, micro_batches: int = 2) -> Schedule:
    orders = tuple(tuple(map(_op, row.split())) for row in rows)
    return Schedule("mine", (), plain(linear(len(rows)), micro_batches, split=split), orders)


def _op(text: str) -> Op:
    batch, stage = text[1:].split(".")
    return Op(OpKind(text[0]), int(stage), (int(batch),))


def test_a_split_backward_passes_and_runs_as_drawn() -> None:
    schedule = split_1f1b()
    check(schedule)
    found = simulate(schedule, Costs(forward=1, input_gradient=1, weight_gradients=1))
    starts = [{str(s.op): s.start for s in found.timeline if s.worker == w} for w in range(2)]
    assert starts[0] == {"F0.0": 0, "F1.0": 1, "I0.0": 3, "I1.0": 5, "W0.0": 6, "W1.0": 7}
    assert starts[1] == {"F0.1": 1, "I0.1": 2, "F1.1": 3, "I1.1": 4, "W0.1": 5, "W1.1": 6}
    assert found.makespan == 8


def test_a_forward_is_stashed_until_its_weight_gradients_are_made() -> None:
    assert peak_activations(split_1f1b()) == (2, 2)
    assert peak_activations(schemes.dapple(2, 2)) == (2, 1)


def test_memory_between_the_two_halves_of_a_backward() -> None:
    memory = ByteCosts(activations=10, kept_for_weights=4)
    found = simulate(split_1f1b(), Costs(forward=1, input_gradient=1, weight_gradients=1, memory=memory))
    held = [dict(zip(use.times, use.amounts, strict=True)) for use in found.memory or ()]
    # Worker 1: F0 at 1, I0 ends at 3 as F1 starts, I1 ends at 5, W0 at 6, W1 at 7.
    assert held[1] == {0.0: 0, 1.0: 10, 3.0: 14, 5.0: 8, 6.0: 4, 7.0: 0}
    whole = simulate(split_1f1b(), Costs(memory=ByteCosts(activations=10)))
    assert [found.peak_bytes, whole.peak_bytes] == [(20, 14), (20, 20)]


def test_what_is_recomputed_is_recomputed_once() -> None:
    found = simulate(split_1f1b(), Costs(forward=1, input_gradient=2, weight_gradients=3, recompute="stage"))
    lasts = {(s.op.kind, s.end - s.start) for s in found.timeline}
    alone = {(OpKind.FORWARD, 1), (OpKind.WEIGHT_GRADIENTS, 3)}
    assert lasts == alone | {(OpKind.RECOMPUTATION, 1), (OpKind.INPUT_GRADIENT, 2)}
    layers = replace(found.costs, recompute="layer")
    lasts = {(s.op.kind, s.end - s.start) for s in simulate(split_1f1b(), layers).timeline}
    assert lasts == alone | {(OpKind.INPUT_GRADIENT, 3)}


def test_unsaid_a_split_backward_lasts_as_long_as_a_whole_one() -> None:
    found = simulate(split_1f1b(), Costs(forward=1, backward=[2, 6], input_gradient=[1.5, 2]))
    lasts = {str(s.op)[0] + str(s.op.stage): s.end - s.start for s in found.timeline}
    assert lasts == {"F0": 1, "F1": 1, "I0": 1.5, "W0": 0.5, "I1": 2, "W1": 4}


def test_split_text_read_back_is_the_same_schedule() -> None:
    schedule = split_1f1b()
    assert loads(dumps(schedule), "x.json") == schedule


def test_weight_gradients_before_their_input_gradient_break_only_that() -> None:
    wrong = schedule_of("F0.0 W0.0 I0.0", split=True, micro_batches=1)
    assert broken(wrong) == ["input gradient before its weight gradients"]
    assert "worker 0, op 1: W0.0 comes before its input gradient" in inspect(wrong).results[3].detail


def test_a_backward_and_its_input_gradient_are_not_both_there() -> None:
    both = schedule_of("F0.0 B0.0 I0.0 W0.0", split=True, micro_batches=1)
    assert broken(both) == ["every op exactly once"]
    detail = inspect(both).results[0].detail
    assert "B0.0 is not an op of the workload" in detail
    assert "I0.0 makes an input gradient that B0.0 makes too" in detail
    again = loads(dumps(both), "x.json")  # what a file splits is read off its ops
    assert broken(again) == ["every op exactly once"]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        # A half, a quarter of the same half and the quarter after it: as floats these add up to one.
        (("0/2", "0/4", "1/4"), "more than one backward of its part from 0 to 1/4"),
        (("0/2", "0/4", "1/4"), "no backward of its part from 1/2 to 1"),
        (("0/3", "2/3"), "no backward of its part from 1/3 to 2/3"),
        (("0/2",), "no backward of its part from 1/2 to 1"),
    ],
)
def test_shares_that_overlap_or_leave_a_gap(shares: tuple[str, ...], message: str) -> None:
    text = dumps(schemes.dapple(2, 1))
    for stage in range(2):
        parts = ", ".join(f'"B0.{stage}:{share}"' for share in shares)
        text = text.replace(f'"B0.{stage}"', parts)
    schedule = loads(text, "edited.json")
    assert "every op exactly once" in broken(schedule)
    assert message in inspect(schedule).results[0].detail
    with pytest.raises(ScheduleError, match="every op exactly once"):
        check(schedule)


def test_thirds_are_one_whole() -> None:
    text = dumps(schemes.dapple(2, 1))
    for stage in range(2):
        text = text.replace(f'"B0.{stage}"', ", ".join(f'"B0.{stage}:{part}/3"' for part in range(3)))
    check(loads(text, "edited.json"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"B1.0"', '"B1.0:0/0"', r"orders\[0\]\[3\]: .*parts count from 0, so 0 parts have no part 0"),
        ('"B1.0"', '"B1.0:3/3"', r"orders\[0\]\[3\]: .*parts count from 0, so 3 parts have no part 3"),
        ('"B1.0"', '"B' + "1" * 40 + '.0"', "a number of 40 digits"),
        ('"B1.0"', '"B(0,' + "1" * 5000 + ').0"', "a number of 5000 digits"),
        (
            '"micro_batches": 2,\n  "p',
            '"micro_batches": 200000000,\n  "p',
            "the orders run 4 forwards in total",
        ),
        (
            '"B1.0"',
            '"B1.0v100000000"',
            r"\[3\]: B1\.0v100000000 uses version 100000000, and 1",
        ),
        ('"F1.0"', '"F1.0:0/100000000"', "in 100000000 slices, but the orders run 4 forwards in total"),
        ('"periods": 1', '"periods": 1000000', "the orders run 4 forwards in total"),
        ('"periods": 1', '"periods": ' + "9" * 5000, "a number has thousands of digits"),
        ('"periods": 1', '"periods": 1, "versions": [[0], [0]]', "a synchronous schedule has one version"),
    ],
)
def test_bad_files_are_refused_at_reading(old: str, new: str, message: str) -> None:
    text = dumps(schemes.dapple(2, 2))
    assert text.count(old) == 1
    with pytest.raises(ConfigError, match=message):
        loads(text.replace(old, new), "x.json")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(1, 12), st.integers(0, 12))
def test_a_scheme_states_the_workload_that_its_orders_run(depth: int, n: int, extra: int) -> None:
    for schedule in every_scheme(depth, n, extra):
        workload = schedule.workload
        assert workload.passes == passes_of(schedule.ops())
        assert not list(workload.faults())
        ops = list(workload.ops())
        assert len(ops) == len(set(ops))
        assert set(ops) == set(schedule.ops())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 12))
def test_what_an_op_needs_is_what_the_graph_says(depth: int, n: int, extra: int) -> None:
    for schedule in every_scheme(depth, n, extra):
        graph = OpGraph(schedule)
        for node, op in enumerate(graph.ops):
            needs = schedule.workload.needs(op)
            source = graph.source[node]
            elsewhere = [need for need in needs if need.stage != op.stage]
            assert elsewhere == ([] if source is None else [graph.ops[source]])
            here = {need.kind for need in needs if need.stage == op.stage}
            assert here == (set() if op.kind.is_forward else {OpKind.FORWARD})


def test_every_product_of_a_split_workload_once() -> None:
    placement = linear(3)
    mixed = Pass(0, (0,), (Share((0,), split=(0, 2)),))
    ops = list(Workload(placement, 1, (mixed,)).ops())
    assert " ".join(map(str, ops)) == "F0.0 F0.1 F0.2 I0.0 W0.0 B0.1 I0.2 W0.2"
    made = [(op.stage, product) for op in ops for product in op.kind.makes]
    assert sorted(made, key=str) == sorted(((s, p) for s in range(3) for p in EVERY), key=str)
    needs = {str(op): " ".join(map(str, Workload(placement, 1, (mixed,)).needs(op))) for op in ops}
    assert needs["B0.1"] == "F0.1 I0.2"
    assert needs["I0.0"] == "F0.0 B0.1"
    assert needs["W0.0"] == "I0.0"


def test_faults_of_a_workload() -> None:
    two = Workload(linear(2), 2, (Pass(0, (0,), (Share((0,)),)), Pass(0, (0,), ())))
    assert list(two.faults()) == [
        "micro-batch 0 of pipe 0: 2 forwards per stage, expected 1",
        "micro-batch 1 has no forward",
        "micro-batch 0 of pipe 0: no backward of it",
    ]
    assert not list(replace(two, micro_batches=1, passes=two.passes[1:], trains=False).faults())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("F(0,1).0 F(2,3).0 B(0,3).0 B(1,2).0",), "that no one forward made together"),
        (("F0.0 F1.0 F2.0 F3.0 B0.0 B1.0 B2.0 B3.0 B5.0",), "that no one forward made together"),
    ],
)
def test_backwards_without_their_forward_are_told(rows: tuple[str, ...], message: str) -> None:
    text = dumps(schemes.dapple(1, 4))
    start = text.index('"orders"')
    listed = ",".join("[" + ",".join(f'"{op}"' for op in row.split()) + "]" for row in rows)
    schedule = loads(text[:start] + f'"orders": [{listed}]' + "}", "x.json")
    assert message in inspect(schedule).results[0].detail
    with pytest.raises(ScheduleError):
        check(schedule)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"B0.0"', '"B0.0:0/4", "B0.0:1/4", "B0.0:1/2"', "into parts of different sizes"),
        ('"F0.0", "B0.0", "F1.0", "B1.0"', '"F(0,1).0", "B(0,1).0"', "a backward of several micro-batches"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_before_anything_starts(
    old: str, new: str, message: str
) -> None:
    text = dumps(schemes.dapple(1, 2))
    assert old in text
    schedule = loads(text.replace(old, new), "x.json")
    check(schedule)
    with pytest.raises(ConfigError, match=message):
        refuse_what_cannot_run(schedule)


def test_more_periods_go_on_like_the_last() -> None:
    short, long = (schemes.pipedream(3, periods=n).workload for n in (5, 9))
    assert short.of_periods(9) == long
    assert long.of_periods(5) == short


@pytest.mark.parametrize(("name", "depth"), [("dualpipe", "stages"), ("dualpipe-v", "workers")])
def test_what_dualpipe_says_that_it_splits_its_orders_do(name: str, depth: str) -> None:
    for workers in (2, 4, 6, 10):
        for micro_batches in (2 * workers, 2 * workers + 2, 3 * workers, 5 * workers):
            schedule = registry.build(name, {depth: workers, "micro_batches": micro_batches})
            assert schedule.workload.passes == passes_of(schedule.ops())
