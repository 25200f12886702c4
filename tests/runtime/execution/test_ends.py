"""What only the first step can show ends on all workers, within seconds and with the same sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow import LossSum
from counterflow.errors import ConfigError, CounterflowError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

WIDTH = 4
ONE, TWO, FREE = schemes.dapple(2, 4), schemes.chimera(2, 4), schemes.pipedream_2bw(2, 2)
HALVES = schemes.chimera(2, 8, concat="backward-halving")
CHANGED = {f"{number}.{name}" for number in (0, 2, 3) for name in ("weight", "bias")}
"""What only an update may change."""


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class Does(nn.Linear):
    """A layer that does something else besides."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.function(self, super().forward(x))


def plain() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def count(layer: Any, y: Tensor) -> Tensor:
    layer.seen += 1
    return y


def clamp(layer: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)
    return y


FOREIGN = torch.ones(WIDTH, requires_grad=True)


def foreign(_: Any, y: Tensor) -> Tensor:
    return y * FOREIGN


def gradients(_: Any, y: Tensor) -> Tensor:
    with torch.enable_grad():
        at = y.detach().requires_grad_()
        (found,) = torch.autograd.grad((at * y.detach()).exp().sum(), at, create_graph=True)
    return y + found


class Adds(torch.autograd.Function):
    """Adds to a weight's gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.grad = x.t() @ given[0] if weight.grad is None else weight.grad + x.t() @ given[0]
        return given[0] @ weight.t(), None


def other(layer: Any, y: Tensor) -> Tensor:
    found: Tensor = y * layer.calls
    return found


def fails(_: Any, y: Tensor) -> Tensor:
    raise ValueError(f"no {y.shape[1]}")


def odd(_: Any, y: Tensor) -> Tensor:
    return y + torch.sqrt(y.sum() * 0)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def of_some(output: Tensor, target: Tensor) -> Any:
    found = mean(output, target)
    return LossSum(found * len(output), len(output)) if float(target[0, 0].item()) > 0 else found


def with_entropy(output: Tensor, target: Tensor) -> Tensor:
    classes = (target[:, 0] > 0).long() * 101 - 100
    return functional.cross_entropy(output, classes) + output.square().mean()


def layer(function: Callable[[Any, Tensor], Any]) -> Callable[[], list[nn.Module]]:
    return lambda: [plain(), Does(function), plain(), plain()]


Case = tuple[Callable[[], list[nn.Module]], Schedule, dict[str, Any], type[CounterflowError], str]

CASES: dict[str, Case] = {
    "sparse": (layer(lambda _, y: (y, y.detach().to_sparse())), ONE, {}, ConfigError, "pass on the dense"),
    "numpy": (layer(lambda _, y: (y, np.ones(3))), ONE, {}, ConfigError, "stages pass on tensors"),
    "object": (layer(lambda _, y: (y, object())), TWO, {}, ConfigError, "stages pass on tensors"),
    "a buffer in copies": (layer(count), TWO, {}, ConfigError, "changes its buffer 'seen'"),
    "a weight in copies": (layer(clamp), TWO, {}, ConfigError, "changes its weight 'weight'"),
    "a weight that a backward needs": (layer(clamp), ONE, {}, ConfigError, "changes its weight 'weight'"),
    "a weight of versions": (layer(clamp), FREE, {}, ConfigError, "changes its weight 'weight'"),
    "a weight's cast": (
        layer(clamp),
        ONE,
        {"compute_dtype": torch.bfloat16},
        ConfigError,
        "what it changes is a copy",
    ),
    "nobody's weight": (layer(foreign), ONE, {}, ConfigError, "is no parameter of its layers"),
    "gradients in a forward": (
        layer(gradients),
        ONE,
        {"recompute": "layer"},
        ConfigError,
        "makes gradients in its forward",
    ),
    "a function that adds to gradients": (
        layer(lambda s, y: Adds.apply(y, s.weight)),  # type: ignore[no-untyped-call]
        ONE,
        {"recompute": "layer"},
        ConfigError,
        "if it adds to its grad itself",
    ),
    "other values again, by stage": (
        layer(other),
        ONE,
        {"recompute": "stage"},
        ConfigError,
        "gives other values when it is computed again",
    ),
    "other values again, by layer": (
        layer(other),
        ONE,
        {"recompute": "layer"},
        ConfigError,
        "gives other values when it is computed again",
    ),
    "no loss": (layer(lambda _, y: y), ONE, {"loss": lambda y, _: y}, ConfigError, "the loss is a tensor of"),
    "a sum for some": (
        layer(lambda _, y: y),
        ONE,
        {"loss": of_some},
        ConfigError,
        "and the others are not",
    ),
    "a sum of an asynchronous scheme": (
        layer(lambda _, y: y),
        FREE,
        {"loss": lambda y, t: LossSum(mean(y, t), 1.0)},
        ConfigError,
        "before the LossSum of all micro-batches",
    ),
    "parts of a loss": (layer(lambda _, y: y), TWO, {"loss": with_entropy}, ConfigError, "among its parts"),
    "a loss that is not finite": (
        layer(lambda _, y: y / 0),
        TWO,
        {},
        WorkerError,
        "in step 0 the loss is nan",
    ),
    "a gradient that is not finite": (layer(odd), TWO, {}, WorkerError, "nothing was updated with it"),
    "an error of a layer": (layer(fails), HALVES, {}, WorkerError, "ValueError: no 4"),
}


def stepped(pipeline: Pipeline, x: Tensor, y: Tensor) -> None:
    """In asynchronous schemes some are told in a later step."""
    for _ in range(3):
        pipeline.step(x, y)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_workers_end_with_the_sentence(case: Case) -> None:
    make, schedule, options, kind, message = case
    torch.manual_seed(0)
    layers, options = make(), {"loss": mean, "optimizer": sgd, **options}
    loss = options.pop("loss")
    x, y = torch.randn(2, 16, WIDTH)

    def work() -> tuple[CounterflowError, bool]:
        pipeline = Pipeline(layers, loss, schedule, **options)
        before = pipeline.weights.state.state_dict()
        with pytest.raises(CounterflowError) as caught:
            stepped(pipeline, x, y)
        after = pipeline.weights.state.state_dict()
        return caught.value, all(torch.equal(before[name], after[name]) for name in before if name in CHANGED)

    found = launch(work, workers=2, transport="strict-local", timeout_seconds=20)
    assert kind in {type(error) for error, _ in found}
    for error, same in found:
        assert message in str(error)
        assert same or not schedule.synchronous


def test_the_launch_raises_it_as_it_is() -> None:
    layers = [plain(), Does(count), plain(), plain()]

    def work() -> None:
        pipeline = Pipeline(layers, mean, TWO, optimizer=sgd)
        pipeline.step(*torch.randn(2, 16, WIDTH))

    with pytest.raises(ConfigError, match=r"^layer 1 .* changes its buffer 'seen'"):
        launch(work, workers=2, transport="strict-local", timeout_seconds=20)
