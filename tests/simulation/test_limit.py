"""Plays with a limit: the same times, and what is given up was late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from counterflow.errors import DeadlockError
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, simulate, simulate_within

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {"stages": 4, "micro_batches": 6, "groups": 2}),
    ("dapple", {"stages": 4, "micro_batches": 6}),
    ("chimera", {"stages": 4, "micro_batches": 12, "pairs": 2, "concat": "forward-doubling"}),
    ("chimera", {"stages": 4, "micro_batches": 10, "concat": "backward-halving"}),
    ("mixpipe", {"stages": 4, "micro_batches": 9, "injected": 2, "early_forwards": 1}),
    ("gems", {"stages": 4, "micro_batches": 4}),
    ("hanayo", {"workers": 3, "micro_batches": 6, "waves": 2}),
    ("interleaved", {"workers": 2, "micro_batches": 4, "chunks": 3}),
    ("interleaved-zb", {"workers": 2, "micro_batches": 4, "chunks": 3}),
    ("zb-h1", {"stages": 4, "micro_batches": 6}),
    ("zb-v", {"workers": 3, "micro_batches": 6}),
    ("dualpipe", {"stages": 4, "micro_batches": 10}),
]
SECONDS = st.floats(0.0, 2.0).map(lambda x: round(x, 3))


def costs_of(draw: Any, schedule: Schedule) -> Costs:
    """Stages, links and messages that differ."""
    stages, workers = schedule.stages, schedule.workers

    def each(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=count, max_size=count)))

    return Costs(
        forward=each(stages),
        backward=each(stages),
        p2p=tuple(each(workers) for _ in range(workers)),
        p2p_per_byte=draw(st.sampled_from([0.0, 0.3])),
        message_bytes=each(stages),
        link=draw(st.sampled_from(["one-at-a-time", "infinite"])),
        ways=draw(st.sampled_from([None, tuple((w,) * workers for w in range(workers))])),
    )


@settings(max_examples=40, phases=(Phase.generate,), deadline=None, derandomize=True)
@given(st.sampled_from(SCHEDULES), st.data())
def test_a_limit_changes_no_time(named: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    schedule = registry.build(named[0], named[1])
    costs = costs_of(data.draw, schedule)
    played = simulate(schedule, costs)
    tail = [0.5] * schedule.workers
    kept = simulate_within(copy(schedule), costs, (played.makespan + 0.5) * (1 + 1e-9), tail)
    assert kept is not None  # one that is kept is never said to be beyond what it takes
    assert kept.start.tolist() == played.start.tolist()
    assert kept.end.tolist() == played.end.tolist()
    assert kept.gradients_made == played.gradients_made
    # No worker can be done before it has done all its ops.
    least = max(played.busy)
    assert (
        simulate_within(copy(schedule), costs, least * data.draw(st.floats(0, 0.999)), ()) is None
        or not least
    )


def test_what_is_sure_to_be_late_is_given_up() -> None:
    """D=2, N=2: worker 1 waits for 1 s and has 6 s of work: at least 7, and 9 s in fact, with a tail of 1."""
    schedule = registry.build("gpipe", {"stages": 2, "micro_batches": 2})

    def within(limit: float, tail: Sequence[float] = ()) -> float | None:
        found = simulate_within(copy(schedule), Costs(), limit, tail)
        return None if found is None else found.makespan

    assert within(math.inf) == within(9.0) == within(10.0, [1.0, 0.0]) == 9.0
    assert within(7.5, [0.0, 1.0]) is None
    assert within(8.0, [0.0, 1.0]) is None  # worker 0 ends at 9
    assert within(8.0) is None


def test_a_circle_is_told() -> None:
    good = registry.build("dapple", {"stages": 2, "micro_batches": 2})
    turned = Schedule(good.scheme, good.options, good.workload, (good.orders[0][::-1], good.orders[1]))
    with pytest.raises(DeadlockError, match="wait in a circle"):
        simulate_within(turned, Costs(), 100.0)
