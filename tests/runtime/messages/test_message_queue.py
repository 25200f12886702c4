"""Receive buffers: used again, but never while somebody has what came in them; and not too many."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.common.tensors.graphs import pointers
from counterflow.runtime.messages.message_queue import MessageQueue
from counterflow.runtime.messages.values import BufferPool, TensorSpec
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.local import Hub, LocalTransport
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import sgd

SCHEMES = [
    schemes.gpipe(2, 4),
    schemes.dapple(2, 4),
    schemes.interleaved(2, 4, chunks=2),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.hanayo(2, 4, waves=1),
    schemes.pipedream_2bw(2, 4),
]


def run(work: Callable[..., Any], *args: object) -> list[Any]:
    return launch(work, *args, workers=2, transport="local", timeout_seconds=30)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(torch.Size(shape), torch.float32, requires_grad=False)


def test_a_buffer_that_somebody_has_is_not_used_again() -> None:
    pool = BufferPool(torch.device("cpu"))
    free, kept = pool.take(spec(4)), pool.take(spec(4))
    alias = kept.detach()[1:]
    pool.put([kept, free])
    first, second = pool.take(spec(4)), pool.take(spec(4))
    assert first.data_ptr() == free.data_ptr()
    assert second.data_ptr() != kept.data_ptr() == alias.data_ptr() - 4
    assert pool.allocations == 3


def test_a_pool_has_never_more_bytes_than_were_in_use_at_once() -> None:
    pool = BufferPool(torch.device("cpu"))
    pool.put([pool.take(spec(100)), pool.take(spec(100))])
    for length in range(1, 200):
        pool.put([pool.take(spec(length))])
        free = [buffer for buffers in pool._free.values() for buffer, _ in buffers]
        assert sum(buffer.nbytes for buffer in free) <= 800
        assert len(free) == len({buffer.data_ptr() for buffer in free})


class _Sending:
    """A message on its way."""

    waited = False
    gone = False

    def done(self) -> bool:
        return self.gone

    def wait(self) -> None:
        self.waited = True


def test_memory_that_is_being_sent_from_is_released_when_it_is_sent() -> None:
    queue = MessageQueue(LocalTransport(Hub(1), 0, torch.device("cpu")), None)
    given, other = torch.zeros(4), torch.zeros(4)
    of_given, of_other = _Sending(), _Sending()
    queue._last[1] = 0, of_other, [other]
    queue._last[2] = 1, of_given, [other, given[2:]]
    queue.release(pointers([given]))
    assert of_given.waited
    assert not of_other.waited


def test_of_what_went_to_a_worker_the_last_message_is_kept_until_its_gradient_is_there() -> None:
    queue = MessageQueue(LocalTransport(Hub(3), 0, torch.device("cpu")), None)
    sends = [_Sending() for _ in range(4)]
    tensors = [torch.zeros(1) for _ in sends]
    alive = [weakref.ref(tensor) for tensor in tensors]

    def send(number: int, peer: int) -> None:
        envelope: Any = SimpleNamespace(number=number, peer=peer)
        queue._track(envelope, sends[number], [tensors[number]])

    send(0, peer=1)
    send(1, peer=2)
    assert not any(one.waited for one in sends)
    send(2, peer=1)
    assert [one.waited for one in sends] == [True, False, False, False]
    queue._release_answered(0)  # long gone
    queue._release_answered(2)
    send(3, peer=2)
    assert [one.waited for one in sends] == [True, True, True, False]
    tensors.clear()
    assert [one() is None for one in alive] == [True, True, True, False]
    queue.drain()
    assert sends[3].waited
    assert alive[3]() is None


def test_what_left_when_it_was_received_is_let_go_of_with_the_next_message() -> None:
    queue = MessageQueue(LocalTransport(Hub(3), 0, torch.device("cpu")), None)
    first, tensor = _Sending(), torch.zeros(1)
    alive = weakref.ref(tensor)
    queue._append_untracked(first, [tensor])
    del tensor
    envelope: Any = SimpleNamespace(number=0, peer=1)
    queue._track(envelope, _Sending(), [])
    assert alive() is not None
    first.gone = True
    queue._track(envelope, _Sending(), [])
    assert alive() is None


def _kept(layers: list[nn.Module], schedule: Schedule, mode: Any) -> tuple[int, int, int]:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, recompute=mode)
    kept: list[tuple[Tensor, Tensor]] = []
    calls: list[int] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        (x,) = given
        kept.append((x.detach()[1:], x.detach()[1:].clone()))
        if x.requires_grad and torch.is_grad_enabled():
            calls.append(0)
            number = len(calls) - 1

            def count(_: Tensor) -> None:
                calls[number] += 1

            x.register_hook(count)

    for stage in pipeline.stages.values():
        for layer in stage.layers:
            layer.module.register_forward_pre_hook(keep)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        pipeline.step(x, x)
    pipeline.flush()
    return len(kept), sum(not torch.equal(a, b) for a, b in kept), max(calls, default=1)


@pytest.mark.parametrize("mode", ["none", "stage"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_what_a_hook_keeps_of_an_input_stays_as_it_was(schedule: Schedule, mode: Any) -> None:
    layers = [nn.Linear(4, 4) for _ in range(schedule.stages)]
    for count, changed, most in run(_kept, layers, schedule, mode):
        assert count
        assert not changed
        assert most == 1  # a hook on a tensor ends with it


def _made(layers: list[nn.Module], schedule: Schedule, **options: Any) -> list[int]:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, **options)
    found = []
    for _ in range(8):
        pipeline.step(torch.ones(16, 4), torch.ones(16, 4))
        messages = pipeline._engine.runner.interpreter.in_flight.messages
        found.append(messages._pool.allocations + messages._memory.allocations)
    pipeline.flush()
    return found


@pytest.mark.table
@pytest.mark.parametrize("mode", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_buffers_are_used_again(schedule: Schedule, mode: Any) -> None:
    layers = [nn.Linear(4, 4) for _ in range(schedule.stages)]
    for made in run(partial(_made, recompute=mode), layers, schedule):
        assert made[3] == made[-1] > 0
