"""The timeline of a device that is only in flight when an op returns."""

from __future__ import annotations

import time
from typing import Self

import pytest
import torch
from torch import nn

from counterflow import Op, Pipeline, launch, lower, schemes
from counterflow.runtime.execution import interpreter
from counterflow.runtime.execution.meters import EventClock
from counterflow.schedule.ir import Schedule


class _Event:
    """As ``torch.cuda.Event``: recorded by the host, known once somebody has waited."""

    device_done = False

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        type(self).device_done = False
        self.seconds = time.perf_counter()

    def elapsed_time(self, end_event: Self) -> float:
        assert self.device_done, "an event is asked before the device has come to it"
        return 1000 * (end_event.seconds - self.seconds)

    @classmethod
    def synchronize_device(cls) -> None:
        cls.device_done = True


def _ran() -> list[list[tuple[Op, float, float]]]:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers,
        nn.functional.mse_loss,
        schemes.chimera(2, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    for _ in range(2):
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
    return pipeline.timeline()


def test_a_timeline_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "clock_of", lambda _: EventClock(_Event, _Event.synchronize_device))
    rows = launch(_ran, workers=2, transport="local")[0]
    for row, order in zip(rows, schemes.chimera(2, 2).orders, strict=True):
        assert [op for op, _, _ in row] == list(order)
        times = [seconds for _, start, end in row for seconds in (start, end)]
        assert times[0] >= 0
        assert times == sorted(times)


def _traced(schedule: Schedule) -> list[tuple[int, int, list[list[tuple[Op, float, float]]]]]:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    batch = torch.ones(4, 4), torch.ones(4, 4)
    pipeline.step(*batch)
    with pipeline.traced() as timeline:
        for _ in range(3):
            pipeline.step(*batch)
        pipeline.flush()
        found = timeline()
    pipeline.step(*batch)
    pipeline.flush()
    return [(len(row), len(last), [row]) for row, last in zip(found, pipeline.timeline(), strict=True)]


@pytest.mark.parametrize("schedule", [schemes.dapple(2, 2), schemes.pipedream_2bw(2, 2, periods=4)], ids=str)
def test_a_trace_has_all_steps_of_its_block(schedule: Schedule) -> None:
    for whole, last, (row,) in launch(_traced, schedule, workers=2, transport="local")[0]:
        # Of an asynchronous scheme the trace may begin with the rest of the step before.
        assert whole == 12 if schedule.synchronous else whole >= 12
        assert last < whole
        starts = [start for _, start, _ in row]
        assert starts == sorted(starts)
        # An asynchronous scheme counts micro-batches on from step to step.
        assert len({op for op, _, _ in row}) == (whole // 3 if schedule.synchronous else whole)


def _profiled() -> list[str]:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers, nn.functional.mse_loss, schemes.zb_h1(1, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    batch = torch.ones(4, 4), torch.ones(4, 4)
    pipeline.step(*batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        pipeline.step(*batch)
    return [event.name for event in found.events()]


def test_a_profiler_shows_every_action_by_name() -> None:
    (names,) = launch(_profiled, workers=1, transport="local")
    program = [str(action) for action in lower(schemes.zb_h1(1, 2)).actions[0]]
    assert "InputGradient I0.0" in program
    ops = [name for name in names if name in program]
    assert ops == [name for name in program if name in set(ops)]
    assert {
        name for name in program if name.split()[0] in ("Forward", "InputGradient", "WeightGradients")
    } <= set(ops)


def test_events_are_used_again() -> None:
    made: list[_Event] = []

    def make() -> _Event:
        made.append(_Event())
        return made[-1]

    clock = EventClock(make, _Event.synchronize_device)
    for step in range(3):
        clock.start()
        for op in schemes.dapple(1, 2).orders[0]:
            clock.end(op, step, clock.begin())
        found = clock.ran()
        assert [one.period_offset for one in found] == [step] * 4
        times = [seconds for one in found for seconds in (one.start, one.end)]
        assert times[0] >= 0
        assert times == sorted(times)
    assert len(made) == 9  # of one step: its begin, and two an op
