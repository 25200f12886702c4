"""Gradients of weights in bfloat16 are added up in float32, over micro-batches, copies and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.measure.layer_costs import ties_of
from counterflow.planning import LayerTie
from counterflow.runtime.parameters import flat_gradients
from counterflow.runtime.parameters.gradients import GradientGroup
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

LOW = torch.bfloat16
WIDTH, SAMPLES = 16, 192


def layers(dtype: torch.dtype, count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).to(dtype) for _ in range(count)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(
        SAMPLES, WIDTH, generator=generator
    ) + 1


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


def low_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target.to(output.dtype))


class Sees(torch.optim.SGD):
    """Changes nothing, and refuses gradients of another dtype than the weights'."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert all(p.grad is None or p.grad.dtype is p.dtype for p in group["params"])
        return super().step(closure)


def alone(count: int) -> dict[str, Tensor]:
    model = nn.Sequential(*layers(torch.float32, count))
    x, y = batch()
    loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to it."""
    assert all(gradient.dtype is LOW for gradient in found.values())
    return max(float((found[n].float() - true[n]).norm() / true[n].norm()) for n in found)


def piped(schedule: Schedule, loss: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    with Pipeline(layers(LOW, schedule.stages), loss, schedule, optimizer=Sees, **options) as pipeline:
        pipeline.keeps_gradients = True
        x, y = batch()
        rows = slice(pipeline.replica * SAMPLES // pipeline.replicas, None)
        x, y = (t[rows][: SAMPLES // pipeline.replicas] for t in (x, y))
        pipeline.step(x.to(LOW), y)
        pipeline.flush()
        return pipeline.gradients


@pytest.mark.parametrize("of", [loss, low_loss])
def test_the_error_does_not_grow_with_the_micro_batches(of: Any) -> None:
    true = alone(2)
    schedules = [schemes.gpipe(1, 2 * n) for n in (2, 24, 96)]
    few, more, most = (
        launch(lambda s=schedule: worst(piped_of(s, of), true), workers=1, transport="local")[0]
        for schedule in schedules
    )
    assert few < 0.006
    assert more < 1.1 * few
    assert most < 1.1 * few


def piped_of(schedule: Schedule, of: Any) -> dict[str, Tensor]:
    """In one stage of two layers."""
    with Pipeline(layers(LOW), of, schedule, optimizer=Sees) as pipeline:
        pipeline.keeps_gradients = True
        x, y = batch()
        pipeline.step(x.to(LOW), y)
        return pipeline.gradients


@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (schemes.dapple(2, 48), 1, {}),
        (schemes.dapple(2, 48), 2, {"barrier": False}),
        (schemes.dapple(2, 48), 2, {"zero_stage": 1}),
        (schemes.chimera(2, 48), 1, {"clip_norm": 1e9}),
        (schemes.zb_h1(2, 48), 1, {}),
        (schemes.pipedream_2bw(2, 48), 1, {}),
        (schemes.pipedream(2), 1, {}),
    ],
    ids=str,
)
def test_it_holds_in_every_kind_of_run(schedule: Schedule, replicas: int, options: dict[str, Any]) -> None:
    true = alone(schedule.stages)
    rows = launch(piped, schedule, loss, options, workers=2 * replicas, transport="local", timeout_seconds=60)
    for found in rows:
        assert found
        assert worst(found, true) < 0.006


def test_three_hundred_equal_gradients_add_up() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=LOW))
    group = GradientGroup({"weight": weight}, None, counted=True, stage=0)
    group.attach()
    for _ in range(300):
        weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [300.0] * 4
    group.scale(1 / 300)
    group.show()
    assert weight.grad.dtype is LOW
    assert weight.grad.tolist() == [1.0] * 4
    group.clear()
    group.detach()
    weight.grad = torch.ones(4, dtype=LOW)  # as ever, between steps


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 37])
def test_a_cast_in_place_is_a_cast(monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(flat_gradients, "_FIRST", 4)
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size))
    expected, memory = numbers.to(dtype), numbers.untyped_storage().data_ptr()
    found = flat_gradients._cast_in_place(numbers, dtype)
    assert torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() == memory


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def halved_in_place(gradient: Tensor) -> None:
    gradient /= 2


def only_looks(gradient: Tensor) -> None:
    assert gradient.dtype is LOW


@pytest.mark.parametrize(("hook", "factor"), [(doubled, 2.0), (halved_in_place, 0.5), (only_looks, 1.0)])
def test_hooks_of_weights_see_their_dtype(hook: Any, factor: float) -> None:
    made = layers(LOW)
    next(iter(made[0].parameters())).register_hook(hook)

    def work() -> dict[str, Tensor]:
        with Pipeline(made, loss, schemes.dapple(2, 4), optimizer=Sees) as pipeline:
            pipeline.keeps_gradients = True
            x, y = batch()
            pipeline.step(x.to(LOW), y)
            return pipeline.gradients

    found, true = launch(work, workers=2, transport="local")[0], alone(2)
    torch.testing.assert_close(found["0.weight"].float(), true["0.weight"] * factor, rtol=0.03, atol=1e-3)
    torch.testing.assert_close(found["0.bias"].float(), true["0.bias"], rtol=0.03, atol=1e-3)


def test_what_a_worker_holds_is_what_is_planned() -> None:
    """Two bytes a weight, four of its gradient, and two of its momentum."""

    def work() -> tuple[int, int]:
        options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
        with Pipeline(layers(LOW), loss, schemes.dapple(2, 4), **options) as pipeline:
            x, y = batch()
            pipeline.step(x.to(LOW), y)
            numbers = sum(p.numel() for copy in pipeline.stages.values() for p in copy.parameters())
            return pipeline.weights.held_bytes(), numbers

    for held, numbers in launch(work, workers=2, transport="local"):
        assert held == numbers * (2 + 4 + 2)


def test_a_profile_says_which_weights_are_in_low_precision() -> None:
    first, second = (nn.Linear(4, 4, bias=False).to(dtype) for dtype in (LOW, torch.float32))
    tied = nn.Linear(4, 4, bias=False).to(LOW)
    tied.weight = first.weight
    assert ties_of([first, second, tied]) == (LayerTie((0, 2), 32.0, trained=True, low_precision=True),)
