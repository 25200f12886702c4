"""Buffers that stages share: constant ones are right, and what a forward changes is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch

from ...kit import batch, sgd

F = torch.float64
GPIPE = "gpipe(stages=2, micro_batches=2)"
CHIMERA = "chimera(stages=2, micro_batches=2)"


def linear() -> nn.Linear:
    return nn.Linear(4, 4, dtype=F)


class Writes(nn.Module):
    """Keeps an average of its outputs, in the way that ``how`` names."""

    def __init__(self, mean: Tensor, how: str = "training") -> None:
        super().__init__()
        self.linear, self.how = linear(), how
        self.mean: Tensor
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.how == "data":
            self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        elif self.training == (self.how == "training") and self.how != "never":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Reads(nn.Module):
    """Subtracts an average that another layer keeps."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.linear = linear()
        self.mean: Tensor
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) - self.mean
        return found


class Shifted(nn.Module):
    """Keeps an average of its first layer's outputs through a view of its buffer, and reads it later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = linear(), linear(), linear(), linear()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(1, 4, dtype=F))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.mean[0].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        found: Tensor = self.fourth(self.third(self.second(x).tanh()) - self.mean[0])
        return found


def norm_twice(*, training: bool) -> nn.Sequential:
    norm = nn.BatchNorm1d(4, dtype=F).train(training)
    return nn.Sequential(linear(), norm, nn.Tanh(), linear(), norm, linear())


def written(how: str) -> nn.Sequential:
    mean = torch.zeros(4, dtype=F)
    return nn.Sequential(Writes(mean, how), nn.Tanh(), linear(), Reads(mean))


def rows(how: str, *, apart: bool) -> nn.Sequential:
    table = torch.zeros(2, 4, dtype=F)
    return nn.Sequential(Writes(table[0], how), nn.Tanh(), linear(), Reads(table[int(apart)]))


def losses(make: Callable[[], nn.Module], schedule: str, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = make()
    if not isinstance(model, nn.Sequential):
        options = {**options, "example": batch(0)[0][:4]}
    pipeline = Pipeline(model, nn.MSELoss(), schedule, optimizer=sgd, **options)
    return [loss for number in range(3) for loss in both(pipeline, number)]


def both(pipeline: Pipeline, number: int) -> list[float]:
    return [pipeline.step(*batch(number)).loss, pipeline.evaluate(*batch(9)).loss]


def losses_of_one_process(make: Callable[[], nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model, found = make(), []
    optimizer = sgd(model.parameters())
    for number in range(3):
        modes = [module.training for module in model.modules()]
        optimizer.zero_grad()
        whole = 0.0
        for x, y in zip(*(each.chunk(2) for each in batch(number)), strict=True):
            loss = functional.mse_loss(model(x), y) / 2
            loss.backward()
            whole += loss.item()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            halves = zip(*(each.chunk(2) for each in batch(9)), strict=True)
            found += [whole, sum(functional.mse_loss(model(x), y).item() / 2 for x, y in halves)]
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
    return found


def piped(make: Callable[[], nn.Module], schedule: str = GPIPE, *, workers: int = 2, **options: Any) -> Any:
    return launch(losses, make, schedule, options, workers=workers, transport="local", timeout_seconds=30)[0]


REFUSED: Sequence[tuple[Callable[[], nn.Module], str]] = (
    (lambda: norm_twice(training=True), r"\(BatchNorm1d\) changes its buffer '"),
    (
        lambda: written("training"),
        r"^layer 0 \(Writes\) changes its buffer 'mean' in a forward, and layer 3 \(",
    ),
    (lambda: written("data"), r"^layer 0 \(Writes\) changes its buffer 'mean'"),
    (lambda: written("evaluation"), r"^layer 0 \(Writes\) changes its buffer 'mean'"),
    (lambda: rows("training", apart=False), r"^layer 0 \(Writes\) changes its buffer 'mean'"),
)


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_a_shared_buffer_that_a_forward_changes_is_refused(
    make: Callable[[], nn.Module], words: str, recompute: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        piped(make, recompute=recompute)


@pytest.mark.parametrize(("make", "_"), REFUSED)
def test_it_is_refused_where_stages_have_copies(make: Callable[[], nn.Module], _: str) -> None:
    with pytest.raises(ConfigError, match="changes its buffer"):
        piped(make, CHIMERA)


@pytest.mark.parametrize(
    "make",
    [lambda: norm_twice(training=False), lambda: written("never"), lambda: rows("training", apart=True)],
)
def test_constant_ones_and_rows_of_one_table_are_as_in_one_process(make: Callable[[], nn.Module]) -> None:
    assert piped(make) == pytest.approx(losses_of_one_process(make), rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_in_one_stage_they_are_as_in_one_process(recompute: str) -> None:
    def make() -> nn.Sequential:
        return written("training")

    found = piped(make, "gpipe(stages=1, micro_batches=2)", workers=1, recompute=recompute)
    assert found == pytest.approx(losses_of_one_process(make), rel=1e-12)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_view_of_a_buffer_that_a_recorded_forward_changes_is_refused(stages: int) -> None:
    with pytest.raises(
        ConfigError, match=r"forward changes a buffer or a parameter in place \(.*self\.mean\[0\]"
    ):
        piped(Shifted, f"gpipe(stages={stages}, micro_batches=2)", workers=stages)


def test_a_buffer_in_the_memory_of_another_stages_weight_is_refused() -> None:
    def make() -> nn.Sequential:
        first = linear()
        return nn.Sequential(first, nn.Tanh(), linear(), Reads(first.weight.data[0]))

    with pytest.raises(
        ConfigError, match=r"'mean' of layer 3 \(Reads\) has the memory of the weight 'weight'"
    ):
        piped(make)
