"""Mini-batches whose loss or gradients are not finite update nothing, where that is asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

SCHEMES = [schemes.dapple(2, 4), schemes.chimera(2, 4), schemes.hanayo(2, 2, waves=1)]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sqrt().mean()  # its gradient is infinite at 0, the loss is not finite below


def batch(kind: str) -> tuple[Tensor, Tensor]:
    x = torch.ones(8, 4)
    y = {"good": torch.ones(8, 4), "gradient": torch.zeros(8, 4), "loss": -torch.ones(8, 4)}[kind]
    return x, y


def positive(modules: list[nn.Module]) -> list[nn.Module]:
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.abs_()
    return modules


def _train(modules: list[nn.Module], schedule: Schedule, kinds: list[str], waiting: bool) -> Any:
    pipeline = Pipeline(
        modules, loss, schedule, optimizer=adam, scheduler=halving, skip_non_finite=True, clip_norm=1.0
    )
    steps = [pipeline.step(*batch(k), update=not waiting or i % 2 == 1) for i, k in enumerate(kinds)]
    rates = [o.param_groups[0]["lr"] for o in pipeline.optimizers.values()]
    return steps, pipeline.model_state_dict(), rates


@pytest.mark.parametrize("bad", ["gradient", "loss"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_what_is_skipped_might_not_have_been(schedule: Schedule, bad: str) -> None:
    job: dict[str, Any] = {"workers": 2, "transport": "strict-local", "timeout_seconds": 60}
    with_bad = launch(_train, positive(layers()), schedule, ["good", bad, "good", bad], False, **job)
    without = launch(_train, positive(layers()), schedule, ["good", "good"], False, **job)
    for (steps, state, rates), (_, true, true_rates) in zip(with_bad, without, strict=True):
        assert [step.skipped for step in steps] == [False, True, False, True]
        assert [math.isfinite(step.loss) for step in steps] == [True, bad != "loss"] * 2
        assert not any(math.isfinite(step.grad_norm) for step in steps[1::2])
        assert rates == true_rates
        for name, tensor in true.items():
            assert torch.equal(state[name], tensor)


def test_an_update_for_several_steps_is_skipped_whole() -> None:
    job: dict[str, Any] = {"workers": 2, "transport": "strict-local", "timeout_seconds": 60}
    kinds = ["good", "good", "loss", "good", "good", "good"]
    whole = launch(_train, positive(layers()), SCHEMES[0], kinds, True, **job)
    without = launch(_train, positive(layers()), SCHEMES[0], ["good"] * 4, True, **job)
    for (steps, state, _), (_, true, _) in zip(whole, without, strict=True):
        assert [step.skipped for step in steps] == [False, False, True, True, False, False]
        for name, tensor in true.items():
            assert torch.equal(state[name], tensor)


def test_without_a_flush_nothing_can_be_skipped() -> None:
    with pytest.raises(ConfigError, match=r"pipedream updates each stage .* take a synchronous scheme"):
        launch(_train, layers(), schemes.pipedream(2), ["good"], False, workers=2, transport="local")
