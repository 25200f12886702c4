"""Micro-batches as the user has them, against one process: fewer samples than micro-batches, and so on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

F = torch.float64
SCHEMES = [
    schemes.gpipe(2, 4),
    schemes.dapple(2, 4),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.hanayo(2, 4, waves=1),
]
MODES = ["none", "stage", "layer"]


class Packed(nn.Linear):
    """Hands on a dict, with something that has no gradient."""

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x).tanh(), "least": x.argmin(1)}


class Unpacked(nn.Linear):
    def forward(self, given: Any) -> Tensor:
        found: Tensor = super().forward(given["y"]) + given["least"][:, None]
        return found


def layers_of(schedule: Schedule) -> list[nn.Module]:
    torch.manual_seed(0)
    more = [nn.Linear(4, 4, dtype=F) for _ in range(schedule.stages - 2)]
    return [Packed(4, 4, dtype=F), Unpacked(4, 4, dtype=F), *more]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def numbers(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples + 1000 * seed), dtype=F)


def run(work: Callable[..., Any], *args: object, workers: int = 2, transport: str = "local") -> list[Any]:
    strict: Any = {"strict": True} if transport == "local" else {}
    return launch(work, *args, workers=workers, transport=transport, timeout_seconds=60, **strict)


COUNTS = (3, 8, 1, 3, 5, 1)


def _of_few_samples(layers: list[nn.Module], schedule: Schedule, mode: str) -> Any:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, recompute=mode)
    losses = []
    for samples in COUNTS:
        x = numbers(samples * pipeline.replicas).chunk(pipeline.replicas)[pipeline.replica]
        y = x.flip(1)
        losses += [pipeline.evaluate(x, y), pipeline.step(x, y).loss]
    return losses, pipeline.state_dict()


def _in_one_process(layers: list[nn.Module], replicas: int) -> Any:
    model = nn.Sequential(*layers)
    optimizer = sgd(list(model.parameters()))
    losses = []
    for samples in COUNTS:
        x = numbers(samples * replicas)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item()] * 2
    return losses, model.state_dict()


def same(found: Any, true: Any) -> None:
    assert found[0] == pytest.approx(true[0], rel=1e-10)
    for name, tensor in true[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_fewer_samples_than_micro_batches(schedule: Schedule, mode: str) -> None:
    true = _in_one_process(layers_of(schedule), 1)
    for found in run(_of_few_samples, layers_of(schedule), schedule, mode):
        same(found, true)


@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_fewer_samples_than_micro_batches_on_replicas(transport: str) -> None:
    true = _in_one_process(layers_of(SCHEMES[1]), 2)
    job = layers_of(SCHEMES[1]), SCHEMES[1], "stage"
    for found in run(_of_few_samples, *job, workers=4, transport=transport):
        same(found, true)


def _none(layers: list[nn.Module], schedule: Schedule) -> None:
    x = numbers(0)
    Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd).step(x, x)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="the mini-batch has no samples; give one or more"):
        run(_none, layers_of(SCHEMES[0]), SCHEMES[0])
