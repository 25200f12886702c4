"""Threads that are workers draw as processes do."""

from __future__ import annotations

import logging
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from counterflow import Pipeline, launch, schemes
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.transport import rng_lock
from counterflow.runtime.transport.base import TimedOut

from ...kit import sgd


def _draws(steps: int) -> list[object]:
    """Weights and mini-batches from the global generators, as examples have it."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002
    found: list[object] = []
    for _ in range(2):
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]
        found.append(float(sum(p.detach().sum() for layer in layers for p in layer.parameters())))
        pipeline = Pipeline(layers, nn.functional.mse_loss, schemes.chimera(4, 4), optimizer=sgd)
        for _ in range(steps):
            x = torch.randn(8, 4) * random.choice([1.0, 2.0]) + float(np.random.rand())  # noqa: NPY002
            found += [float(x.sum()), pipeline.step(x, x).loss]
        pipeline.close()
    return found


@pytest.mark.parametrize("transport", ["local", "strict-local"])
def test_threads_draw_the_same_weights_and_mini_batches(transport: str) -> None:
    found = launch(_draws, 3, workers=4, transport=transport, timeout_seconds=60)
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][0] != 0.0
    again = launch(_draws, 3, workers=4, transport=transport, timeout_seconds=60)
    assert again == found


def test_what_threads_draw_is_theirs() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = launch(lambda: torch.rand(1).item(), workers=3, transport="local")
    assert torch.equal(torch.get_rng_state(), before)
    assert found == [torch.rand(1).item()] * 3


class _Draws(nn.Module):
    """A layer that draws from Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.draws = nn.Linear(4, 4), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.draws += [random.random(), float(np.random.rand())]  # noqa: NPY002
        found: torch.Tensor = self.linear(x)
        return found * (1 + self.draws[-1])


def test_layers_draw_anew_in_each_step() -> None:
    def work() -> tuple[list[float], float]:
        random.seed(4)
        layers = [_Draws(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        pipeline = Pipeline(layers, nn.MSELoss(), schemes.dapple(2, 2), optimizer=sgd)
        for _ in range(3):
            pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
        return layers[0].draws, random.random()  # type: ignore[return-value]

    found = launch(work, workers=2, transport="local")
    drawn = found[0][0]
    assert len(set(drawn)) == len(drawn) == 12
    random.seed(4)
    assert [own for _, own in found] == [random.random()] * 2


def test_threads_that_wait_for_each_other_end_the_turns_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rng_lock, "_LOOK_SECONDS", 0.01)
    barrier = threading.Barrier(3)

    def waits() -> bool:
        barrier.wait()
        return rng_lock.holds_rng()

    with caplog.at_level(logging.WARNING):
        assert len(launch(waits, workers=3, transport="local", timeout_seconds=30)) == 3
    assert [record.message for record in caplog.records if "their random draws mix" in record.message]
    assert not rng_lock.process_lock.locked()


def test_a_worker_that_fails_gives_its_turn_back() -> None:
    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(Exception, match="broken"):
        launch(fails, workers=2, transport="local")
    assert not rng_lock.process_lock.locked()


def test_a_thread_that_keeps_the_generators_is_named() -> None:
    streams = RandomStreams(0, torch.device("cpu"), shared=True, timeout_seconds=0.01)
    with rng_lock.process_lock, pytest.raises(TimedOut, match="kept the random generators") as error:
        streams.turn().__enter__()
    assert "within 0.01 s" in str(error.value)
