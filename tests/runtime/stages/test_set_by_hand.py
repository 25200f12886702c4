"""Weights that the user, or another pipeline, sets between calls: every thread's copy has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch

from ...kit import batch, momentum

F = torch.float64
DAPPLE, CHIMERA = "dapple(stages=2, micro_batches=2)", "chimera(stages=2, micro_batches=2)"


def block(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=F), nn.Tanh()) for _ in range(3)))


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data.clamp_(-0.2, 0.2)


def replace_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.data.clamp(-0.2, 0.2)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clamp(-0.2, 0.2) for name, tensor in model.state_dict().items()})


def clamped(
    schedule: str, change: Callable[[nn.Module], None], model: nn.Module, **options: Any
) -> list[float]:
    pipeline = Pipeline(model, nn.MSELoss(), schedule, optimizer=momentum, **options)
    found = []
    for number in range(7):
        found.append(pipeline.step(*batch(number)).loss)
        change(model)
    return [*found, pipeline.evaluate(*batch(9)).loss]


def clamped_in_one_process() -> list[float]:
    model = block(0)
    optimizer, found = momentum(model.parameters()), []
    for number in range(7):
        optimizer.zero_grad()
        inputs, targets = batch(number)
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        clamp(model)
        found.append(loss.item())
    inputs, targets = batch(9)
    return [*found, functional.mse_loss(model(inputs), targets).item()]


def run(work: Callable[..., Any], *args: Any, workers: int = 2) -> Any:
    return launch(work, *args, workers=workers, transport="local", timeout_seconds=30)[0]


@pytest.mark.parametrize("change", [clamp, clamp_data, replace_data, load])
@pytest.mark.parametrize(("schedule", "workers"), [(CHIMERA, 2), (DAPPLE, 4), (CHIMERA, 4)])
def test_all_copies_have_what_is_set(
    schedule: str, workers: int, change: Callable[[nn.Module], None]
) -> None:
    found = run(clamped, schedule, change, block(0), workers=workers)
    assert found == pytest.approx(clamped_in_one_process(), rel=1e-12)


def two(schedule: str, flushes: bool, body: nn.Sequential, *heads: nn.Sequential) -> list[float]:
    pipelines = [
        Pipeline(nn.Sequential(*body, *head), nn.MSELoss(), schedule, optimizer=momentum, cuts=[3])
        for head in heads
    ]
    found = []
    for number in range(4):
        for pipeline in pipelines:
            steps = [pipeline.step(*batch(number)), *(pipeline.flush() if flushes else ())]
            found += [step.loss for step in steps if step.reports_step is not None]
    return found


def two_in_one_process() -> list[float]:
    body, *heads = block(1), block(2), block(3)
    optimizers = [momentum([*body.parameters(), *head.parameters()]) for head in heads]
    found = []
    for number in range(4):
        inputs, targets = batch(number)
        for head, optimizer in zip(heads, optimizers, strict=True):
            optimizer.zero_grad()
            loss = functional.mse_loss(head(body(inputs)), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("schedule", "workers", "flushes"),
    [(CHIMERA, 2, False), (DAPPLE, 4, False), ("pipedream-2bw(stages=2, micro_batches=2)", 2, True)],
)
def test_two_pipelines_that_share_layers_train_the_same_ones(
    schedule: str, workers: int, flushes: bool
) -> None:
    found = run(two, schedule, flushes, block(1), block(2), block(3), workers=workers)
    assert found == pytest.approx(two_in_one_process(), rel=1e-12)


def test_layers_of_a_pipeline_in_flight_are_trained_by_it_alone() -> None:
    schedule = "pipedream-2bw(stages=2, micro_batches=2)"
    with pytest.raises(ConfigError, match=r"^layer 0 \(Sequential\) is trained by another pipeline too"):
        run(two, schedule, False, block(1), block(2), block(3))


@pytest.mark.parametrize("change", [clamp, clamp_data, replace_data, load])
@pytest.mark.parametrize("schedule", ["pipedream(stages=2)", "pipedream-2bw(stages=2, micro_batches=2)"])
def test_what_is_set_while_mini_batches_are_in_flight_is_refused(
    schedule: str, change: Callable[[nn.Module], None]
) -> None:
    with pytest.raises(ConfigError, match=r"was changed between steps while mini-batches are in flight"):
        run(clamped, schedule, change, block(0))
