"""The simulator: literal times, messages, gradient syncs, memory; equal results in both inner loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from counterflow import ByteCosts, ConfigError, Costs, DeadlockError, Schedule, Simulation, schemes
from counterflow.program import player
from counterflow.schedule.formats import loads
from counterflow.schedule.ir import OpKind
from counterflow.schedule.modes import Sync
from counterflow.simulation import Piece, simulate


def test_costs_by_stage() -> None:
    result = simulate(schemes.dapple(2, 1), Costs(forward=[1, 3], backward=[2, 5]))
    assert [(s.worker, str(s.op), s.start, s.end) for s in result.timeline] == [
        (0, "F0.0", 0, 1),
        (0, "B0.0", 9, 11),
        (1, "F0.1", 1, 4),
        (1, "B0.1", 4, 9),
    ]
    assert list(result.busy) == [3, 8]
    assert list(result.idle) == [8, 3]
    assert result.bubble_ratio == 0.5


@dataclass(frozen=True)
class Measured:
    """Costs of a user's own: seconds by (kind, stage, worker) or by what runs together, and no memory."""

    table: Mapping[Any, float]

    def seconds(self, piece: Piece) -> float:
        exact = piece.kind.value, piece.stage, piece.micro_batches, piece.parts, piece.shares
        usual = (2 if piece.kind is OpKind.BACKWARD else 1) * piece.work
        return self.table.get(exact, self.table.get((piece.kind.value, piece.stage, piece.worker), usual))

    def bytes(self, piece: Piece) -> tuple[float, float]:
        change = 8.0 * piece.work / (1 + piece.worker)
        return (change, 0.0) if piece.kind.is_forward else (0.0, -change)


def test_devices_that_differ() -> None:
    # Stage 0 of chimera is on worker 0 (down) and on worker 1 (up), which takes 10 for its forward.
    schedule = schemes.chimera(2, 2)
    found = simulate(schedule, Costs(ops=Measured({("F", 0, 1): 10}), memory=ByteCosts()))
    lasts = {(s.worker, str(s.op)): s.end - s.start for s in found.timeline if s.op.kind.is_forward}
    assert lasts == {(0, "F0.0"): 1, (0, "F1.1p1"): 1, (1, "F0.1"): 1, (1, "F1.0p1"): 10}
    assert (found.peak_bytes,) == ((16, 8),)
    with pytest.raises(ConfigError, match="takes -1 seconds: must be finite, 0 or more"):
        simulate(schedule, Costs(ops=Measured({("F", 0, 1): -1})))


def test_messages_take_time_beside_compute_or_keep_the_sender_busy() -> None:
    schedule = schemes.dapple(2, 2)
    # Worker 0: F0 0-1, F1 1-2; worker 1 gets F0 at 1.5, F1 at 2.5.
    beside = simulate(schedule, Costs(p2p=0.5))
    assert [(s.start, s.end) for s in beside.timeline[4:6]] == [(1.5, 2.5), (2.5, 4.5)]
    busy = simulate(schedule, Costs(p2p=0.5, overlap=False))
    assert busy.timeline[1].start == 1.5
    link = simulate(schedule, Costs(p2p=[[0, 0.5], [0.25, 0]]))
    assert link.timeline[2].start == link.timeline[5].end + 0.25
    with pytest.raises(ConfigError, match="table of shape"):
        simulate(schedule, Costs(p2p=[[0.0]]))


@pytest.mark.parametrize(("mode", "makespan"), [("end", 22), ("eager", 19), ("eager-opt", 20)])
def test_gradient_sync_on_its_own_lane(mode: str, makespan: float) -> None:
    result = simulate(schemes.chimera(4, 4), Costs(sync=3, sync_mode=mode))
    assert result.makespan == makespan
    first = result.syncs[0]
    if mode == "end":
        assert (first.stage, first.start, first.end) == (2, 14, 17)
    else:
        # Chimera Figure 4 b: stage 3 is done on workers 0 and 3 at time 9 and is summed in the bubbles.
        assert (first.stage, first.start, first.end) == (3, 9, 12)


def test_one_copy_needs_no_sync_but_replicas_do() -> None:
    schedule = schemes.dapple(2, 2)
    assert simulate(schedule, Costs(sync=5)).makespan == simulate(schedule).makespan
    assert simulate(schedule, Costs(sync=5, replicas=2)).makespan == simulate(schedule).makespan + 5


def test_pipedream_waits_for_each_sync_and_2bw_hides_it() -> None:
    assert simulate(schemes.pipedream(4, 16), Costs(sync=3, replicas=2)).steady_bubble_ratio == 0.5
    hidden = simulate(schemes.pipedream_2bw(4, 8), Costs(sync=1, replicas=2))
    assert hidden.steady_bubble_ratio is not None
    assert hidden.steady_bubble_ratio < 0.06


def test_recomputation_adds_a_forward_to_each_backward() -> None:
    assert simulate(schemes.dapple(1, 2), Costs(recompute="stage")).makespan == 2 * (1 + 3)


def test_memory_over_time_in_bytes() -> None:
    costs = Costs(memory=ByteCosts(weights=100, optimizer=200, activations=10, inputs=1))
    memory = simulate(schemes.dapple(1, 1), costs).memory
    assert memory is not None
    assert (memory[0].times, memory[0].amounts) == ((0, 3), (410, 400))
    again = simulate(schemes.dapple(1, 1), Costs(memory=costs.memory, recompute="stage")).memory
    assert again is not None
    assert list(zip(again[0].times, again[0].amounts, strict=True)) == [(0, 401), (1, 410), (4, 400)]


def test_memory_of_weight_versions() -> None:
    costs = Costs(memory=ByteCosts(weights=100, gradients=0))
    peaks = simulate(schemes.pipedream(4), costs).memory
    assert peaks is not None
    assert [use.peak for use in peaks] == [400, 300, 200, 100]
    grouped = simulate(schemes.wpipe(4, 4), costs).memory
    assert grouped is not None
    assert [use.peak for use in grouped] == [300] * 4
    cast = simulate(schemes.pipedream(4), Costs(memory=ByteCosts(weights=100, gradients=0, casts=50))).memory
    assert cast is not None
    assert [use.peak for use in cast] == [600, 450, 300, 150]  # each version is cast, and no gradient is


def test_a_deadlocked_schedule_cannot_be_simulated() -> None:
    text = """{"format": "counterflow-schedule", "format_version": 1, "scheme": "mine", "micro_batches": 2,
    "placement": [[0, 1]], "orders": [["F0.0", "B0.0", "F1.0", "B1.0"], ["F0.1", "F1.1", "B0.1", "B1.1"]]}"""
    with pytest.raises(DeadlockError, match="wait in a circle"):
        simulate(loads(text, "x"))


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(ConfigError, match="forward"):
        Costs(forward=cost)


def test_costs_fit_the_number_of_stages() -> None:
    with pytest.raises(ConfigError, match="3 numbers for 2 stages"):
        simulate(schemes.dapple(2, 1), Costs(forward=[1, 2, 3]))


def test_compiled_and_plain_loops_agree_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated() -> Simulation:  # of a schedule of its own: what was played of one is kept with it
        schedule = schemes.chimera(8, 24, pairs=2, concat="forward-doubling")
        return simulate(schedule, Costs(forward=0.1, backward=0.7, p2p=0.013, overlap=False))

    monkeypatch.setattr(player._Loop, "compiled", None)
    monkeypatch.setattr(player._Loop, "played", 0)
    plain = simulated()
    in_plain_python = player._Loop.played
    assert in_plain_python > 0
    player.load_numba()
    loop, runs = player._Loop.compiled, list[int]()
    assert loop is not None

    def counted(*given: Any) -> tuple[int, bool]:
        played, late = loop(*given)
        runs.append(played)
        return played, late

    monkeypatch.setattr(player._Loop, "compiled", counted)
    compiled = simulated()
    assert sum(runs) == in_plain_python == player._Loop.played  # the same ops, by the other loop
    assert plain.start.tolist() == compiled.start.tolist()
    assert plain.end.tolist() == compiled.end.tolist()


def test_ops_on_two_micro_batches_and_on_half_of_one_have_times_of_their_own() -> None:
    doubling = schemes.chimera(2, 4, concat="forward-doubling")
    plain = simulate(doubling, Costs(forward=1, backward=2))
    same = simulate(doubling, Costs(ops=Measured({})))
    assert plain.timeline == same.timeline
    table = {("F", 0, 2, 1, 2): 1.5, ("F", 1, 2, 1, 2): 1.25}
    quick = simulate(doubling, Costs(ops=Measured(table)))
    lasts = {(s.op.stage, s.op.work): s.end - s.start for s in quick.timeline if s.op.kind.value == "F"}
    assert lasts == {(0, 2): 1.5, (1, 2): 1.25}
    halving = schemes.chimera(2, 4, concat="backward-halving")
    halves = {("B", stage, 1, 2, 1): 1.5 + 0.5 for stage in range(2)}
    slow = simulate(halving, Costs(ops=Measured(halves)))
    assert {s.end - s.start for s in slow.timeline if s.op.kind.value == "B"} == {1.5 + 0.5}
    half = {s.op.micro_batches for s in slow.timeline if s.op.kind.value == "B" and s.op.parts == 2}
    twice = simulate(halving, Costs(ops=Measured({("F", 0, 1, 1, 2): 1.5, ("F", 1, 1, 1, 2): 1.25})))
    for item in twice.timeline:
        if item.op.kind.value == "F":
            expected = (1.5, 1.25)[item.op.stage] if item.op.micro_batches in half else 1
            assert item.end - item.start == expected


def test_messages_by_link_and_by_the_bytes_of_a_stage() -> None:
    # Stage 0 gives 10 bytes, stage 1 gives 20; 0.5 s and 0.1 s a byte.
    costs = Costs(p2p=0.5, p2p_per_byte=0.1, message_bytes=[10, 20, 0])
    ops = {str(s.op): s for s in simulate(schemes.dapple(3, 1), costs).timeline}
    assert ops["F0.1"].start == ops["F0.0"].end + 1.5
    assert ops["F0.2"].start == ops["F0.1"].end + 2.5
    assert ops["B0.1"].start == ops["B0.2"].end + 2.5  # the gradient of stage 1's output
    assert ops["B0.0"].start == ops["B0.1"].end + 1.5
    fast = [[0, 0.1, 0], [0.1, 0, 0.0], [0, 0.0, 0]]
    ops = {str(s.op): s for s in simulate(schemes.dapple(3, 1), replace(costs, p2p_per_byte=fast)).timeline}
    assert ops["F0.2"].start == ops["F0.1"].end + 0.5
    # A doubled forward sends the output of two micro-batches at once.
    doubled = schemes.chimera(2, 4, concat="forward-doubling")
    sent = simulate(doubled, Costs(p2p_per_byte=0.1, message_bytes=10)).timeline
    first = {str(s.op): s for s in sent}
    assert first["F(0,1).1"].start >= first["F(0,1).0"].end + 2.0


def test_compute_beside_a_sync_is_slower() -> None:
    # F0.0 F1.1p1 B1.1p1 B0.0 on worker 0, likewise on worker 1: stage 1 is summed from 4 on, beside B0.0.
    costs = Costs(sync=3, sync_mode="eager", sync_slowdown=0.5)
    for seconds, beside in ((3, 2), (1, 1), (0.5, 0.5)):
        result = simulate(schemes.chimera(2, 2), replace(costs, sync=seconds))
        ends = {str(span.op): span.end for span in result.timeline}
        assert (ends["B1.1p1"], ends["B0.1"]) == (4, 4)
        assert ends["B0.0"] == ends["B1.0p1"] == 6 + 0.5 * beside
        assert list(result.busy) == [6 + 0.5 * beside] * 2
    # At the end nothing runs beside a sync.
    at_end = replace(costs, sync_mode="end")
    assert list(simulate(schemes.chimera(2, 2), at_end).busy) == [6, 6]


@pytest.mark.parametrize("p2p", [0.0, 0.125, 1.0])
def test_waiting_for_a_message_is_no_bubble_for_eager_opt(p2p: float) -> None:
    """Chimera, section 3.2: middle stages are summed at the end, however long messages take.

    There compute is beside no sum of a middle stage, so a slowdown costs ``eager`` time only: a tenth of the
    second that stage 2's sum takes beside the last backward of stage 1.
    """
    makespans, begins = {}, {}
    for mode in Sync:
        costs = Costs(p2p=p2p, sync=1, sync_mode=mode, sync_slowdown=0.125)
        result = simulate(schemes.chimera(4, 4), costs)
        makespans[mode] = result.makespan
        ends = {str(span.op): span.end for span in result.timeline}
        begins[mode] = {sync.stage: sync.start for sync in result.syncs}
        assert begins[mode][3] == (ends["B1.3"] if mode is not Sync.END else ends["B3.0p1"])
        assert begins[mode][2] == ends["B3.2p1" if mode is Sync.EAGER else "B1.1"]
    compute = 16 + 7 * p2p
    assert makespans[Sync.EAGER_OPT] == compute + 1
    assert makespans[Sync.EAGER] == compute + 1 + 0.125 * (1 - p2p)
    assert makespans[Sync.END] == compute + 2


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
def test_a_wrong_slowdown_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match=rf"sync_slowdown={wrong}: .*finite number of shares, 0 or more"):
        Costs(sync_slowdown=wrong)


BYTES = ByteCosts(weights=5, gradients=4, optimizer=3, activations=7, inputs=2, layers=2)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (schemes.gpipe, {"stages": 2, "micro_batches": 4, "groups": 2}),
        (schemes.dapple, {"stages": 4, "micro_batches": 6}),
        (schemes.gems, {"stages": 4, "micro_batches": 5}),
        (schemes.chimera, {"stages": 4, "micro_batches": 9, "concat": "forward-doubling"}),
        (schemes.chimera, {"stages": 8, "micro_batches": 10, "concat": "backward-halving", "pairs": 2}),
        (schemes.mixpipe, {"stages": 6, "micro_batches": 6, "injected": 4}),
        (schemes.hanayo, {"workers": 3, "micro_batches": 5, "waves": 2}),
        (schemes.pipedream, {"stages": 4, "periods": 7}),
        (schemes.pipedream_2bw, {"stages": 3, "micro_batches": 4, "periods": 4}),
        (schemes.wpipe, {"workers": 2, "micro_batches": 3, "periods": 4}),
    ],
)
def test_peak_bytes_are_those_of_the_memory_over_time(
    scheme: Callable[..., Schedule], options: dict[str, int], recompute: str
) -> None:
    schedule = scheme(**options)
    by_stage = replace(BYTES, weights=[3.0 + s for s in range(schedule.stages)])
    result = simulate(schedule, Costs(p2p=0.3, recompute=recompute, memory=by_stage))
    assert result.memory is not None
    assert result.peak_bytes == pytest.approx([use.peak for use in result.memory])
