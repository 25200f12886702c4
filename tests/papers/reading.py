"""Schedules as the papers print them, and the times the papers use."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from counterflow import Costs, Op, OpKind, Schedule
from counterflow.simulation import simulate

EQUAL_SLOTS = Costs(forward=1.0, backward=1.0)
"""The papers' *equal slots*: a backward lasts as long as a forward."""


PRINTED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
"""Numbers that the papers print, by table."""


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


def longest_span(schedule: Schedule, costs: Costs) -> float:
    """Longest time of a worker from the begin of its first op to the end of its last one."""
    spans: dict[int, list[float]] = {}
    for box in simulate(schedule, costs).timeline:
        spans.setdefault(box.worker, []).extend((box.start, box.end))
    return max(max(times) - min(times) for times in spans.values())


def grid(text: str) -> list[str]:
    """The lines of a picture in a docstring, without indentation and worker names."""
    return [line.strip().partition(" ")[2].strip() for line in text.strip().splitlines()]
