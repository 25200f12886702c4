"""Autocast and cast weights against one process, and how often weights are cast."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from counterflow import ConfigError, Pipeline, launch, schemes
from counterflow.runtime.stages.precision import Autocast
from counterflow.schedule.ir import Schedule


def run(work: Callable[[], Any], workers: int) -> list[Any]:
    return launch(work, workers=workers, transport="local")


WIDTH = 6
STEPS = 3
LOW = torch.bfloat16


class Checkpointed(nn.Linear):
    """Computes itself again in its backward."""

    def forward(self, value: Tensor) -> Tensor:
        return checkpoint(super().forward, value, use_reentrant=False)  # type: ignore[no-any-return]


def _layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        Checkpointed(WIDTH, WIDTH),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    ]


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(samples, WIDTH, generator=draw), torch.randn(samples, WIDTH, generator=draw)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def _trained(schedule: Schedule, samples: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    with Pipeline(
        nn.Sequential(*_layers()), _loss, schedule, optimizer=_adam, digest_every=1, **options
    ) as pipeline:
        losses = [pipeline.step(*_batch(samples)).loss for _ in range(STEPS)]
        losses += [step.loss for step in pipeline.flush()]
        return losses, pipeline.state_dict()


def _with_autocast(model: nn.Module, value: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", LOW):
        return _loss(model(value), target)


def _alone(
    counts: int, samples: int, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], dtype: torch.dtype | None
) -> tuple[list[float], dict[str, Tensor]]:
    """One process: micro-batch after micro-batch, with masters if the model's weights have a dtype."""
    masters = nn.Sequential(*_layers())
    optimizer = _adam(masters.parameters())
    losses = []
    for _ in range(STEPS):
        model = masters if dtype is None else copy.deepcopy(masters).to(dtype)
        total = 0.0
        inputs, targets = _batch(samples)
        for value, target in zip(inputs.chunk(counts), targets.chunk(counts), strict=True):
            share = loss(model, value, target) / counts
            total += share.item()
            share.backward()
            if model is not masters:
                for mine, its in zip(masters.parameters(), model.parameters(), strict=True):
                    assert its.grad is not None
                    mine.grad = its.grad.float() + (0.0 if mine.grad is None else mine.grad)
                    its.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, masters.state_dict()


def _with_cast(model: nn.Module, value: Tensor, target: Tensor) -> Tensor:
    return _loss(model(value.to(LOW)), target)


CASES = [
    (schemes.dapple(2, 4), {}),
    (schemes.dapple(2, 4), {"recompute": "stage"}),
    (schemes.dapple(2, 4), {"recompute": "layer", "barrier": False}),
    (schemes.chimera(2, 4), {}),
    (schemes.zb_v(2, 4), {}),
]


@pytest.mark.table
@pytest.mark.parametrize(("schedule", "options"), CASES, ids=str)
@pytest.mark.parametrize("how", ["autocast", "compute_dtype"])
def test_it_is_exact_against_one_process(schedule: Schedule, options: dict[str, Any], how: str) -> None:
    one, dtype = (_with_autocast, None) if how == "autocast" else (_with_cast, LOW)
    losses, weights = _alone(4, 8, one, dtype)
    given = {how: LOW, **options}
    found, state = run(lambda: _trained(schedule, 8, given), workers=schedule.workers)[0]
    assert [loss for loss in found if not math.isnan(loss)] == pytest.approx(losses, rel=1e-6)
    for name, mine in weights.items():
        assert state["model"][name].dtype == torch.float32
        assert torch.allclose(state["model"][name], mine, rtol=0.0, atol=1e-6), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", [schemes.dapple(2, 2), schemes.zb_h1(2, 2)], ids=str)
def test_norms_with_running_statistics_compute_in_their_precision(
    schedule: Schedule, dtype: torch.dtype
) -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(3)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, WIDTH)]

    def trained() -> tuple[list[float], dict[str, Any]]:
        with Pipeline(layers(), _loss, schedule, optimizer=_adam, compute_dtype=dtype) as pipeline:
            return [pipeline.step(*_batch(8)).loss for _ in range(STEPS)], pipeline.model_state_dict()

    model = nn.Sequential(*layers())
    optimizer, losses = _adam(model.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for value, target in zip(*(tensor.chunk(2) for tensor in _batch(8)), strict=True):
            weights = {
                name: weight if name.startswith("0.1.") else weight.to(dtype)
                for name, weight in model.named_parameters()
            }
            loss = _loss(torch.func.functional_call(model, weights, (value.to(dtype),)), target) / 2
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    actual, state = run(trained, workers=2)[0]
    assert actual == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0.0, atol=1e-6)


class _Casts(TorchDispatchMode):
    """Counts casts of a shape that only weights have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        weight = args and isinstance(args[0], Tensor) and args[0].shape == (WIDTH, WIDTH)
        if func is torch.ops.aten._to_copy.default and weight and kwargs.get("dtype") is LOW:
            self.count += 1
        return func(*args, **kwargs)


def _counted(schedule: Schedule, options: dict[str, Any]) -> int:
    counted = Pipeline(nn.Sequential(*_layers()), _loss, schedule, optimizer=_adam, **options)
    for _ in range(2):
        counted.step(*_batch(12))
    with _Casts() as casts:
        for _ in range(STEPS):
            counted.step(*_batch(12))
    counted.flush()
    return int(casts.count)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("how", ["autocast", "compute_dtype"])
def test_a_weight_is_cast_once_a_version(how: str, recompute: str) -> None:
    options = {how: LOW, "recompute": recompute}
    found = run(lambda: _counted(schemes.dapple(1, 6), options), workers=1)[0]
    assert found == 4 * STEPS


class _Own(nn.Module):
    """A layer that sees to its precision itself, each time it runs."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer = layer
        self.how = how

    def forward(self, value: Tensor) -> Tensor:
        if self.how == "autocast":
            with torch.autocast("cpu", LOW):
                return self.layer(value)  # type: ignore[no-any-return]
        cast = {name: parameter.to(LOW) for name, parameter in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, cast, value.to(LOW))  # type: ignore[no-any-return]


def _versions(schedule: Schedule, how: str, options: dict[str, Any], *, own: bool) -> list[float]:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*(_Own(layer, how) for layer in layers)) if own else nn.Sequential(*layers)
    given = options if own else {how: LOW, **options}
    with Pipeline(model, _loss, schedule, optimizer=_adam, **given) as pipeline:
        steps = [pipeline.step(*_batch(8)) for _ in range(8)] + pipeline.flush()
        weights = pipeline.model_state_dict().values()
        return [step.loss for step in steps if not math.isnan(step.loss)] + [w.sum().item() for w in weights]


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("how", ["autocast", "compute_dtype"])
def test_each_version_is_cast(how: str, recompute: str) -> None:
    for schedule in (schemes.pipedream(2), schemes.pipedream_2bw(2, 2)):
        found, expected = (
            run(partial(_versions, schedule, how, {"recompute": recompute}, own=own), schedule.workers)[0]
            for own in (False, True)
        )
        assert len(found) > 8
        assert found == expected


class _Shrinking(nn.Linear):
    """Changes its weight in place whenever it runs."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(value)


def _shrunk(*, own: bool) -> float:
    layer = _Shrinking(WIDTH, WIDTH)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    layers = [_Own(layer, "autocast") if own else layer]
    pipeline = Pipeline(layers, _loss, schemes.gpipe(1, 2), optimizer=_adam, autocast=None if own else LOW)
    return pipeline.step(*_batch(4)).loss


def test_a_weight_that_a_layer_changes_is_cast_again() -> None:
    found, expected = (run(partial(_shrunk, own=own), workers=1)[0] for own in (False, True))
    assert found == expected


def test_casts_outlive_layers_that_autograds_threads_run_again() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    value = torch.ones(2, WIDTH)
    precision = Autocast(torch.device("cpu"), LOW, list(layer.parameters()), keeps=True)

    def compute() -> None:
        with precision.computing():
            layer(value)

    with precision.step(), _Casts() as casts:
        compute()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        compute()
    assert casts.count == 1
    assert not torch.is_autocast_enabled("cpu")


class _Adds(torch.autograd.Function):
    """Adds the gradient to the weight's itself, as fused layers of large models do."""

    @staticmethod
    def forward(context: Any, value: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        value, weight = context.saved_tensors
        weight.grad = value.mT @ gradients[0]
        return gradients[0] @ weight.mT, None


class _AddsItself(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        return _Adds.apply(value, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nn.Linear(WIDTH, WIDTH), {"autocast": LOW}, "autocast does not go with it"),
        (nn.Linear(WIDTH, WIDTH), {"compile": True}, "compile does not go with"),
        (nn.LSTM(WIDTH, WIDTH), {}, "LSTM keeps its own list"),
        (_AddsItself(WIDTH, WIDTH), {}, "gives no gradient for a parameter"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    layer: nn.Module, options: dict[str, Any], message: str
) -> None:
    def work() -> None:
        given = {"compute_dtype": LOW, **options}
        Pipeline([layer], _loss, schemes.gpipe(1, 1), optimizer=_adam, **given).step(*_batch(2))

    with pytest.raises(ConfigError, match=message):
        run(work, workers=1)
