"""Memory of received messages in a running pipeline: a block of its layout's size, and no more."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.program.communication.communication_plan import communication_plan
from counterflow.program.communication.receive_buffers import most_in_use
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


def memory(layers: list[nn.Module], schedule: Schedule, **options: Any) -> tuple[float, list[int]]:
    """Bytes of this worker's block over those in use at once, and allocations after each step."""
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, **options)
    x = torch.ones(24, 4, dtype=next(layers[0].parameters()).dtype)
    runner = pipeline._engine.runner
    messages = runner.interpreter.in_flight.messages
    counts = []
    for _ in range(6):
        pipeline.step(x, x)
        counts.append(messages._memory.allocations)
    assert not messages._pool.allocations
    lives = communication_plan(runner._cut.steady[-1]).buffers[pipeline.worker].lifetimes
    modules = [module for layer in layers for module in layer.modules()]
    widths = [module.out_features for module in modules if isinstance(module, nn.Linear)]
    rows = 24 // schedule.micro_batches * x.dtype.itemsize
    sizes = [-(-rows * widths[life.receive.output.boundary] // 256) * 256 for life in lives]
    (block,) = messages._memory.blocks.values()
    return block.memory.nbytes / most_in_use(lives, sizes)[1], counts


@pytest.mark.parametrize("options", [{}, {"barrier": False}, {"recompute": "stage"}], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_block_is_allocated_once(schedule: Schedule, options: dict[str, Any]) -> None:
    for ratio, counts in run(partial(memory, **options), linears(schedule.stages), schedule):
        assert counts == [0, 1, 1, 1, 1, 1]  # shapes are learnt in the first step
        assert ratio == 1


def widening(*widths: int) -> list[nn.Module]:
    return [Widening(a, b) for a, b in pairwise(widths)]


@pytest.mark.parametrize("widths", [(4, 512, 256, 128, 4), (4, 64, 128, 32, 4)], ids=str)
def test_messages_of_unequal_sizes_share_a_block(widths: tuple[int, ...]) -> None:
    for ratio, counts in run(memory, widening(*widths), schemes.dapple(4, 8), workers=4):
        assert counts == [0, 1, 1, 1, 1, 1]
        assert ratio <= 1.02


def test_by_tag_receives_are_posted_earlier() -> None:
    for ratio, counts in run(memory, linears(2), schemes.dapple(2, 6), transport="local"):
        assert counts == [0, 1, 1, 1, 1, 1]
        assert ratio == 1


class Retaining(Widening):
    """A layer that refers to its last inputs."""

    def __init__(self, width: int, output: int) -> None:
        super().__init__(width, output)
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs = [*self.inputs[-4:], (x.detach(), x.detach().clone())]
        return super().forward(x)


@pytest.mark.parametrize(
    "schedule", [schemes.dapple(3, 6), schemes.hanayo(3, 6, waves=2), schemes.zb_v(3, 6)], ids=str
)
def test_memory_that_a_layer_refers_to_is_not_used_again(schedule: Schedule) -> None:
    def retained() -> int:
        widths = [4, *(16 << stage % 3 for stage in range(schedule.stages - 1)), 4]
        layers: list[nn.Module] = [Retaining(a, b) for a, b in pairwise(widths)]
        pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, digest_every=0)
        rng = torch.Generator().manual_seed(0)
        inputs = 0
        for samples in (24, 24, 24, 48, 24, 12, *range(13, 48, 2), 24, 24):
            x = torch.randn(samples, 4, generator=rng)
            pipeline.step(x, x)
            pairs = [pair for layer in layers for pair in layer.inputs]  # type: ignore[union-attr]
            assert all(torch.equal(x, copy) for x, copy in pairs)
            inputs += len(pairs)
        return inputs

    assert min(run(retained, workers=3)) > 30
