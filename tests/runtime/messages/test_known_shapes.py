"""Micro-batches of any lengths: messages describe themselves until each length was seen, and never after."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.runtime.messages.message_queue import MessageQueue
from counterflow.runtime.messages.values import Shapes, TensorSpec, Unit, ValueLayout
from counterflow.runtime.mini_batch.known_shapes import KnownShapes
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

LENGTHS = (3, 5, 4, 7)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)]


def micro_batch(step: int, length: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + length)
    found = torch.randn(2, length, 4, generator=draw)
    return found, -found


def steps(schedule: Schedule) -> list[list[tuple[Tensor, Tensor]]]:
    """Each of some lengths in the first step, then others of them in each."""
    count = schedule.micro_batches
    every = list(product(LENGTHS, repeat=count))[:: len(LENGTHS) ** count // 5]
    rows = [LENGTHS[i : i + count] for i in range(0, len(LENGTHS), count)]
    return [[micro_batch(n, length) for length in row] for n, row in enumerate([*rows, *every])]


def trained(schedule: Schedule, **options: Any) -> tuple[dict[str, Tensor], list[int]]:
    """The weights, and how many messages described themselves in each step, on the first worker."""
    described = [0]

    def work() -> tuple[dict[str, Tensor], list[int]]:
        found = []
        with cf.Pipeline(
            layers(), functional.mse_loss, schedule, optimizer=partial(torch.optim.SGD, lr=0.1), **options
        ) as pipeline:
            for batch in steps(schedule):
                before = described[0]
                pipeline.step(micro_batches=batch)
                found.append(described[0] - before)
            return pipeline.model_state_dict(), found

    send = MessageQueue.send

    def counted(self: MessageQueue, envelope: Any, known: Any, learnt: Any) -> None:
        described[0] += known is None
        send(self, envelope, known, learnt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageQueue, "send", counted)
        return cf.launch(work, workers=schedule.workers, transport="local")[0]


def test_each_length_describes_itself_once() -> None:
    for schedule, first in (
        (schemes.dapple(2, 2), 2),
        (schemes.gpipe(4, 4), 1),
        (schemes.zb_v(2, 4), 1),
        (schemes.hanayo(2, 2, waves=1), 2),
    ):
        weights, described = trained(schedule)
        assert all(described[:first]), str(schedule)
        assert not any(described[first:]), (str(schedule), described)
        expected, always = trained(schedule, dynamic_shapes=True)
        assert all(always)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def layout(size: int) -> ValueLayout:
    return ValueLayout(None, [TensorSpec(torch.Size((size,)), torch.float32, requires_grad=True)])


def test_a_length_is_known_for_the_pipe_that_had_it() -> None:
    """Another pipe's stages are elsewhere, so a worker saw other messages of it."""
    shapes = KnownShapes(schemes.chimera(2, 2).workload)
    shapes.learn(1, (7, 8), {(0, Unit(0)): layout(7), (0, Unit(1)): layout(8)})
    assert shapes.of(1, ()) is not None
    assert shapes.of(2, (7, 7)) is None
    shapes.learn(3, (8, 7), {(0, Unit(0)): layout(80), (0, Unit(1)): layout(70)})
    assert shapes.of(2, (7, 7)) == {(0, Unit(0)): layout(7), (0, Unit(1)): layout(70)}
    assert shapes.of(0, ()) is None
    shapes.clear()
    assert shapes.of(1, (7, 8)) is None


def test_what_is_learnt_later_is_known_too() -> None:
    """Without a flush the last messages of a mini-batch come in later steps."""
    shapes = KnownShapes(schemes.dapple(2, 2).workload)
    learnt: Shapes = {(0, Unit(0)): layout(3)}
    shapes.learn(1, (5, 5), learnt)
    learnt[0, Unit(1)] = layout(4)
    assert shapes.of(2, (5, 5)) == {(0, Unit(0)): layout(4), (0, Unit(1)): layout(4)}
