"""Gradients that a forward takes, and weights that it passes to a call, in stages as in one process."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("kind", [LastForces, Hypernetwork, Swaps, SwapsWithin])
def test_losses_are_those_of_one_process(kind: Callable[[], nn.Module]) -> None:
    assert staged(kind) == pytest.approx(losses(kind), rel=1e-5)


def test_no_stage_begins_within_a_gradient() -> None:
    with pytest.raises(
        cf.ConfigError, match=r"1 layer for 2 stages, as its forward calls torch\.autograd\.grad"
    ):
        staged(Forces)


def test_a_transform_of_functions_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match=r"calls a transform of torch\.func"):
        cf.layers(Maps(), sample(0))
