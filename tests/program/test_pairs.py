"""Pairs: which ops of a schedule can run at once, and the lists and rules of those that do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from counterflow.errors import ConfigError, DeadlockError
from counterflow.program import rules
from counterflow.program.actions import Action, Compute, Matching
from counterflow.program.checker import check, inspect
from counterflow.program.lowering import Ends, lower, lower_evaluation
from counterflow.program.pairs import paired_ops, with_pairs
from counterflow.schedule import registry, schemes
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.schedule.scheme import DEPTH

from .test_checker import broken, rewritten
from .test_rules import said


def _pairs(schedule: Schedule, worker: int) -> str:
    return ", ".join(" ".join(map(str, pair)) for pair in paired_ops(schedule)[worker])


def _schedules() -> Iterator[Schedule]:
    """Each synchronous scheme with a few sizes, with and without recomputations."""
    for scheme in registry.SCHEMES.values():
        if not scheme.synchronous:
            continue
        depth = next(option.name for option in scheme.options if option.name in DEPTH)
        for workers, micro_batches in ((2, 4), (2, 9), (4, 8), (4, 16)):
            try:
                schedule = registry.build(scheme.name, {depth: workers, "micro_batches": micro_batches})
            except ConfigError:
                continue
            yield schedule
            yield with_recomputations(schedule)


def test_pairs_of_dualpipe_v() -> None:
    """Those of its figure, from the first forward that finds a gradient to run beside it."""
    schedule = with_pairs(schemes.dualpipe_v(workers=2, micro_batches=5))
    assert _pairs(schedule, 0) == "F3.0 B1.3, F2.3 B0.0, F4.0 B2.3, F3.3 B1.0, F4.3 B2.0"
    assert _pairs(schedule, 1) == "F2.1 B0.2, F2.2 B0.1, F3.1 B1.2, F3.2 B1.1, F4.1 B2.2, F4.2 B2.1"


def test_a_recomputation_belongs_to_the_side_of_its_backward() -> None:
    schedule = with_pairs(with_recomputations(schemes.dualpipe_v(workers=1, micro_batches=3)))
    assert _pairs(schedule, 0) == "F1.0 R0.1 B0.1, F1.1 R0.0 B0.0, F2.0 R1.1 B1.1, F2.1 R1.0 B1.0"


def test_which_schemes_have_pairs() -> None:
    counts = {
        name: sum(map(len, with_pairs(registry.build(name, options)).pairs))
        for name, options in {
            "dualpipe": {"stages": 4, "micro_batches": 16},
            "dualpipe-v": {"workers": 4, "micro_batches": 16},
            "interleaved": {"workers": 4, "micro_batches": 16},
            "zb-v": {"workers": 4, "micro_batches": 16},
            "chimera": {"stages": 4, "micro_batches": 16},
            "dapple": {"stages": 4, "micro_batches": 16},
        }.items()
    }
    assert counts == {
        "dualpipe": 46, "dualpipe-v": 90, "interleaved": 40, "zb-v": 0, "chimera": 0, "dapple": 0
    }  # fmt: skip


def test_no_op_of_a_pair_needs_the_other() -> None:
    for schedule in _schedules():
        graph = OpGraph(schedule)
        place = {op: node for node, op in enumerate(graph.ops)}
        for worker, pairs in enumerate(paired_ops(with_pairs(schedule))):
            for pair in pairs:
                first, *_, last = pair
                assert first.stage != last.stage
                assert not _reaches(graph, place[last], place[first], worker), (schedule, pair)


def _reaches(graph: OpGraph, node: int, before: int, worker: int) -> bool:
    """Whether what an op takes of another worker needs an op of this worker from a place on."""
    seen: set[int] = set()
    stack = [source for source in (graph.source[node],) if source is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if graph.worker[node] == worker:
            if node >= before:
                return True
            continue  # all before it is before the pair
        source = graph.source[node]
        stack += [] if source is None else [source]
        if node > graph.first[graph.worker[node]]:
            stack.append(node - 1)
    return False


def test_the_checker_accepts_pairs_and_all_their_lists() -> None:
    for number, schedule in enumerate(_schedules()):
        paired = with_pairs(schedule)
        if not paired.pairs:
            continue
        check(paired)
        ends = (Ends(), Ends(barrier=False), Ends(barrier=False, norm=True))[number % 3]
        for matching in Matching:
            lower(paired, replicas=2, matching=matching, ends=ends)
        lower_evaluation(paired)


def test_a_pair_is_one_op_in_its_worker_s_list() -> None:
    """Receives of both are posted before it, and both products are sent after it."""
    program = lower(with_pairs(schemes.dualpipe_v(workers=2, micro_batches=5)))
    actions = program.actions[1]
    at = next(index for index, action in enumerate(actions) if str(action).startswith("Forward F2.2"))
    assert [str(action) for action in actions[at - 2 : at + 4]] == [
        "ReceiveActivation F3.0 from worker 0",
        "ReceiveGradient B1.3 from worker 0",
        "Forward F2.2 at once with B0.1",
        "Backward B0.1",
        "SendActivation F2.2 to worker 0",
        "SendGradient B0.1 to worker 0",
    ]


def test_pairs_are_the_same_object_again_and_stay() -> None:
    schedule = schemes.dualpipe_v(workers=2, micro_batches=5)
    assert with_pairs(schedule) is with_pairs(schedule)
    assert with_pairs(with_pairs(schedule)) is with_pairs(schedule)
    without = schemes.zb_v(workers=2, micro_batches=5)
    assert with_pairs(without) is without
    assert with_recomputations(with_pairs(schedule)).pairs == ()


def test_asynchronous_schedules_have_none() -> None:
    with pytest.raises(ConfigError, match="ops run at once in synchronous schemes only"):
        with_pairs(schemes.pipedream(stages=2))


def _with(schedule: Schedule, *pairs: tuple[tuple[int, int], ...]) -> Schedule:
    return replace(schedule, pairs=pairs)


def test_pairs_that_are_none_break_only_their_rule() -> None:
    schedule = schemes.dualpipe_v(workers=1, micro_batches=2)  # F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 I1.0 W1.0
    for pairs, reason in (
        (((0, 2),), "worker 0, ops 0 to 1: F0.0, F0.1 are not a forward, and a backward of another stage"),
        (((3, 5),), "worker 0, ops 3 to 4: B0.1, F1.1 are not a forward, and a backward of another stage"),
        (
            ((2, 4), (3, 5)),
            "worker 0, ops 3 to 4: B0.1, F1.1 overlap an earlier pair, or the end of the order",
        ),
        (((8, 10),), "worker 0, ops 8 to 9: W1.0 overlap an earlier pair, or the end of the order"),
    ):
        wrong = _with(schedule, pairs)
        assert broken(wrong) == [rules.PAIRS.name]
        assert said(rules.PAIRS, wrong) == [reason]
    assert said(rules.PAIRS, _with(schedule, (), ())) == ["pairs of 2 workers, but there are 1"]


def test_ops_that_need_each_other_by_way_of_another_worker_are_a_deadlock() -> None:
    """B0.2 takes B0.3 of worker 1, which comes after F1.1 there, which takes F1.0."""
    schedule = schemes.interleaved(workers=2, micro_batches=2)
    ops = {str(op): op for op in schedule.ops()}
    texts = ("F0.0 F0.2 F1.0 B0.2 F1.2 B0.0 B1.2 B1.0", "F0.1 F0.3 F1.1 B0.3 F1.3 B1.3 B0.1 B1.1")
    schedule = replace(schedule, orders=tuple(tuple(ops[text] for text in row.split()) for row in texts))
    assert inspect(schedule).ok
    assert "F1.0 B0.2" not in _pairs(with_pairs(schedule), 0)
    wrong = _with(schedule, ((2, 4),), ())
    assert broken(wrong) == [rules.DEADLOCK.name]
    with pytest.raises(DeadlockError, match=r"op 3: B0\.2 waits for B0\.3 \(worker 1, op 3\)"):
        check(wrong)


def test_lists_with_other_pairs_break_only_their_rule() -> None:
    schedule = with_pairs(schemes.dualpipe_v(workers=2, micro_batches=5))
    program = lower(schedule)
    apart = rewritten(program, 0, _split)
    assert broken(schedule, apart) == [rules.COMPUTES_PAIRS.name]
    (line,) = said(rules.COMPUTES_PAIRS, schedule, apart)
    assert line.endswith("Forward F3.0, but the schedule runs F3.0, B1.3 at once")
    between = rewritten(program, 1, _interrupt)
    assert broken(schedule, between) == [rules.COMPUTES_PAIRS.name]
    assert said(rules.COMPUTES_PAIRS, schedule, between)[0].endswith(
        "another action is among the ops that run at once"
    )


def _split(actions: list[Action]) -> None:
    at = next(index for index, action in enumerate(actions) if isinstance(action, Compute) and action.pair)
    first = actions[at]
    assert isinstance(first, Compute)
    actions[at] = Compute(first.op)


def _interrupt(actions: list[Action]) -> None:
    """Post a receive within the pair that follows it, which does not need it."""
    at = next(index for index, action in enumerate(actions) if str(action).startswith("Forward F2.2"))
    actions[at - 1], actions[at] = actions[at], actions[at - 1]
