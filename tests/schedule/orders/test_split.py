"""Backwards split: input gradients where backwards were, weight gradients where a worker would wait."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import Costs, Op, OpKind, Schedule
from counterflow.errors import DeadlockError
from counterflow.program.rules import RULES, CheckSubject, details
from counterflow.schedule.orders import fill
from counterflow.schedule.orders.fill import filled
from counterflow.schedule.orders.split import split_backwards
from counterflow.schedule.placement import linear
from counterflow.schedule.residency import peak_activations
from counterflow.schedule.schemes import chimera, dapple, gems, hanayo, interleaved, mixpipe
from counterflow.schedule.workload import plain
from counterflow.simulation import simulate

moderate = settings(max_examples=25, deadline=None, derandomize=bool(os.environ.get("CI")))

SPLIT = Costs(forward=1, backward=2, input_gradient=1, weight_gradients=1)
ON_SCHEDULES = [rule for rule in RULES if not rule.lowered]


@st.composite
def whole_schedules(draw: Any) -> Schedule:
    half, n = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    concat = draw(st.sampled_from(["direct", "forward-doubling", "backward-halving"]))
    pairs = draw(st.sampled_from([f for f in (1, 2, 4) if half % f == 0]))
    found: Schedule = draw(
        st.sampled_from(
            [
                dapple(half, n),
                gems(2 * half, n),
                chimera(2 * half, n, pairs, concat),
                mixpipe(2 * half, n),
                hanayo(half, n, draw(st.integers(1, 2))),
                interleaved(half, n, draw(st.integers(1, 3))),
            ]
        )
    )
    return found


def shown(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_dapple() -> None:
    """The waits of the drain hold weight gradients; those left over come at the end.

    P0  0 1 2 . . a A 3 b B . c C . d D
    P1  . 0 1 . a A 2 b B 3 c C . d D .
    P2  . . 0 a A 1 b B 2 c C 3 d D . .
    """
    assert shown(split_backwards(dapple(stages=3, micro_batches=4))) == [
        "F0.0 F1.0 F2.0 I0.0 W0.0 F3.0 I1.0 W1.0 I2.0 W2.0 I3.0 W3.0",
        "F0.1 F1.1 I0.1 W0.1 F2.1 I1.1 W1.1 F3.1 I2.1 W2.1 I3.1 W3.1",
        "F0.2 I0.2 W0.2 F1.2 I1.2 W1.2 F2.2 I2.2 W2.2 F3.2 I3.2 W3.2",
    ]


def test_chimera_reaches_the_least_of_two_directions() -> None:
    """25 on 4 workers and 51 on 8 (N = 2D, F = I = W) are proved least; whole backwards need 30 and 66."""
    for depth, whole, least in ((4, 30, 25), (8, 66, 51)):
        schedule = chimera(depth, 2 * depth)
        assert simulate(schedule, SPLIT).makespan == whole
        assert simulate(split_backwards(schedule), SPLIT).makespan == least


@moderate
@given(schedule=whole_schedules())
def test_split_orders(schedule: Schedule) -> None:
    """Legal, in the order of before but for weight gradients, and no worker takes more memory or time."""
    split = split_backwards(schedule)
    subject = CheckSubject(split)
    assert [details(rule, subject) for rule in ON_SCHEDULES] == [""] * len(ON_SCHEDULES)
    for before, after in zip(schedule.orders, split.orders, strict=True):
        kept = [op for op in after if op.kind is not OpKind.WEIGHT_GRADIENTS]
        assert kept == [
            op._replace(kind=OpKind.INPUT_GRADIENT) if op.kind is OpKind.BACKWARD else op for op in before
        ]
    for most, limit in zip(peak_activations(split), peak_activations(schedule), strict=True):
        assert most <= limit
    assert simulate(split, SPLIT).makespan <= simulate(schedule, SPLIT).makespan
    assert dict(split.options) == dict(schedule.options) | {"split": True}


@moderate
@given(schedule=whole_schedules())
def test_no_worker_waits_with_weight_gradients_left(schedule: Schedule) -> None:
    split = split_backwards(schedule)
    result = simulate(split, SPLIT)
    for worker in range(split.workers):
        spans = [span for span in result.timeline if span.worker == worker]
        waiting, free = 0, 0.0
        for span in spans:
            assert span.start == free or waiting == 0
            waiting += {OpKind.INPUT_GRADIENT: 1, OpKind.WEIGHT_GRADIENTS: -1}.get(span.op.kind, 0)
            free = span.end


# --- Waits filled ----------------------------------------------------------------------------------------


def two_stages(first: str, second: str, micro_batches: int) -> Schedule:
    """Written as kinds with micro-batch; stage 0 and 1."""
    orders = tuple(
        tuple(Op(OpKind(word[0]), stage, (int(word[1:]),)) for word in text.split())
        for stage, text in enumerate((first, second))
    )
    return Schedule("hand-made", (), plain(linear(2), micro_batches, split=True), orders)


def test_what_can_run_is_moved_to_where_its_worker_would_wait() -> None:
    schedule = two_stages("F0 I0 W0 F1 I1 W1", "F0 I0 W0 F1 I1 W1", 2)
    # Worker 0 has to wait for I0 from 2 to 3: F1 fits in, if two forwards may be stashed.
    assert shown(filled(schedule, (2, 2)))[0] == "F0.0 F1.0 I0.0 W0.0 I1.0 W1.0"
    assert shown(filled(schedule, (1, 2)))[0] == "F0.0 I0.0 W0.0 F1.0 I1.0 W1.0"


def test_only_what_may_be_moved_is() -> None:
    schedule = two_stages("F0 F1 I0 I1 W0 W1", "F0 F1 I0 I1 W0 W1", 2)
    weights = filled(schedule, (2, 2), lambda op: op.kind is OpKind.WEIGHT_GRADIENTS)
    assert shown(weights)[0] == "F0.0 F1.0 I0.0 I1.0 W0.0 W1.0"
    late = two_stages("F0 F1 I0 W0 I1 W1", "F0 F1 I0 W0 I1 W1", 2)
    assert shown(filled(late, (2, 2))) == shown(late)


def test_a_circle_is_told() -> None:
    schedule = two_stages("I0 W0 F0", "F0 I0 W0", 1)
    with pytest.raises(DeadlockError, match="wait in a circle"):
        filled(schedule, (1, 1), lambda _: False)


def test_workers_are_looked_at_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand workers, looked at each moment, took seconds."""
    looks = 0
    next_node = fill._Worker.next_node

    def counted(worker: fill._Worker, now: float, ended: list[float]) -> int | None:
        nonlocal looks
        looks += 1
        return next_node(worker, now, ended)

    monkeypatch.setattr(fill._Worker, "next_node", counted)
    schedule = dapple(stages=100, micro_batches=3, split=True)
    assert looks <= 4 * sum(map(len, schedule.orders))
