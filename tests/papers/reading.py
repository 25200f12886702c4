"""Schedules as the papers print them, and the times the papers use."""

from __future__ import annotations

from counterflow import Costs, Op, OpKind, Schedule
from counterflow.simulation import simulate

EQUAL_SLOTS = Costs(forward=1.0, backward=1.0)
"""The papers' *equal slots*: a backward lasts as long as a forward."""


def short(op: Op) -> str:
    """An op without its stage, as the papers write it: ``F3``, ``F(0,1)``, ``B3``."""
    batches = ",".join(map(str, op.micro_batches))
    return f"{op.kind.value}{batches}" if len(op.micro_batches) == 1 else f"{op.kind.value}({batches})"


def orders(schedule: Schedule) -> list[str]:
    """One line a worker: ``F0 F1 B0 B1``."""
    return [" ".join(map(short, order)) for order in schedule.orders]


def staircase(schedule: Schedule, costs: Costs | None = None) -> list[str]:
    """One line a worker, one character a unit of time: digit forward, letter backward, ``.`` idle."""
    result = simulate(schedule, costs)
    rows = [["."] * int(result.makespan) for _ in range(schedule.workers)]
    for span in result.timeline:
        (batch,) = span.op.micro_batches
        mark = str(batch) if span.op.kind is OpKind.FORWARD else chr(ord("a") + batch)
        for time in range(int(span.start), int(span.end)):
            assert rows[span.worker][time] == ".", "two ops at once"
            rows[span.worker][time] = mark
    return [" ".join(row) for row in rows]


def grid(text: str) -> list[str]:
    """The lines of a picture in a docstring, without indentation and worker names."""
    return [line.strip().partition(" ")[2].strip() for line in text.strip().splitlines()]
