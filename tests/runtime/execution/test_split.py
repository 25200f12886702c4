"""Split backwards in a pipeline: models whose weights hang from their graphs in all ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import TrainingResult, one_process, verify

from ...kit import momentum

WIDTH = 6
MICRO_BATCHES = 4
SCHEDULES = {"zb-v": schemes.zb_v(2, MICRO_BATCHES), "zb-h1": schemes.zb_h1(3, MICRO_BATCHES)}


class Twice(nn.Module):
    """A layer whose norm is used twice, and whose weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x)).tanh()
        found: Tensor = self.norm(self.second(x) + self.second(x.sin()))
        return found


class Adapted(nn.Module):
    """A frozen layer with a trained product of two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x).tanh() + self.up(self.down(x))
        return found


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> list[nn.Module]:
    return [nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(8)]


def transformer() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True) for _ in range(4)]


def dropping() -> list[nn.Module]:
    return [nn.Sequential(linear(), nn.Dropout(0.3), nn.ReLU(inplace=True)) for _ in range(6)]


def normed() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(3)) for _ in range(5)]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "used twice": lambda: [Twice() for _ in range(4)],
    "lora": lambda: [linear().requires_grad_(False), *(Adapted() for _ in range(4))],
    "dropout": dropping,
    "batch norm": normed,
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).flatten(1).mean(dim=1).mean()


def batches(steps: int = 2) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    shape = (2 * MICRO_BATCHES + 1, 3, WIDTH)
    made = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(steps)
    )
    return [[(inputs, targets)] for inputs, targets in made]


@cache
def reference(name: str) -> tuple[list[nn.Module], TrainingResult]:
    torch.manual_seed(0)
    layers = [layer.double() for layer in MODELS[name]()]
    return layers, one_process(layers, loss, (1,) * MICRO_BATCHES, batches(), optimizer=momentum)


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("scheme", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_one_process(name: str, scheme: str, recompute: Any) -> None:
    layers, alone = reference(name)
    found = verify(
        SCHEDULES[scheme],
        layers,
        loss,
        batches(),
        optimizer=momentum,
        transport="strict-local",
        recompute=recompute,
        reference=alone,
    )
    assert found.tolerance == 1e-10
    assert found.ok, found


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_single_worker_with_tied_embeddings(recompute: Any) -> None:
    config = GPTConfig(layers=2, hidden=8, heads=2, vocabulary=11, positions=4, dropout=0.1, tied=True)
    torch.manual_seed(0)
    layers = list(nn.ModuleList(config.build()).double())
    rows = [[config.sample(8, generator=torch.Generator().manual_seed(step))] for step in range(2)]
    found = verify(schemes.zb_h1(1, 4), layers, config.loss, rows, optimizer=momentum, recompute=recompute)
    assert found.ok, found


class Counted(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        found: Tensor = self.layer(x)
        return found


def _runs(schedule: Schedule, recompute: Any) -> list[int]:
    layers: list[nn.Module] = [Counted() for _ in range(4)]
    pipeline = Pipeline(layers, loss, schedule, optimizer=momentum, recompute=recompute)
    x = torch.ones(MICRO_BATCHES, 3, WIDTH)
    pipeline.step(x, x)
    modules = [layer.module for copy in pipeline.stages.values() for layer in copy.layers]
    return [module.runs for module in modules if isinstance(module, Counted)]


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("stage", 2), ("layer", 2)])
def test_what_is_computed_again_is_so_once(recompute: Any, runs: int) -> None:
    """And not once more for the weights, or for each of them."""
    found = launch(_runs, schemes.zb_h1(2, MICRO_BATCHES), recompute, workers=2, transport="local")
    assert found == [[runs * MICRO_BATCHES] * 2] * 2


class Cubed(torch.autograd.Function):
    """Makes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight) ** 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = gradient * 3 * (x @ weight) ** 2
        return inner @ weight.T, x.flatten(0, -2).T @ inner.flatten(0, -2)


class OfOnesOwn(nn.Module):
    """A layer by a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Cubed.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found


def _unsplit() -> tuple[int, ...]:
    layers = [linear(), OfOnesOwn(), linear()]
    pipeline = Pipeline(layers, loss, schemes.zb_h1(3, MICRO_BATCHES), optimizer=momentum)
    x = torch.ones(MICRO_BATCHES, 3, WIDTH)
    pipeline.step(x, x)
    pipeline.step(x, x)
    return pipeline.unsplit


def test_what_cannot_be_split_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    found = launch(_unsplit, workers=3, transport="local")
    assert found == [(), (1,), ()]
    assert [record.getMessage()[:44] for record in caplog.records] == [
        "the backward of stage 1 cannot be split: its"
    ]


def test_a_backward_of_several_micro_batches_is_refused() -> None:
    schedule = schemes.zb_h1(1, 2)
    orders = tuple(
        tuple(op._replace(micro_batches=(0, 1)) for op in order if op.micro_batches == (0,))
        for order in schedule.orders
    )
    with pytest.raises(ConfigError, match="has a backward of several micro-batches"):
        Pipeline([linear()], loss, replace(schedule, orders=orders), optimizer=momentum)
