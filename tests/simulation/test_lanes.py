"""Ops on other lanes than compute run beside it; the ops here are recomputations, for want of a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.errors import ConfigError
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.op import OpKind
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.simulation import Costs, Simulation, lower, simulate

COSTS = Costs(forward=1.0, backward=2.0, recompute="stage")


@pytest.fixture(autouse=True)
def _lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpKind.RECOMPUTATION, "lane", "another")


def _ordered(micro_batches: int, *letters: str, stages: int = 1) -> Schedule:
    """The schedule whose first worker runs ops in this order."""
    schedule = with_recomputations(schemes.dapple(stages, micro_batches))
    ops = {f"{op.kind.value}{op.micro_batches[0]}": op for op in schedule.orders[0]}
    return replace(schedule, orders=(tuple(ops[letter] for letter in letters), *schedule.orders[1:]))


def _spans(result: Simulation, worker: int = 0) -> dict[str, tuple[float, float]]:
    return {str(s.op).split(".")[0]: (s.start, s.end) for s in result.timeline if s.worker == worker}


def test_ops_of_a_lane_run_one_after_another_beside_compute() -> None:
    result = simulate(_ordered(2, "F0", "F1", "R0", "R1", "B0", "B1"), COSTS)
    assert _spans(result) == {
        "F0": (0, 1), "F1": (1, 2), "R0": (2, 3), "R1": (3, 4), "B0": (3, 5), "B1": (5, 7)
    }  # fmt: skip
    assert (result.makespan, result.busy) == (7, (6,))
    assert [(gap.start, gap.end) for gap in result.gaps] == [(2, 3)]


def test_an_op_waits_for_the_tensors_that_another_lane_restores() -> None:
    result = simulate(_ordered(2, "F0", "R0", "F1", "B0", "R1", "B1"), COSTS)
    spans = _spans(result)
    assert (spans["R0"], spans["F1"], spans["B0"]) == ((1, 2), (1, 2), (2, 4))
    assert (spans["R1"], spans["B1"]) == ((4, 5), (5, 7))


@pytest.mark.parametrize("link", ["one-at-a-time", "infinite"])
def test_messages_travel_as_without_lanes(link: str) -> None:
    order = "F0", "F1", "R0", "B0", "R1", "B1"
    costs = replace(COSTS, p2p=0.5, link=link)
    result = simulate(_ordered(2, *order, stages=2), costs)
    assert [(m.start, m.end) for m in result.messages[:2]] == [(1, 1.5), (2, 2.5)]
    assert _spans(result)["B0"][0] == result.messages[2].end
    assert _spans(result)["R0"] == (2, 3)  # before the gradient of micro-batch 0 is there


def test_programs_and_asynchronous_schedules_have_no_other_lanes() -> None:
    program = lower(_ordered(1, "F0", "R0", "B0"), COSTS)
    with pytest.raises(ConfigError, match="for a schedule only"):
        simulate(program, COSTS)
    with pytest.raises(ConfigError, match="need a synchronous schedule"):
        simulate("pipedream", COSTS, stages=2)
