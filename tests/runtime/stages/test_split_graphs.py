"""Compiled stages whose backwards are two graphs have the numbers of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import counterflow as cf
from counterflow.runtime.stages import split_graphs
from counterflow.schedule.ir import Schedule

D = torch.float64
WIDTH = 6

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code


class Block(nn.Module):
    """A residual block, of a part that a test chooses."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(WIDTH), nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        output: Tensor = x + self.parts(self.norm(x))
        return output


class Twice(nn.Module):
    """A weight that is used twice, once as it is and once scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = linear(), nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Output."""
        output: Tensor = self.inner(torch.tanh(self.inner(x))) @ (self.scale * self.inner.weight)
        return output


class Breaks(nn.Module):
    """A layer that torch compiles in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        """Output."""
        y = self.first(x)
        torch._dynamo.graph_break()
        output: Tensor = self.second(torch.relu(y))
        return output


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


class Hooked(nn.Linear):
    """A layer whose weight gets a hook."""

    def hook(self) -> None:
        """Double the gradient of the weight."""
        self.weight.register_hook(lambda gradient: 2 * gradient)


def partly_frozen() -> nn.Module:
    layer = nn.Sequential(linear(), nn.Tanh(), linear(bias=False))
    layer[0].weight.requires_grad_(False)
    return layer


PARTS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": lambda: [linear(), nn.GELU(), linear(bias=False)],
    "attention": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)],
    "convolution": lambda: [nn.Conv1d(3, 3, 3, padding=1), nn.PReLU()],
    "batch norm": lambda: [nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)],
    "a weight used twice": lambda: [Twice()],
    "hooks of a weight": lambda: [Hooked(WIDTH, WIDTH), nn.Tanh(), linear()],
    "partly frozen": lambda: [partly_frozen()],
    "a graph break": lambda: [Breaks()],
    "a weight that is computed": lambda: [nn.utils.parametrizations.weight_norm(linear())],
    "dropout": lambda: [linear(), nn.Dropout(0.5)],
    "vectors alone": lambda: [nn.LayerNorm(WIDTH)],
}


def trained(layers: list[nn.Module], schedule: Schedule, **options: Any) -> tuple[Any, list[bool | None]]:
    torch._dynamo.reset()  # or what is compiled already runs

    def job() -> tuple[Any, list[bool | None]]:
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(11, 3, WIDTH, dtype=D, generator=generator) for _ in range(2))  # unequal sizes
        optimizer = partial(torch.optim.SGD, lr=0.1)
        local_layers = deepcopy(layers)
        for layer in (module for root in local_layers for module in root.modules()):
            if isinstance(layer, Hooked):
                layer.hook()
        with cf.Pipeline(
            local_layers, functional.mse_loss, schedule, optimizer=optimizer, **options
        ) as pipeline:
            losses = [pipeline.step(x, y).loss for _ in range(3)]
            split = [stage.split_planner.is_split for stage in pipeline.stages.values()]
            return (losses, pipeline.model_state_dict()), split

    results: list[tuple[Any, list[bool | None]]] = cf.launch(job, workers=2, transport="local")
    return results[0][0], [split for _, row in results for split in row]


def layers_of(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(*PARTS[name]()).to(D) for _ in range(4)]


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each weight graph that ran in an op of its own."""
    runs: list[int] = []
    run = split_graphs.PendingWeightGraph.accumulate

    def counted(self: split_graphs.PendingWeightGraph, *, direct: bool) -> None:
        runs.append(len(self.weights))
        run(self, direct=direct)

    monkeypatch.setattr(split_graphs.PendingWeightGraph, "accumulate", counted)
    return runs


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("schedule", [cf.schemes.zb_h1(2, 4), cf.schemes.zb_v(2, 4)], ids=str)
def test_numbers_are_those_of_plain_stages(name: str, schedule: Schedule, deferred: list[int]) -> None:
    plain, _ = trained(layers_of(name), schedule)
    assert not deferred
    compiled, _ = trained(layers_of(name), schedule, compile="aot_eager")
    torch.testing.assert_close(compiled, plain, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert bool(deferred) is (name != "vectors alone")


@pytest.mark.parametrize(
    "options", [{"recompute": "stage"}, {"recompute": "layer"}, {"barrier": False}], ids=str
)
def test_with_other_options(options: dict[str, Any], deferred: list[int]) -> None:
    schedule = cf.schemes.zb_h1(2, 4)
    plain, _ = trained(layers_of("mlp"), schedule, **options)
    compiled, split = trained(layers_of("mlp"), schedule, compile="aot_eager", **options)
    torch.testing.assert_close(compiled, plain, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert all(split)
    assert deferred


def test_a_stage_is_one_graph_of_each_kind(deferred: list[int]) -> None:
    schedule = cf.schemes.zb_h1(2, 4)

    def job() -> list[str]:
        x = torch.randn(8, 3, WIDTH, dtype=D)
        layers = layers_of("mlp")
        with cf.Pipeline(
            layers, functional.mse_loss, schedule, optimizer=torch.optim.SGD, compile="aot_eager"
        ) as p:
            p.step(x, x)
            return [str(row) for stage in p.stages.values() for row in stage.compiled_layers()]

    torch._dynamo.reset()
    assert cf.launch(job, workers=2, transport="local") == [
        ["layers 0 to 1 in 1 graph"],
        ["layers 2 to 3 in 1 graph"],
    ]
    assert deferred == [6] * 4  # the second stage's, of both layers; the first one's whole backward waits


@pytest.mark.parametrize("changes", [False, True])
def test_a_backward_that_changes_something_stays_whole(changes: bool) -> None:
    graph = fx.Graph()
    weight, counter, dy = map(graph.placeholder, ("weight", "counter", "dy"))
    dx, dw = graph.call_function(torch.mul, (dy, weight)), graph.call_function(torch.neg, (dy,))
    if changes:
        graph.call_function(torch.ops.aten.add_.Tensor, (counter, dy))
    graph.output((dx, dw))
    compiled: list[fx.GraphModule] = []

    def note(part: fx.GraphModule) -> Callable[[list[Any]], tuple[Tensor, ...]]:
        compiled.append(part)
        return lambda values: part.forward(*values)

    run = split_graphs.split_backward_graph(fx.GraphModule({}, graph), [True, True], {1}, note)
    assert len(compiled) == (1 if changes else 2)
    values = [torch.full((2,), 3.0), torch.zeros(2), torch.full((2,), 5.0)]
    total = values[1]
    gradients = run(values)
    assert [g.tolist() for g in gradients] == [[15.0, 15.0], [-5.0, -5.0]]
    assert total.tolist() == ([5.0, 5.0] if changes else [0.0, 0.0])
