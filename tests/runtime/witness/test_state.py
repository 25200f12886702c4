"""Layers that keep state between forwards are refused where workers would have a state each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.runtime.witness.state import other_calls
from counterflow.schedule.registry import schedule_of


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Iterates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = (1 + 0.1 * number for number in itertools.count())

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.gains)


class Remembers(nn.Module):
    previous: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        previous, self.previous = self.previous, x.detach().mean(0)
        return x if previous is None else x + previous


class Logs(nn.Module):
    """Keeps what no forward reads, an intermediate value, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.cache: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x * 2
        return self.last + self.cache.setdefault(x.shape[1], 0.5)


class Draws(nn.Module):
    """Draws from torch's and NumPy's global generators, and adds to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        cf.add_loss(x.square().mean())
        return nn.functional.dropout(x, 0.5) * (1 + np.random.random())  # noqa: NPY002


class Changes(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), layer, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.layer(self.first(x))))


def losses(make: type[nn.Module], schedule: str, *, recorded: bool) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    layer = make()
    model: Any = Net(layer) if recorded else [nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 4)]
    options: dict[str, Any] = {"example": x} if recorded else {}
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipeline = cf.Pipeline(model, nn.MSELoss(), schedule, optimizer=sgd, **options)
    return [pipeline.step(x, x.flip(1)).loss for _ in range(2)]


def run(make: type[nn.Module], schedule: str, *, recorded: bool = False) -> list[float]:
    work: Callable[[], list[float]] = partial(losses, make, schedule, recorded=recorded)
    return cf.launch(work, workers=2, transport="local")[0]


CHIMERA = "chimera(stages=2, micro_batches=2)"
DOUBLED = "chimera(stages=2, micro_batches=4, concat=forward-doubling)"
GPIPE = "gpipe(stages=2, micro_batches=2)"


@pytest.mark.parametrize("make", [Counts, Iterates, Remembers])
@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (CHIMERA, "each of 2 workers with a copy of the layer has its own"),
        (DOUBLED, "the schedule computes parts of micro-batches, or several at once"),
        ("gpipe(stages=1, micro_batches=2)", "each of 2 replicas has its own"),
    ],
)
def test_a_layer_that_depends_on_earlier_forwards_is_refused(
    make: type[nn.Module], schedule: str, why: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^layer 1 \({make.__name__}\) gives other values .* keeps state .* {why}; pass"
    ):
        run(make, schedule)


def test_so_is_a_module_of_a_recorded_model() -> None:
    with pytest.raises(ConfigError, match="keeps state between forwards"):
        run(Counts, CHIMERA, recorded=True)


@pytest.mark.parametrize("make", [Counts, Iterates, Remembers])
def test_where_each_layer_is_called_as_in_one_process_it_is_not(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        halves = list(zip(x.chunk(2), x.flip(1).chunk(2), strict=True))
        every = [nn.functional.mse_loss(model(inputs), targets) / 2 for inputs, targets in halves]
        expected.append(sum(loss.item() for loss in every))
        optimizer.zero_grad()
        for loss in every:
            loss.backward()
        optimizer.step()
    assert run(make, GPIPE) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [Logs, Draws, Changes])
@pytest.mark.parametrize("schedule", [CHIMERA, DOUBLED])
def test_what_does_not_change_outputs_is_accepted(make: type[nn.Module], schedule: str) -> None:
    assert len(run(make, schedule)) == 2


def test_schedules_that_call_layers_otherwise() -> None:
    assert other_calls(schedule_of("dapple(stages=3, micro_batches=3)", {}), 1) == ""
    assert other_calls(schedule_of("zb-v(workers=2, micro_batches=4)", {}), 1) == ""
    assert other_calls(schedule_of("hanayo(workers=2, micro_batches=2, waves=1)", {}), 1) == ""
    assert "3 replicas" in other_calls(schedule_of("dapple(stages=3, micro_batches=3)", {}), 3)
    assert "2 workers" in other_calls(schedule_of("dualpipe(workers=2, micro_batches=4)", {}), 1)
    assert "2 workers" in other_calls(schedule_of("gems(stages=2, micro_batches=2)", {}), 1)
    assert "parts" in other_calls(schedule_of(DOUBLED, {}), 1)
