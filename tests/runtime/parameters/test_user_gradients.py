"""Gradients, optimizers and inputs that users change beside a pipeline's steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import ConfigError, Pipeline, launch, schemes

CHIMERA, DAPPLE = "chimera(stages=2, micro_batches=4)", "dapple(stages=2, micro_batches=4)"
SINGLE = "gpipe(stages=1, micro_batches=4)"


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh()) for _ in range(4)]


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def run(work: Callable[..., Any], *args: Any, workers: int = 2) -> Any:
    return launch(work, *args, workers=workers, transport="local")


def frozen_after_accumulation(zero_stage: int) -> tuple[list[float], list[float]]:
    modules = layers()
    pipeline = Pipeline(modules, nn.MSELoss(), CHIMERA, optimizer=sgd, zero_stage=zero_stage)
    losses = [pipeline.step(*batch(), update=False).loss]
    for module in modules[1:3]:
        module.requires_grad_(requires_grad=False)
    losses += [pipeline.step(*batch()).loss for _ in range(3)]
    pipeline.close()
    return losses, [module[0].weight.norm().item() for module in modules]  # type: ignore[index]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_weights_frozen_after_an_accumulated_step_are_updated_on_all_holders(zero_stage: int) -> None:
    model = nn.Sequential(*layers())
    optimizer, losses = sgd(model.parameters()), []
    x, y = batch()
    for step in range(4):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        (loss / (2 if step < 2 else 1)).backward()
        if step == 0:
            model[1:3].requires_grad_(requires_grad=False)
        else:
            optimizer.step()
            optimizer.zero_grad()
    norms = [module[0].weight.norm().item() for module in model]  # type: ignore[index]
    for told, found in run(frozen_after_accumulation, zero_stage):
        assert told == pytest.approx(losses, rel=1e-12)
        assert found == pytest.approx(norms, rel=1e-12)


def with_penalty(schedule: str, when: str) -> None:
    modules = layers()
    if when == "before the pipeline":
        nn.Sequential(*modules)(batch()[0]).square().mean().backward()
    pipeline = Pipeline(modules, nn.MSELoss(), schedule, optimizer=sgd)
    if when == "between":
        pipeline.step(*batch(), update=False)
    if when in ("between", "before a step"):
        weights = [module[0].weight for module in modules]  # type: ignore[index]
        sum(weight.square().sum() for weight in weights if not weight.is_meta).backward()
    if when == "without numbers":
        modules[0][0].weight.grad = torch.zeros(6, 6, dtype=torch.float64)  # type: ignore[index]
    pipeline.step(*batch())
    pipeline.close()


@pytest.mark.parametrize("schedule", [SINGLE, DAPPLE, CHIMERA])
@pytest.mark.parametrize("when", ["before a step", "between"])
def test_gradients_of_a_users_backward_are_refused(schedule: str, when: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.weight has a gradient .*cf\.add_loss"):
        run(with_penalty, schedule, when, workers=1 if schedule == SINGLE else 2)


@pytest.mark.parametrize("when", ["before the pipeline", "without numbers"])
def test_gradients_that_steps_begin_without_pass(when: str) -> None:
    run(with_penalty, SINGLE, when, workers=1)


def train(make: Callable[[Any], torch.optim.Optimizer], schedule: str, change: Any = None) -> list[float]:
    pipeline = Pipeline(layers(), nn.MSELoss(), schedule, optimizer=make)
    for optimizer in pipeline.optimizers.values() if change is not None else ():
        change(optimizer)
    losses = [pipeline.step(*batch()).loss for _ in range(2)]
    pipeline.close()
    return losses


@pytest.mark.parametrize(
    "make",
    [lambda p: sgd(p[2:]), lambda p: sgd(p[:-2]), lambda p: sgd(p[1:]), lambda p: sgd(p[1:-1])],
    ids=["not the first layer", "not the last", "not the first weight", "neither end"],
)
@pytest.mark.parametrize("schedule", [DAPPLE, CHIMERA])
def test_functions_that_leave_weights_out_by_place_are_refused(make: Any, schedule: str) -> None:
    with pytest.raises(ConfigError, match="otherwise when it has others beside it"):
        run(train, make, schedule)
    run(train, make, SINGLE, workers=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: sgd([weight for name, weight in p.named if name.endswith("weight")]),
        lambda p: sgd([weight for weight in p if weight.ndim > 1]),
    ],
    ids=["by name", "by shape"],
)
def test_functions_that_leave_weights_out_by_what_they_are_pass(make: Any) -> None:
    alone = run(train, make, SINGLE, workers=1)[0]
    assert run(train, make, DAPPLE)[0] == pytest.approx(alone, rel=1e-12)


def clipped(optimizer: torch.optim.Optimizer) -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)


def noted(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def test_hooks_before_a_step_are_refused_once_the_pipeline_is_made() -> None:
    with pytest.raises(ConfigError, match="hook before its step that was registered after"):
        run(train, sgd, DAPPLE, clipped)
    run(train, sgd, DAPPLE, noted)
    run(train, sgd, SINGLE, clipped, workers=1)


def with_graph(side: str) -> None:
    x, y = batch()
    trained = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    pipeline = Pipeline(layers(), nn.MSELoss(), CHIMERA, optimizer=sgd)
    pipeline.evaluate(x + trained, y)
    pipeline.step(*((x + trained, y) if side == "inputs" else (x, y + trained)))


@pytest.mark.parametrize("side", ["inputs", "targets"])
def test_inputs_and_targets_that_require_gradients_are_refused(side: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor of the {side} requires a gradient"):
        run(with_graph, side)


class _Scaled(nn.Module):
    """A model that may be given a parameter which it does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scales: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


def test_parameters_that_a_forward_begins_to_use_are_refused() -> None:
    def work() -> None:
        model, x = _Scaled(), torch.ones(4, 4)
        schedule, sgd = schemes.gpipe(1, 2), partial(torch.optim.SGD, lr=0.1)
        pipeline = Pipeline(model, nn.MSELoss(), schedule, optimizer=sgd, example=x)
        pipeline.step(x, x)
        model.scales.append(nn.Parameter(torch.ones(4)))
        pipeline.step(x, x)

    with pytest.raises(
        ConfigError, match=r"layer .* now computes with a parameter that is none of the model"
    ):
        launch(work, workers=1, transport="local")
