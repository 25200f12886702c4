"""Losses scaled for float16, against one process with ``torch.amp.GradScaler``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import (
    ConfigError,
    Pipeline,
    WorkerError,
    add_loss,
    launch,
    load_checkpoint,
    save_checkpoint,
    schemes,
)
from counterflow.runtime.execution.step import Step
from counterflow.schedule.ir import Schedule

from ...kit import momentum

WIDTH, SAMPLES = 6, 8
LOW = torch.float16
HIGH = 2.0**21
"""A scale with which gradients of the model overflow."""

Curve = list[tuple[float, bool, float]]
"""Loss, whether the update was skipped, and the scale, step by step."""


def layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(1)
    every = [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    ]
    return [layer.to(dtype) for layer in every]


def batch(number: int, *, spike: int = 4) -> tuple[Tensor, Tensor]:
    """A mini-batch; one of them has an input that is infinite in float16."""
    draw = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(SAMPLES, WIDTH, generator=draw) for _ in range(2))
    if number == spike:
        inputs[-1] *= 1e6
    return inputs, targets


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.to(output.dtype).float())


def curve(steps: Sequence[Step]) -> Curve:
    return [(step.loss, step.skipped, step.loss_scale or 0.0) for step in steps]


def alone(
    counts: int, steps: int, options: dict[str, Any], *, together: int = 1
) -> tuple[Curve, dict[str, Any]]:
    """One process: micro-batch after micro-batch, the way that torch documents."""
    model = nn.Sequential(*layers())
    optimizer = momentum(model.parameters())
    interval = options.get("loss_scale_interval", 2000)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=options.get("loss_scale", 2.0**16), growth_interval=interval
    )
    found: Curve = []
    for number in range(steps):
        total = 0.0
        for value, target in zip(*(half.chunk(counts) for half in batch(number)), strict=True):
            share = _loss_of(model, value, target, options) / counts
            scaler.scale(share).backward()
            total += share.item()
        before = scaler.get_scale()
        if (number + 1) % together == 0:
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= together
            nn.utils.clip_grad_norm_(model.parameters(), options.get("clip_norm", math.inf))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((total, scaler.get_scale() < before, before))
    return found, model.state_dict()


def _loss_of(model: nn.Module, value: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    if "autocast" in options:
        with torch.autocast("cpu", LOW):
            return loss(model(value), target)
    cast = {name: weight.to(LOW) for name, weight in model.named_parameters()}
    output: Tensor = torch.func.functional_call(model, cast, (value.to(LOW),))
    return loss(output.float(), target)


def trained(
    schedule: Schedule, numbers: range, options: dict[str, Any], *, together: int = 1, state: Any = None
) -> tuple[list[Step], dict[str, Any]]:
    with Pipeline(layers(), loss, schedule, optimizer=momentum, digest_every=1, **options) as pipeline:
        if state is not None:
            pipeline.load_state_dict(state)
        given = [[half.chunk(pipeline.replicas)[pipeline.replica] for half in batch(n)] for n in numbers]
        steps = []
        for number, its in zip(numbers, given, strict=True):
            steps.append(pipeline.step(*its, update=(number + 1) % together == 0))
        steps += pipeline.flush()
        return [step for step in steps if step.reports_step is not None], pipeline.state_dict()


def run(workers: int, *arguments: Any, **named: Any) -> list[Any]:
    return launch(trained, *arguments, **named, workers=workers, transport="strict-local")


def same(mine: Curve, true: Curve) -> None:
    assert [row[1:] for row in mine] == [row[1:] for row in true]
    torch.testing.assert_close(
        [row[0] for row in mine], [row[0] for row in true], rtol=1e-6, atol=0.0, equal_nan=True
    )


AUTO: dict[str, Any] = {"autocast": LOW, "loss_scale": HIGH, "loss_scale_interval": 2}
CAST: dict[str, Any] = {"compute_dtype": "float16", "loss_scale": HIGH, "loss_scale_interval": 2}
CASES: list[tuple[Schedule, int, dict[str, Any]]] = [
    (schemes.dapple(2, 4), 2, AUTO),
    (schemes.dapple(2, 4), 2, {"compute_dtype": LOW}),
    (schemes.dapple(2, 4), 2, {**CAST, "recompute": "stage", "barrier": False}),
    (schemes.dapple(2, 2), 4, {**AUTO, "zero_stage": 1, "clip_norm": 0.1}),
    (schemes.gpipe(4, 4), 4, {**AUTO, "clip_norm": 0.1, "barrier": False, "recompute": "layer"}),
    (schemes.chimera(2, 4), 2, CAST),
    (schemes.chimera(4, 4), 4, {**AUTO, "zero_stage": 1}),
    (schemes.zb_v(2, 4), 2, {**AUTO, "barrier": False}),
    (schemes.zb_h1(2, 4), 2, {**CAST, "recompute": "layer"}),
    (schemes.hanayo(2, 4, waves=1), 2, {**AUTO, "compress": True}),
]


@pytest.mark.parametrize(("schedule", "workers", "options"), CASES, ids=str)
def test_it_is_the_grad_scaler_of_one_process(
    schedule: Schedule, workers: int, options: dict[str, Any]
) -> None:
    true, weights = alone(4, 9, options)
    skipped = [row[1] for row in true]
    assert skipped[4], "the spike"
    assert skipped[0] == ("loss_scale" in options), "the large scale"
    for steps, state in run(workers, schedule, range(9), options):
        same(curve(steps), true)
        assert [math.isnan(step.grad_norm) for step in steps] == skipped
        for name, weight in weights.items():
            torch.testing.assert_close(state["model"][name], weight, rtol=1e-5, atol=1e-6)


def test_it_is_bitwise_where_it_computes_equally() -> None:
    true, weights = alone(4, 9, AUTO)
    for steps, state in run(2, schemes.dapple(2, 4), range(9), AUTO):
        assert str(curve(steps)) == str(true)  # NaN is not NaN
        assert all(torch.equal(state["model"][name], weight) for name, weight in weights.items())


def test_steps_of_one_update_have_one_scale() -> None:
    true, weights = alone(4, 12, AUTO, together=3)
    for steps, state in run(2, schemes.dapple(2, 4), range(12), AUTO, together=3):
        assert [step.skipped for step in steps][2::3] == [row[1] for row in true][2::3]
        assert [step.loss_scale for step in steps] == [row[2] for row in true]
        for name, weight in weights.items():
            torch.testing.assert_close(state["model"][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("barrier", [True, False])
def test_a_run_goes_on_from_its_state(barrier: bool) -> None:
    options = {**AUTO, "barrier": barrier}
    whole = run(2, schemes.dapple(2, 4), range(9), options)[0]
    for cut in (1, 5, 7):
        first = run(2, schemes.dapple(2, 4), range(cut), options)[0]
        scale, made = first[1]["loss_scale"]["0"].values()
        assert (scale, made) == (whole[0][cut].loss_scale, made)
        rest = run(2, schemes.dapple(2, 4), range(cut, 9), options, state=first[1])[0]
        assert str(curve(first[0] + rest[0])) == str(curve(whole[0]))
        assert rest[1]["loss_scale"] == whole[1]["loss_scale"]
        assert all(torch.equal(rest[1]["model"][name], w) for name, w in whole[1]["model"].items())


def _checkpointed(folder: Path, schedule: Schedule, numbers: range) -> list[Step]:
    with Pipeline(layers(), loss, schedule, optimizer=momentum, **AUTO) as pipeline:
        if numbers[0]:
            assert load_checkpoint(pipeline, folder) == numbers[0]
        assert pipeline.loss_scale is not None
        steps = [pipeline.step(*batch(number)) for number in numbers]
        save_checkpoint(pipeline, folder)
        return steps


def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    true, _ = alone(4, 9, AUTO)
    found: list[Step] = []
    for schedule, numbers in ((schemes.dapple(2, 4), range(3)), (schemes.zb_v(2, 4), range(3, 9))):
        found += launch(_checkpointed, tmp_path, schedule, numbers, workers=2, transport="local")[0]
    same(curve(found), true)


class Small(nn.Linear):
    """Wants a small output."""

    def forward(self, value: Tensor) -> Tensor:
        output = super().forward(value)
        add_loss(output.square().mean(), "small")
        return output


def _double(scale: float | None) -> Any:
    modules = layers(torch.float64)
    modules[0] = Small(WIDTH, WIDTH, dtype=torch.float64)
    with Pipeline(
        modules,
        nn.functional.mse_loss,
        schemes.zb_v(2, 4),
        optimizer=momentum,
        loss_scale=scale,
        clip_norm=0.1,
    ) as pipeline:
        steps = [pipeline.step(*(half.double() for half in batch(number))) for number in range(3)]
        return [(step.loss, step.metrics, step.grad_norm) for step in steps], pipeline.model_state_dict()


def test_scaling_rounds_nothing() -> None:
    (plain, weights), _ = launch(_double, None, workers=2, transport="local")
    for scale in (2.0**-60, 2.0**16, 2.0**100):
        (scaled, other), _ = launch(_double, scale, workers=2, transport="local")
        assert scaled == plain
        assert all(torch.equal(other[name], weight) for name, weight in weights.items())


def _clamped(scale: float | None) -> tuple[float, dict[str, Any]]:
    modules = layers(torch.float64)
    weight = modules[0].get_parameter("weight")
    weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with Pipeline(
        modules, nn.functional.mse_loss, schemes.dapple(2, 4), optimizer=momentum, loss_scale=scale
    ) as pipeline:
        norm = pipeline.step(*(half.double() for half in batch(0))).grad_norm
        return norm, pipeline.model_state_dict()


def test_hooks_see_gradients_without_the_scale() -> None:
    (norm, weights), (scaled, other) = (
        launch(_clamped, scale, workers=2, transport="local")[0] for scale in (None, 2.0**16)
    )
    assert scaled == norm
    assert all(torch.equal(other[name], weight) for name, weight in weights.items())


def _never(schedule: Schedule, options: dict[str, Any]) -> None:
    with Pipeline(layers(), loss, schedule, optimizer=momentum, **options) as pipeline:
        for _ in range(9):
            pipeline.step(*batch(4))


def test_what_is_never_finite_ends_the_run() -> None:
    options = {"autocast": LOW, "loss_scale": 2.0**-124}
    with pytest.raises(WorkerError, match=r"step 2: the loss or a gradient is not finite, though losses are"):
        launch(_never, schemes.dapple(2, 4), options, workers=2, transport="local")


def test_asynchronous_schemes_cannot_skip() -> None:
    for options, what in (
        ({"autocast": LOW}, "the loss scale of float16"),
        ({"loss_scale": 1.0}, "loss_scale"),
    ):
        with pytest.raises(
            ConfigError, match=f"so that {what} cannot skip an update everywhere; take a sync"
        ):
            launch(_never, schemes.pipedream(2), options, workers=2, transport="local")


def _loaded(state: dict[str, Any]) -> float | None:
    with Pipeline(layers(), loss, schemes.dapple(2, 4), optimizer=momentum, **AUTO) as pipeline:
        pipeline.load_state_dict(pipeline.state_dict() | {"loss_scale": state})
        return pipeline.loss_scale


def test_a_state_has_a_scale_that_can_be() -> None:
    assert launch(_loaded, {}, workers=2, transport="local") == [HIGH] * 2
    state = {"0": {"scale": 8.0, "growth_tracker": 1}}
    assert launch(_loaded, state, workers=2, transport="local") == [8.0] * 2
    wrong: tuple[tuple[Any, Any], ...] = ((3.0, 0), (math.nan, 0), (None, 0), (1.0, -1), (0.0, 0), (1.0, 0.5))
    for scale, made in wrong:
        state = {"0": {"scale": scale, "growth_tracker": made}}
        with pytest.raises(ConfigError, match="the training state has a loss scale of"):
            launch(_loaded, state, workers=2, transport="local")
