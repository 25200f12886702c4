"""Leaves that require a gradient: those made in a forward are harmless, others are weights of nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from counterflow import launch, schemes
from counterflow.errors import ConfigError

from .alone import SCHEMES, Case, F, Given, agrees, numbers, piped, seeded

WIDTH = 4


class Does(nn.Module):
    """What a function makes of a linear layer's output."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear, x)


def hooked() -> nn.Module:
    """As ``enable_input_require_grads`` does it, on a frozen layer."""
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    layer.register_forward_hook(lambda module, given, output: output.requires_grad_(True))  # noqa: ARG005
    return layer


def cut_off(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.detach().requires_grad_())  # type: ignore[no-any-return]


def fresh(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * torch.ones(WIDTH, dtype=F, requires_grad=True)  # type: ignore[no-any-return]


def forces(linear: nn.Module, x: Tensor) -> Tensor:
    at = x.detach().requires_grad_()
    return -torch.autograd.grad(linear(at).tanh().sum(), at, create_graph=True)[0]


def reentrant(linear: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(linear, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]


def itself(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x).detach().requires_grad_()  # type: ignore[no-any-return]


def given(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 9, 16, WIDTH))


FEW = [
    schedule for schedule in SCHEMES[2] if schedule.scheme in ("dapple", "chimera", "hanayo", "zb-h1", "zb-v")
]

CASES = {
    "a hook's": (hooked, ("none", "stage", "layer")),
    "an input cut off": (lambda: Does(cut_off), ("none", "stage", "layer")),
    "a fresh one": (lambda: Does(fresh), ("none", "stage", "layer")),
    "forces": (lambda: Does(forces), ("none",)),
    "a reentrant checkpoint": (lambda: Does(reentrant), ("none", "stage", "layer")),
    "what a layer gives": (lambda: Does(itself), ("none", "stage", "layer")),
}


@pytest.mark.table
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize(("layer", "modes"), CASES.values(), ids=CASES)
def test_leaves_made_in_a_forward_are_as_in_one_process(
    layer: Callable[[], nn.Module], modes: tuple[str, ...], place: int
) -> None:
    """The two places in half of the schedules each, with every recomputation."""

    def layers() -> list[nn.Module]:
        found: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
        return [*found[:place], layer(), *found[place:], Does(cut_off if place else fresh)]

    agrees(Case(seeded(layers), given, modes=modes), 2, schedules=FEW[place // 2 :: 2], every=True)


class Keeps(nn.Module):
    """Makes its weight in its first forward, and keeps it from the optimiser."""

    weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = torch.ones(WIDTH, dtype=F, requires_grad=True)
        return x * self.weight


def outside(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    weight = torch.ones(16, WIDTH, dtype=F, requires_grad=True)
    return lambda: Does(lambda _, x: function(x, weight))


class Decays(nn.Linear):
    """Changes its weight as it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.mul_(0.9)
        return super().forward(x.detach().requires_grad_())


NOBODYS = "and is no parameter of its layers or of a loss function that is a module"


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Keeps, NOBODYS),
        (outside(lambda x, weight: x * weight), NOBODYS),
        (outside(lambda x, weight: functional.linear(x.detach(), weight[:WIDTH])), NOBODYS),
        (outside(lambda _, weight: weight), NOBODYS),
        (
            lambda: Decays(WIDTH, WIDTH),
            "changes weights as it runs, so that a second run cannot tell|gives other values when it is comp",
        ),
    ],
)
def test_leaves_that_were_there_before_are_refused(
    layer: Callable[[], nn.Module], message: str, recompute: str
) -> None:
    """Before anything is updated, also where a step runs each stage once."""
    case = Case(seeded(lambda: [nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH)]), given)
    with pytest.raises(ConfigError, match=message):
        launch(
            piped, case, [(schemes.dapple(2, 1), recompute)], workers=2, transport="local", timeout_seconds=30
        )
