"""The simulator times the program: what a literal player of the lists finds is what it says.

The player knows nothing of schedules or graphs: it goes through each worker's actions, one after another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from counterflow.errors import ConfigError
from counterflow.program.actions import (
    Compute,
    Matching,
    Program,
    Send,
    StartSync,
    Summed,
    WaitGather,
    WaitSync,
)
from counterflow.program.lowering import Shared
from counterflow.schedule import schemes
from counterflow.schedule.formats import parse_op
from counterflow.schedule.ir import Op, Schedule, SkipLink
from counterflow.schedule.placement import Placement
from counterflow.schedule.workload import plain
from counterflow.simulation import Cause, Costs, Link, Piece, Simulation, lower, simulate

from ..program.test_checker import every_scheme
from ..tables import examples


def skip_between(schedule: Schedule, one: Op, other: Op) -> SkipLink | None:
    if abs(one.stage - other.stage) < 2:
        return None
    link = SkipLink(min(one.stage, other.stage), max(one.stage, other.stage))
    return link if link in schedule.workload.skips else None


class Player:
    """Plays lists action by action, with the times of single ops, one message time, and syncs by stage."""

    def __init__(self, program: Program, costs: Costs, seconds: dict[Op, float]) -> None:
        self.program, self.costs, self.seconds = program, costs, seconds
        assert isinstance(costs.p2p, float)
        self.p2p = costs.p2p
        workers = len(program.actions)
        self.now = [0.0] * workers
        self.place = [0] * workers
        self.ops: dict[Op, tuple[float, float]] = {}
        self.arrived: dict[tuple[Op, int, SkipLink | None], float] = {}
        self.link: dict[tuple[int, int], float] = {}
        self.started: dict[tuple[StartSync, int], float] = {}
        self.sums: dict[StartSync, tuple[float, float]] = {}
        self.order = [[a for a in row if isinstance(a, StartSync)] for row in program.actions]
        self.reached: dict[int, float] = {}

    def play(self) -> Player:
        moved = True
        while moved:
            went = [self._go(worker) for worker in range(len(self.now))]
            moved = any(went)
        assert self.place == [len(row) for row in self.program.actions]
        return self

    def _go(self, worker: int) -> bool:
        row, begin = self.program.actions[worker], self.place[worker]
        while self.place[worker] < len(row) and self._do(worker, row[self.place[worker]]):
            self.place[worker] += 1
        return self.place[worker] > begin

    def _do(self, worker: int, action: object) -> bool:
        match action:
            case Compute(op):
                return self._compute(worker, op)
            case Send():
                self._send(worker, action)
            case StartSync():
                self.started[action, worker] = self.now[worker]
            case WaitSync():
                return self._sum(worker, action.start)
            case WaitGather():
                self.reached.setdefault(worker, self.now[worker])
                if len(self.reached) < len(self.now):
                    return False
                self.now[worker] = max(self.reached.values()) + self.costs.agreement
            case _:
                pass
        return True

    def _send(self, worker: int, send: Send) -> None:
        peer = send.peer
        begin = self.now[worker]
        if self.costs.link is Link.ONE_AT_A_TIME:
            begin = max(begin, self.link.get((worker, peer), 0.0))
        end = begin + self.p2p
        self.link[worker, peer] = self.arrived[send.output, peer, send.skip] = end
        if not self.costs.overlap:
            self.now[worker] = end

    def _compute(self, worker: int, op: Op) -> bool:
        ready = 0.0
        for need in self.program.schedule.workload.needs(op):
            if need not in self.ops:
                return False
            local = self.program.schedule.placement.worker(need.pipe, need.stage) == worker
            skip = skip_between(self.program.schedule, need, op)
            if not local and (need, worker, skip) not in self.arrived:
                return False
            ready = max(ready, self.ops[need][1] if local else self.arrived[need, worker, skip])
        begin = max(self.now[worker], ready)
        self.now[worker] = begin + self.seconds[op]
        self.ops[op] = begin, self.now[worker]
        return True

    def _sum(self, worker: int, start: StartSync) -> bool:
        found = self._sum_times(start)
        if found is not None:
            self.now[worker] = max(self.now[worker], found[1])
        return found is not None

    def _sum_times(self, start: StartSync) -> tuple[float, float] | None:
        """After the sums that its workers started before; None if one of them has not started it yet."""
        if start not in self.sums:
            ready = 0.0
            for member in start.workers:
                if (start, member) not in self.started:
                    return None
                ready = max(ready, self.started[start, member])
                index = self.order[member].index(start)
                if index:
                    before = self._sum_times(self.order[member][index - 1])
                    if before is None:
                        return None
                    ready = max(ready, before[1])
            self.sums[start] = ready, ready + self._sum_seconds(start)
        return self.sums[start]

    def _sum_seconds(self, start: StartSync) -> float:
        if start.what is Summed.TIED:
            return dict(self.costs.ties)[start.stage, *start.tied]
        lasts = self.costs.statistics if start.what is Summed.STATISTICS else self.costs.sync
        assert isinstance(lasts, tuple)
        found: float = lasts[start.stage]
        return found


def cases() -> Iterator[tuple[Schedule, Costs]]:
    """Random schedules and costs, with messages and syncs; the same ones every time."""
    draw = random.Random(5)
    for _ in range(examples(16)):
        depth, n = draw.choice((2, 3, 4, 6)), draw.randint(1, 9)
        for schedule in every_scheme(depth, n, draw.randint(0, 12)):
            costs = Costs(
                forward=[draw.uniform(0.5, 2) for _ in range(schedule.stages)],
                backward=[draw.uniform(0.5, 3) for _ in range(schedule.stages)],
                p2p=draw.choice((0.0, draw.uniform(0, 3))),
                link=draw.choice(list(Link)),
                overlap=draw.random() < 0.7,
                sync=tuple(draw.uniform(0, 6) for _ in range(schedule.stages)),
                sync_mode=draw.choice(("end", "eager", "eager-opt")),
                agreement=draw.choice((0.0, 0.5)),
                replicas=draw.choice((1, 2)),
            )
            yield schedule, costs


def agrees(found: Simulation, program: Program) -> None:
    played = Player(program, found.costs, {s.op: s.end - s.start for s in found.timeline}).play()
    for span in found.timeline:
        assert played.ops[span.op] == pytest.approx((span.start, span.end), abs=1e-9), span.op
    for message in found.messages:
        skip = skip_between(found.schedule, message.maker, message.taker)
        end = played.arrived[message.maker, message.receiver, skip]
        assert end == pytest.approx(message.end, abs=1e-9)
    for sync in found.syncs:
        (times,) = {
            times
            for start, times in played.sums.items()
            if (start.what, start.stage, start.period) == (Summed.GRADIENTS, sync.stage, sync.period)
        }
        assert times == pytest.approx((sync.start, sync.end), abs=1e-9)
    if found.schedule.synchronous:
        assert max(played.now) == pytest.approx(found.makespan, abs=1e-9)


@pytest.fixture(scope="module")
def lowered() -> list[tuple[Simulation, list[Program]]]:
    """All cases, each with its program for each way of matching; making these takes most of the time."""
    return [
        (simulate(schedule, costs), [lower(schedule, costs, matching=matching) for matching in Matching])
        for schedule, costs in cases()
    ]


def test_a_program_and_its_schedule_are_played_alike_to_the_last_bit(
    lowered: list[tuple[Simulation, list[Program]]],
) -> None:
    """Each scheme, sync mode, kind of link, asynchronous ones too: every time that a simulation tells."""
    synced = 0
    for expected, programs in lowered:
        for program in programs:
            found = simulate(program, expected.costs)
            assert np.array_equal(found.start, expected.start)
            assert np.array_equal(found.end, expected.end)
            assert found.messages == expected.messages
            assert set(found.syncs) == set(expected.syncs)
            assert found.makespan == expected.makespan
            assert found.gaps == expected.gaps
        synced += len(expected.syncs)
    assert synced > 100


def test_the_program_that_is_run_is_the_one_that_is_timed(
    lowered: list[tuple[Simulation, list[Program]]],
) -> None:
    synced = 0
    for found, programs in lowered:
        synced += len(found.syncs)
        for program in programs:
            agrees(found, program)
    assert synced > 100


def test_sums_at_the_end_are_timed_as_they_are_run() -> None:
    """Of weights that stages share, and of running statistics."""
    longer = 0
    for number, (schedule, costs) in enumerate(cases()):
        last = schedule.stages - 1
        if not schedule.synchronous or not last or number % 3:
            continue
        ties = (((0, last), 0.75), ((0, 1), 0.5)) if last > 1 else (((0, 1), 0.25),)
        statistics = tuple(0.125 * stage for stage in range(schedule.stages))
        more = replace(costs, ties=ties, statistics=statistics)
        found = simulate(schedule, more)
        longer += found.makespan > simulate(schedule, costs).makespan
        shared = Shared(tuple(stages for stages, _ in ties), tuple(range(schedule.stages)))
        agrees(found, lower(schedule, more, shared=shared))
        assert found.steady_step is None or found.steady_step > 0.0
    assert longer > 20


def test_ties_of_stages_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="ties: stage 2 does not exist in a pipeline of 2 stages"):
        _ = simulate(schemes.dapple(2, 2), Costs(ties=(((0, 2), 1.0),))).makespan
    with pytest.raises(ConfigError, match="ties=-1"):
        Costs(ties=(((0, 1), -1.0),))


def test_skips_are_timed_as_they_are_run() -> None:
    late = 0
    for number, (schedule, costs) in enumerate(cases()):
        last = schedule.stages - 1
        if last > 1 and costs.p2p and number % 4 == 0:
            found = simulate(
                schedule.with_skips({SkipLink(0, 2), SkipLink(0, last), SkipLink(last - 2, last)}), costs
            )
            agrees(found, lower(found.schedule, costs))
            late += found.makespan > simulate(schedule, costs).makespan
    assert late > 2


def test_a_skip_takes_as_long_as_its_bytes() -> None:
    """One micro-batch on three stages: stage 2 waits for what comes from stage 0 by 10 bytes at 1 s each."""
    schedule = schemes.gpipe(3, 1).with_skips([SkipLink(0, 2)])
    found = simulate(schedule, Costs(p2p_per_byte=1.0, message_bytes=1.0, skip_bytes=10.0))
    begins = {str(s.op): s.start for s in found.timeline}
    assert begins["F0.2"] == 1 + 10
    assert begins["B0.0"] == begins["B0.2"] + 2 + 10
    free = simulate(schedule, Costs(p2p_per_byte=1.0, message_bytes=1.0))
    assert {str(s.op): s.start for s in free.timeline}["F0.2"] == 1 + 1 + 1 + 1
    with pytest.raises(ConfigError, match="skip_bytes: 2 numbers for 1 skip connections"):
        simulate(schedule, Costs(p2p_per_byte=1.0, skip_bytes=(1.0, 2.0)))


@pytest.mark.parametrize(
    "schedule",
    [schemes.chimera(4, 4), schemes.hanayo(4, 4, waves=2), schemes.interleaved(4, 8, chunks=4)],
    ids=str,
)
def test_eager_opt_is_decided_by_the_users_costs_in_both(schedule: Schedule) -> None:
    """With short messages and long sums, F = 1 and B = 2 alone put them elsewhere."""
    costs = Costs(p2p=0.05, sync=(6.0,) * schedule.stages, replicas=2)
    found = simulate(schedule, costs)
    agrees(found, lower(schedule, costs))
    by_units = lower(schedule, Costs(replicas=2))
    elsewhere = Player(by_units, costs, {s.op: s.end - s.start for s in found.timeline}).play()
    assert max(elsewhere.now) >= found.makespan


def test_a_link_carries_one_message_at_a_time() -> None:
    # 16 forwards of 1 s, each followed by a message of 3 s: the last one has come after 1 + 16 · 3 s.
    schedule = schemes.gpipe(2, 16)
    found = simulate(schedule, Costs(p2p=3.0))
    forwards = [m for m in found.messages if m.maker.kind.is_forward]
    assert max(m.end for m in forwards) == 1 + 16 * 3
    # Then the last forward and 16 backwards whose gradients leave every 3 s, and the last backward.
    assert found.makespan == (1 + 48) + 1 + 2 + 48 + 2
    free = simulate(schedule, Costs(p2p=3.0, link="infinite"))
    assert free.makespan == 57
    with pytest.raises(ConfigError, match="link='narrow'"):
        Costs(link="narrow")


def test_without_a_flush_work_waits_for_all_copies_also_where_their_sum_takes_no_time() -> None:
    """Two pipes of one stage each; the other copy's backward takes three times as long."""
    ops = [
        [f"F{m}.0{pipe}{version}", f"B{m}.0{pipe}{version}"]
        for m, pipe, version in ((0, "", ""), (1, "p1", ""), (2, "", "v1"), (3, "p1", "v1"))
    ]
    orders = tuple(tuple(map(parse_op, [*ops[w], *ops[w + 2]])) for w in range(2))
    placement = Placement(2, ((0,), (1,)))
    workload = plain(placement, 2, pipe_of=lambda m: m % 2, periods=2, version=lambda _, period: period)
    schedule = Schedule("mine", (), workload, orders)

    class Slower:
        def seconds(self, piece: Piece) -> float:
            return (3.0 if piece.worker else 1.0) * (1 if piece.kind.is_forward else 2)

        def bytes(self, piece: Piece) -> tuple[float, float]:
            return 0.0 * piece.work, 0.0

    for sync in (0.0, 1e-12):
        found = simulate(schedule, Costs(ops=Slower(), sync=sync))
        starts = {str(s.op): s.start for s in found.timeline}
        assert starts["F2.0v1"] == pytest.approx(9)


def test_bubbles_by_cause() -> None:
    # D=2, N=2, message 0.5: P0 F0 F1 . B0 B1; P1 . F0 B0 F1 B1 (F1 is there in time).
    found = simulate(schemes.dapple(2, 2), Costs(p2p=0.5))
    first, second = found.bubbles
    assert (second.warm_up, second.dependency, second.message) == (1.5, 0, 0)
    # P0 has done F1 at 2, P1 makes the gradient of 0 at 4.5, which has come at 5; likewise 7.5 and 8.
    assert (first.warm_up, first.dependency, first.message, first.drain) == (0, 2.5 + 0.5, 0.5 + 0.5, 0)
    assert second.drain == found.makespan - 7.5
    for idle, bubbles in zip(found.idle, found.bubbles, strict=True):
        parts = bubbles.warm_up + bubbles.dependency + bubbles.message + bubbles.drain
        assert parts == pytest.approx(idle)


def test_gaps_have_their_causes() -> None:
    # P0 sends F0 for 0.5 before it goes on; P1 has nothing until that has come.
    found = simulate(schemes.dapple(2, 2), Costs(p2p=0.5, overlap=False))
    first, *_ = found.gaps
    assert (first.worker, first.start, first.end, first.cause) == (0, 1.0, 1.5, Cause.MESSAGE)
    for worker in range(2):
        own = [gap for gap in found.gaps if gap.worker == worker]
        assert sum(gap.end - gap.start for gap in own) == pytest.approx(found.idle[worker])
        assert all(before.end <= after.start for before, after in pairwise(own))


def test_bubbles_add_up_to_the_idle_time() -> None:
    for schedule, costs in cases():
        found = simulate(schedule, costs)
        for idle, bubbles in zip(found.idle, found.bubbles, strict=True):
            parts = bubbles.warm_up, bubbles.dependency, bubbles.message, bubbles.drain
            assert min(parts) >= -1e-9
            assert sum(parts) == pytest.approx(idle, abs=1e-9)


def test_spans_and_the_agreement() -> None:
    found = simulate(schemes.dapple(2, 2), Costs(agreement=0.25))
    assert (found.spans, found.makespan) == ((9, 6), 9.25)
    endless = schemes.pipedream(2, periods=4)
    assert simulate(endless, Costs(agreement=0.25)).makespan == simulate(endless).makespan
