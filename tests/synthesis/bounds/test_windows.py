"""Rules, heads and tails of small problems, by hand: far micro-batches, messages, memory of two stages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import counterflow as cf
from counterflow.schedule.ir import OpKind, SkipLink
from counterflow.schedule.placement import bidirectional, linear, wave
from counterflow.schedule.workload import plain
from counterflow.synthesis.bounds import windows
from counterflow.synthesis.bounds.windows import (
    Precedence,
    _Chain,
    count_within,
    in_order,
    windows_of,
)
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Problem, Store

NO = -math.inf


def alone(forward: float, backward: float, count: int) -> Problem:
    """One worker: letters F and B."""
    return problem_of(plain(linear(1), count), cf.Costs(forward=forward, backward=backward))


def busy(count: int) -> Problem:
    """F0 takes 2, F1 1, B0 4, B1 2, messages 0.5, in which workers do nothing else; letters F0 B0 F1 B1."""
    costs = cf.Costs(forward=(2, 1), backward=(4, 2), p2p=0.5, overlap=False)
    return problem_of(plain(linear(2), count), costs)


# Far micro-batches


def test_few_ops_are_looked_at_one_by_one() -> None:
    """A backward waits for its forward, 4 after the one before; before the end all backwards wait."""
    assert windows_of(alone(4, 2, 5)).of_span(0) == (
        [[0, 4, 8, 12, 16], [4, 8, 12, 16, 20]],
        [[18, 14, 10, 6, 2], [8, 6, 4, 2, 0]],
    )
    assert windows_of(alone(2, 4, 5)).of_span(0) == (
        [[0, 2, 4, 6, 8], [2, 6, 10, 14, 18]],
        [[20, 16, 12, 8, 4], [16, 12, 8, 4, 0]],
    )


def test_of_many_only_the_first_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies farther comes one after another: by its own time, not by what it waits for."""
    monkeypatch.setattr(windows, "_CLOSELY", 0)
    monkeypatch.setattr(windows, "_NEAR", 2)
    assert windows_of(alone(4, 2, 5)).of_span(0) == (
        [[0, 4, 8, 12, 16], [4, 8, 10, 12, 14]],
        [[18, 14, 10, 6, 2], [8, 6, 4, 2, 0]],
    )
    assert windows_of(alone(2, 4, 5)).of_span(0) == (
        [[0, 2, 4, 6, 8], [2, 6, 10, 14, 18]],
        [[14, 12, 10, 8, 4], [16, 12, 8, 4, 0]],
    )
    # Their messages keep their workers too: F0's 2 + 0.5, B1's 2 + 0.5.
    heads, tails = windows_of(busy(4)).of_span(0)
    assert heads == [[0, 2.5, 5, 7.5], [6, 10, 14, 18], [2.5, 5, 6, 7], [3.5, 6, 8.5, 11]]
    assert tails == [[17, 14.5, 12, 8], [12, 8, 4, 0], [12.5, 11.5, 10.5, 6.5], [13.5, 11, 8.5, 4.5]]


def test_how_many_ops_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_NEAR", 1)
    problem = busy(3)  # 12 ops on 2 workers
    closely = windows_of(problem).of_span(0)
    monkeypatch.setattr(windows, "_CLOSELY", 24)
    assert windows_of(problem).of_span(0) == closely
    monkeypatch.setattr(windows, "_CLOSELY", 23)
    near = windows_of(problem).of_span(0)
    assert near[0] != closely[0]
    assert near[1] != closely[1]


def test_a_span_knows_only_what_its_worker_begins_and_ends() -> None:
    """Without messages between them two workers have nothing to do with each other."""
    problem = problem_of(plain(bidirectional(2), 3, pipe_of=(0, 0, 1)))
    windows_ = windows_of(problem)
    names = [f"{letter} {letter.worker}" for letter in problem.letters]
    assert names == ["F.0 0", "B.0 0", "F.1p1 0", "B.1p1 0", "F.1 1", "B.1 1", "F.0p1 1", "B.0p1 1"]
    assert windows_.heads == [[0, 1], [4, 6], [1], [2], [1, 2], [2, 4], [0], [4]]
    slow = problem_of(plain(bidirectional(2), 3, pipe_of=(0, 1, 1)), cf.Costs(forward=4))
    assert windows_of(slow).heads == [[0], [10], [4, 8], [8, 12], [4], [8], [0, 4], [10, 14]]
    assert windows_.tails == [[7, 5], [2, 0], [4], [2], [6, 4], [4, 2], [5], [0]]
    heads, tails = windows_.of_span(0)
    assert heads == [[0, 1], [4, 6], [0], [1], [1, 2], [2, 4], [NO], [3]]
    assert tails == [[7, 5], [2, 0], [2], [0], [6, 4], [4, 2], [3], [NO]]


# What follows from an op


def test_what_follows_an_op_and_when() -> None:
    problem = problem_of(plain(linear(2), 3), cf.Costs(forward=(2, 1), backward=(4, 2), p2p=0.5))
    result = windows_of(problem)
    assert in_order(problem) == (0, 2, 3, 1)
    assert result.later(0) == {0: 0, 2: 2.5, 3: 3.5, 1: 6}
    assert result.later(3) == {3: 0, 1: 2.5}
    # Nobody looks farther than asked.
    assert result.later(0, [1]) == result.later(0, [2, 1]) == result.later(0)
    assert result.later(0, [3]) == {0: 0, 2: 2.5, 3: 3.5}
    assert result.later(0, [2]) == {0: 0, 2: 2.5}
    assert result.later(0, []) == {0: 0}
    assert [row[0] for row in result.heads] == [0, 6, 2.5, 3.5]


def test_an_op_waits_for_its_workers_message() -> None:
    """Letters F0 I0 W0 F1 I1 W1; after I1 worker 1 sends for 0.5, then W1 may start."""
    costs = cf.Costs(forward=0.25, input_gradient=1, weight_gradients=2, p2p=0.5, overlap=False)
    result = windows_of(problem_of(plain(linear(2), 2, split=True), costs))
    assert list(result.busy) == [0.5, 0, 0, 0, 0.5, 0]
    assert result.later(0) == {0: 0, 3: 0.75, 4: 1, 1: 2.5, 5: 2.5, 2: 3.5}
    assert result.heads == [[0, 0.75], [2.5, 4], [3.5, 5.5], [0.75, 1.5], [1, 2.5], [2.5, 4.5]]
    assert [result.rules[n] for n in range(3)] == [
        Precedence(0, 0, 1, 0.5),
        Precedence(0, 1, 0, 0.5),
        Precedence(4, 1, 0, 0.5),
    ]


def test_a_worker_sends_to_two() -> None:
    """What F0 makes goes to stages 1 and 2; the latest of what an op needs counts, in any order."""
    workload = replace(plain(linear(3), 2), skips=(SkipLink(0, 2),))
    problem = problem_of(workload, cf.Costs(p2p=1, overlap=False))
    result = windows_of(problem)
    assert list(result.busy) == [2, 0, 1, 1, 0, 2]  # F0 B0 F1 B1 F2 B2
    # F1 at 1 + 1, F2 at 2 + 1 + 1, B2 at 5, B1 at 5 + 2 + 1, B0 at 8 + 2 + 1
    assert result.later(0) == {0: 0, 2: 2, 4: 4, 5: 5, 3: 8, 1: 11}
    assert [row[0] for row in result.heads] == [0, 11, 2, 8, 4, 5]


# Memory


def stored(problem: Problem, at_start: list[float], at_end: list[float], *most: float) -> Problem:
    return replace(problem, stores=(Store("things", tuple(at_start), tuple(at_end), most),))


def rules_of_memory(problem: Problem) -> list[Precedence]:
    """Those that a problem without limits has not."""
    return list(windows_of(problem).rules[len(windows_of(replace(problem, stores=())).rules) :])


def two_stages(count: int = 4) -> Problem:
    """One worker with letters F0 I0 W0 F1 I1 W1, of which W0 takes 5 and W1 3."""
    costs = cf.Costs(forward=1, input_gradient=1, weight_gradients=(5, 3))
    return problem_of(plain(wave(1, 1), count, split=True), costs)


def test_a_limit_that_weight_gradients_free() -> None:
    """Each stage of a micro-batch holds 1 from its F to its W; of 4 micro-batches, by limits 0 to 4."""
    problem = two_stages()
    rules = {
        most: rules_of_memory(stored(problem, [1, 0, 0, 1, 0, 0], [0, 0, -1, 0, 0, -1], most))
        for most in range(5)
    }
    # Where stage 0 of so many fits, the next waits for an I0 and its W0, and for a W0.
    assert rules[1] == [
        Precedence(1, 0, 1, 5),
        Precedence(2, 0, 1),
        Precedence(5, 3, 1),
    ]
    assert rules[3] == [
        Precedence(1, 0, 3, 5),
        Precedence(4, 0, 2, 3),  # the third one's F0 and the first one's two stages are 4
        Precedence(2, 0, 3),
        Precedence(4, 3, 1, 3),
        Precedence(5, 3, 3),
    ]
    assert rules[4] == [Precedence(4, 0, 3, 3), Precedence(4, 3, 2, 3)]
    assert rules[0] == [Precedence(2, 0, 0), Precedence(5, 3, 0)]


def test_a_limit_that_input_gradients_free() -> None:
    problem = two_stages()
    assert rules_of_memory(stored(problem, [1, 0, 0, 1, 0, 0], [0, -1, 0, 0, -1, 0], 2)) == [
        Precedence(1, 0, 2),
        Precedence(4, 0, 1),
        Precedence(4, 3, 1),
    ]
    # In part: half is held until the weight gradients.
    assert rules_of_memory(stored(problem, [1, 0, 0, 1, 0, 0], [0, -0.5, -0.5, 0, -0.5, -0.5], 1.5)) == [
        Precedence(1, 0, 1),
        Precedence(2, 0, 3),
        Precedence(5, 3, 3),
    ]


def test_what_is_never_freed_makes_no_rule_of_a_whole_backward() -> None:
    problem = alone(1, 2, 4)
    assert rules_of_memory(stored(problem, [1, 0], [0, -0.5], 2)) == [Precedence(1, 0, 2)]
    assert rules_of_memory(stored(problem, [1, -1], [0, 0], 2)) == []  # freed at its start: 0 is held


def test_a_message_delays_what_waits_for_memory() -> None:
    """B1 sends for 0.5 before worker 1 has room for the next F1."""
    costs = cf.Costs(p2p=0.5, overlap=False)
    problem = problem_of(plain(linear(2), 3), costs, peak=(3, 1))
    assert rules_of_memory(problem) == [Precedence(3, 2, 1, 0.5)]


@pytest.mark.parametrize(
    ("at_start", "at_end", "least", "after", "waits"),
    [
        ([1, 0, 0], [0, 0, -1], 1, 1, True),
        ([0.5, 0, 0], [0.5, 0, -1], 0.5, 1, True),  # the forward takes more when it ends
        ([1.5, 1, 0], [-0.5, -1, -1], 1, 1, True),  # and less
        ([1, -0.25, 0], [0, 0, -0.75], 0.75, 0.75, True),  # the input gradient frees when it starts
        ([1, 0, 0], [0, -0.25, -0.75], 1, 0.75, False),  # and when it ends
        ([1, 0.5, 0], [0, 0.25, -1.75], 1, 1.75, True),
        ([1, 0.5, -0.25], [0, 0, -1.25], 1, 1.25, True),
        ([1, 0.5, 0.25], [0, 0, -1.75], 1, 1.5, True),
        ([1, 1, 0], [0, -1.25, -0.75], 1, 0.75, False),
    ],
)
def test_what_a_micro_batch_holds_of_a_stage(
    at_start: list[float], at_end: list[float], least: float, after: float, waits: bool
) -> None:
    costs = cf.Costs(forward=1, input_gradient=1, weight_gradients=5)
    problem = problem_of(plain(linear(1), 2, split=True), costs)
    number = {OpKind.FORWARD: 0, OpKind.INPUT_GRADIENT: 1, OpKind.WEIGHT_GRADIENTS: 2}
    store = Store("things", tuple(at_start), tuple(at_end), (4.0,))
    assert _Chain.of(problem, store, number) == _Chain(0, 1, 2, least, after, 5.0 if waits else 0.0)


def test_what_a_micro_batch_holds_until_a_whole_backward() -> None:
    problem = alone(1, 2, 2)
    number = {OpKind.FORWARD: 0, OpKind.BACKWARD: 1}
    store = Store("things", (1, 0.5), (0, -1.25), (4.0,))
    assert _Chain.of(problem, store, number) == _Chain(0, 1, 1, 1, 0.25, 0.0)


def test_how_many_fit() -> None:
    assert count_within(1000, 1) == 1000
    assert count_within(0.99, 0.5) == 1
    assert count_within(math.inf, 1) == count_within(1e30, 1) == 2**60
