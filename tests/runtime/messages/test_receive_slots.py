"""Receive buffers of a running pipeline: those of its communication plan, and no others."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.program.communication.communication_plan import communication_plan
from counterflow.program.communication.receive_buffers import BufferTable
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import linears, run, sgd

SCHEDULES = [
    schemes.gpipe(2, 4),
    schemes.dapple(2, 6),
    schemes.dapple(2, 4, split=True),
    schemes.interleaved(2, 4, chunks=2),
    schemes.interleaved_zb(2, 4, chunks=2),
    schemes.chimera(2, 4),
    schemes.hanayo(2, 4, waves=2),
    schemes.zb_v(2, 6),
    schemes.dualpipe_v(2, 6),
]


class Widening(nn.Module):
    """A layer whose output is wider than its input."""

    def __init__(self, width: int, output: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def allocations(layers: list[nn.Module], schedule: Schedule, **options: Any) -> tuple[BufferTable, list[int]]:
    """Buffers of this worker's plan, and those that were allocated after each step."""
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, **options)
    x = torch.ones(24, 4, dtype=next(layers[0].parameters()).dtype)
    runner = pipeline._engine.runner
    messages = runner.interpreter.in_flight.messages
    counts = []
    for _ in range(6):
        pipeline.step(x, x)
        counts.append(messages._slots.allocations)
    assert not messages._pool.allocations
    return communication_plan(runner._cut.steady[-1]).buffers[pipeline.worker], counts


@pytest.mark.parametrize("options", [{}, {"barrier": False}, {"recompute": "stage"}], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_each_buffer_is_allocated_once(schedule: Schedule, options: dict[str, Any]) -> None:
    for table, counts in run(partial(allocations, **options), linears(schedule.stages), schedule):
        assert counts[0] == 0  # shapes are learnt
        assert {*counts[1:]} == {len(table.sizes)}


def widening(*widths: int) -> list[nn.Module]:
    return [Widening(a, b) for a, b in pairwise(widths)]


def test_messages_of_unequal_sizes_share_buffers() -> None:
    layers = widening(4, 512, 256, 128, 4)
    for table, counts in run(allocations, layers, schemes.dapple(4, 8), workers=4):
        assert {*counts[1:]} == {len(table.sizes)}


def test_if_sizes_fit_badly_the_pool_reuses_any_buffer() -> None:
    def pooled() -> tuple[int, int]:
        pipeline = Pipeline(
            widening(4, 64, 128, 4), nn.functional.mse_loss, schemes.dapple(3, 4), optimizer=sgd
        )
        for _ in range(3):
            pipeline.step(torch.ones(24, 4), torch.ones(24, 4))
        messages = pipeline._engine.runner.interpreter.in_flight.messages
        return messages._slots.allocations, messages._pool.allocations

    (slots, _), (no_slots, pool), _ = run(pooled, workers=3)
    assert slots
    assert pool
    assert not no_slots


def test_by_tag_receives_are_posted_earlier() -> None:
    for table, counts in run(allocations, linears(2), schemes.dapple(2, 6), transport="local"):
        assert {*counts[1:]} == {len(table.sizes)}
