"""Gradients that a forward takes, and weights that it passes to a call, in stages as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf

from .kit import losses, sample, staged


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Forces(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.body(x) + x**2
        return energy + torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class LastForces(Net):
    """Takes the gradient of its last part only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x + torch.autograd.grad(torch.tanh(y).sum(), y, create_graph=True)[0]


class Hypernetwork(Net):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.hyper = nn.Parameter(torch.randn(4)), nn.Linear(4, 64)
        self.net = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.hyper(self.code).view(8, 8)}
        return torch.func.functional_call(self.net, weights, (self.body(x),))  # type: ignore[no-any-return]


class Swaps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.body(x), self.net.weight
        self.net.weight = self.weight
        x = self.net(x)
        self.net.weight = weight
        return self.net(torch.tanh(x))  # type: ignore[no-any-return]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x))


class SwapsWithin(Net):
    """Passes a weight to a module within the one that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = Inner(), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.net, {"net.weight": self.weight}, (self.body(x),))  # type: ignore[no-any-return]


class Maps(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * 2 + row.sum())(self.body(x))  # type: ignore[no-any-return]


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.round(decimals=2)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        del ctx
        return gradient


class Square(torch.autograd.Function):
    """A function in torch's newer style, which saves a tensor."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Applies(nn.Module):
    """A module whose last operation is a function with a backward of its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x)


class Pair(Applies):
    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x), x, self.function.apply(x + 1)


class EndsInFunctions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.round, self.square, self.pair = Applies(Round), Applies(Square), Pair(Square)

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.pair(self.round(self.body(x)) + 0.1)
        return self.square(first + middle * last)  # type: ignore[no-any-return]


class EndsInATracedModule(Net):
    """Has expensive blocks, which are traced if they can be, that end in such a function."""

    class Block(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Round.apply(self.body(x))  # type: ignore[no-any-return,no-untyped-call]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class CallsFunctions(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(Round.apply(self.body(x)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "kind", [LastForces, Hypernetwork, Swaps, SwapsWithin, EndsInFunctions, EndsInATracedModule]
)
def test_losses_are_those_of_one_process(kind: Callable[[], nn.Module]) -> None:
    assert staged(kind) == pytest.approx(losses(kind), rel=1e-5)


def test_a_function_with_a_backward_between_modules_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match=r"calls a torch\.autograd\.Function .*Round\.apply"):
        cf.layers(CallsFunctions(), sample(0))


def test_no_stage_begins_within_a_gradient() -> None:
    with pytest.raises(
        cf.ConfigError, match=r"1 layer for 2 stages, as its forward calls torch\.autograd\.grad"
    ):
        staged(Forces)


def test_a_transform_of_functions_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match=r"calls a transform of torch\.func"):
        cf.layers(Maps(), sample(0))
