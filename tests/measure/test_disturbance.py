"""Disturbed measurements, from literal laps of a fake clock: nothing here depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from counterflow import Pipeline, launch, schemes
from counterflow.common.laps import OP_LAPS, Lap, OpLap, Reading
from counterflow.measure import op_times
from counterflow.measure.disturbance import (
    ThreadTimes,
    TimedSteps,
    computing_wait,
    quiet_seconds,
    thread_times,
    undisturbed,
    waiting_share,
)
from counterflow.measure.layer_times import timed
from counterflow.measure.op_times import OpTimer
from counterflow.schedule.ir import Op
from counterflow.schedule.op import B, F

F0, B0 = Op(F, 0, (0,)), Op(B, 0, (0,))


@dataclass
class Machine:
    """A machine that runs a pipeline of one worker, with literal laps.

    ``steps`` has a step each: for each op its seconds of a processor, seconds in which another program had
    it, and how often it waited by itself; and a multiple of the step's time in which threads waited.
    """

    steps: Sequence[Sequence[tuple[float, float, int]]]
    laps: list[OpLap] = field(default_factory=list)
    wall: float = 0.0
    processor: float = 0.0
    switches: int = 0
    waited: float = 0.0
    timeline_row: list[tuple[Op, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = schemes.dapple(1, 1)
        self.replica = 0
        self.transport = self
        self._steps: Iterator[Any] = iter(self.steps)

    def read(self) -> Reading:
        return Reading(self.wall, self.processor, self.switches)

    @property
    def times(self) -> ThreadTimes:
        return ThreadTimes(self.processor, self.waited)

    def run(self, seconds: float, waited: float = 0.0, waits: int = 0) -> tuple[Reading, Reading]:
        begin = self.read()
        self.wall += seconds + waited
        self.processor += seconds
        self.waited += waited
        self.switches += waits
        return begin, self.read()

    def step(self, *_: Any) -> Any:
        self.laps.clear()
        start = self.wall
        self.run(1.0)  # before the first op
        for op, part in zip((F0, B0), next(self._steps), strict=True):
            self.laps.append(OpLap(op, *self.run(*part)))
            self.run(0.25, part[1])  # between two ops
        self.timeline_row = [(lap.op, lap.begin.wall - start, lap.end.wall - start) for lap in self.laps]
        return type("Step", (), {"seconds": self.wall - start})

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def timeline(self, _: int) -> Any:
        return [self.timeline_row]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times of a machine's steps."""

    def measured(steps: Sequence[Any], *, threads: int = 1, with_laps: bool = True) -> op_times.OpTimes:
        machine = Machine(steps)
        monkeypatch.setattr(op_times, "read_start", machine.read)
        monkeypatch.setattr(op_times, "read_stop", machine.read)
        monkeypatch.setattr(op_times, "thread_times", lambda: {"main": machine.times})
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        pipeline: Any = machine
        timer = OpTimer(pipeline, None, None, machine.laps if with_laps else None)
        for _ in steps:
            timer.turn()
        return timer.times()

    return measured


QUIET = [[(2.0, 0.0, 0), (4.0, 0.0, 0)]] * 3
BUSY = [[(2.0, 3.0, 0), (4.0, 9.0, 0)], [(2.0, 0.0, 0), (4.0, 5.0, 0)], [(2.0, 40.0, 0), (4.0, 1.0, 0)]]


def test_a_busy_machine_gives_the_times_of_a_quiet_one(times: Any) -> None:
    quiet, busy = times(QUIET), times(BUSY)
    assert (quiet.forward, quiet.backward, quiet.spread) == ((2.0,), (4.0,), ((1.0, 1.0),))
    assert busy == quiet
    assert busy.gap_seconds == 0.25
    assert busy.around_seconds == 1.25  # the last gap is behind the last op


def test_waits_of_the_work_itself_belong_to_it(times: Any) -> None:
    # Each forward sleeps for 3 s, of which the system says that the thread gave up its processor.
    sleeping = times([[(2.0, 3.0, 1), (4.0, 0.0, 0)]] * 3)
    assert (sleeping.forward, sleeping.backward) == ((5.0,), (4.0,))
    # One wait among others that did not: a lock that the work does not need.
    locked = times([[(2.0, 0.0, 0), (4.0, 0.0, 0)], [(2.0, 9.0, 1), (4.0, 0.0, 0)], *QUIET])
    assert locked.forward == (2.0,)


def test_several_threads_are_timed_by_the_wall_with_a_range_down_to_the_quiet_machine(times: Any) -> None:
    steady = times(QUIET, threads=2)
    assert steady == times(QUIET)
    busy = times(BUSY, threads=2)
    ((low, high),) = busy.spread
    seconds = busy.forward[0] + busy.backward[0]
    assert seconds > 6.0
    assert low * seconds <= 6.0 <= seconds <= high * seconds


def test_without_laps_ops_are_timed_by_the_wall(times: Any) -> None:
    assert times(QUIET, with_laps=False) == times(QUIET)
    assert times(BUSY, with_laps=False).backward[0] > 4.0


def test_the_spread_is_that_of_steps(times: Any) -> None:
    steps = [[(seconds, 0.0, 0), (0.0, 0.0, 0)] for seconds in (9.0, 10.0, 10.0, 10.0, 11.0)]
    ((low, high),) = times(steps).spread
    assert (low, high) == (pytest.approx(0.94), pytest.approx(1.06))  # quantiles between two of five


@dataclass
class Timer:
    """A timer whose steps take literal seconds and waits; the last one repeats."""

    steps: list[tuple[float, float]]
    turns: int = 0
    share: float = 0.0

    @property
    def repeats(self) -> TimedSteps:
        rows = [self.steps[min(turn, len(self.steps) - 1)] for turn in range(self.turns)]
        return TimedSteps(tuple(seconds for seconds, _ in rows), tuple(waiting for _, waiting in rows))

    def warm_up(self) -> None:
        assert not self.turns

    def turn(self) -> None:
        self.turns += 1

    def result(self, quietest: float) -> int:
        self.share = quietest
        return self.turns

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("steps", "turns"),
    [
        ([(1.0, 0.0)], 3),
        ([(1.0, 0.01), (1.2, 0.04), (1.1, 0.0)], 3),
        ([(1.0, 0.0), (1.0, 0.4), (1.0, 0.0)], 4),  # one that waited is repeated
        ([(1.0, 0.0), (3.0, 0.0), (1.0, 0.0)], 4),  # or was slow, whatever the system says of waits
        ([(1.0, 0.0), (1.0, 0.4), (1.0, 0.4)], 6),  # the last one goes on
        ([(1.0, 0.9)], 6),  # always disturbed: twice as many at most
    ],
)
def test_disturbed_steps_are_repeated_up_to_twice_as_many(
    steps: list[tuple[float, float]], turns: int
) -> None:
    timer = Timer(steps)
    make: Any = lambda *_: timer  # noqa: E731
    nothing: Any = None
    assert timed(make, nothing, 1, 3) == turns
    assert timer.share == 3 / turns


def test_nothing_to_time_is_not_repeated() -> None:
    assert TimedSteps((), ()).suffice(3)  # of a model without sequences no lengths are timed


def test_steps_of_workers_that_share_cores_are_not_repeated() -> None:
    timer = Timer([(1.0, 0.9)])
    make: Any = lambda *_: timer  # noqa: E731
    nothing: Any = None
    assert timed(make, nothing, 1, 3, repeating=False) == 3


def test_times_of_threads_are_read(tmp_path: Path) -> None:
    for thread, text in (
        ("11", "5000000000 2000000000 7\n"),
        ("12", "0 500000000 1\n"),
        ("13", ""),
        ("14", None),
    ):
        (tmp_path / thread).mkdir()
        if text is not None:  # else a thread that has ended
            (tmp_path / thread / "schedstat").write_text(text)
    assert thread_times(tmp_path) == {"11": (5.0, 2.0), "12": (0.0, 0.5)}
    assert thread_times(tmp_path / "none") == {}


def test_waits_of_threads_that_carry_messages_do_not_count() -> None:
    before = {"main": ThreadTimes(1.0, 1.0), "gloo": ThreadTimes(1.0, 1.0)}
    after = {"main": ThreadTimes(2.0, 1.25), "gloo": ThreadTimes(1.25, 9.0), "new": ThreadTimes(0.5, 0.5)}
    assert computing_wait(before, after) == 0.5  # of the new one, which computed for half as long
    assert computing_wait({}, {}) == 0.0


def test_the_waiting_share_is_that_of_laps_that_tell() -> None:
    assert waiting_share([Lap(1.0, 0.5, 0), Lap(9.0, 0.0, 1)]) == 0.5
    assert waiting_share([Lap(1.0, 0.5, None)]) is None
    assert waiting_share([Lap(1.0, 1.5, 0)]) == 0.0  # clocks of different steps


@pytest.mark.parametrize(("quiet", "expected"), [(True, 2.0), (False, 1.0)])
def test_messages_take_the_mean_or_on_a_busy_machine_the_minimum(quiet: bool, expected: float) -> None:
    assert quiet_seconds([1.0, 2.0, 3.0, 99.0], quiet=quiet) == expected


def test_laps_of_which_nothing_is_known() -> None:
    assert undisturbed([]) == []
    assert undisturbed([Lap(2.0, 1.0, None)]) == [2.0]


def _lapped() -> tuple[list[Any], list[Any], bool]:
    laps: list[OpLap] = []
    token = OP_LAPS.set(laps)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers,
        nn.functional.mse_loss,
        schemes.gpipe(1, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    OP_LAPS.reset(token)
    for _ in range(2):
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
    (row,) = pipeline.timeline()
    agree = all(
        end - start == pytest.approx(lap.end.wall - lap.begin.wall)
        and lap.end.processor - lap.begin.processor >= 0
        for (_, start, end), lap in zip(row, laps, strict=True)
    )
    return [lap.op for lap in laps], list(pipeline.schedule.orders[0]), agree


def test_a_pipeline_reads_laps_of_the_last_step() -> None:
    ((ops, order, agree),) = launch(_lapped, workers=1, transport="local")
    assert ops == order
    assert agree
