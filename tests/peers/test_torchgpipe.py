"""What torchgpipe's tests and its models (AmoebaNet, U-Net without skips, ResNet) need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import Pipeline, WorkerError, launch, schemes

from .alone import MODES, SCHEMES, Case, Given, adamw, agrees, numbers, seeded
from .models import WIDTH, Mlp


def pictures(step: int) -> Given:
    return Given(numbers(step, 16, 2, 4, 4), torch.arange(16).roll(step) % 5)


class Residual(nn.Module):
    """Two convolutions with group norms, in-place activations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x) + x  # x is what the ReLU made of it
        return found


def residual() -> list[nn.Module]:
    return [
        nn.Conv2d(2, 4, 3, padding=1),
        Residual(4),
        nn.AvgPool2d(2),
        Residual(4),
        nn.Flatten(),
        nn.Linear(16, 5),
    ]


class Split(nn.Module):
    """One tensor to two, the second with fewer features."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x[:, :2]


class Joined(nn.Module):
    """Two tensors to one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = self.fc(torch.cat(given, 1))
        return found


class Detached(nn.Linear):
    """Lets no gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Fails(nn.Module):
    """In the third micro-batch, forward or backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.count = where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 3 and self.where == "forward":
            raise ZeroDivisionError("broken")
        if self.where == "backward" and x.requires_grad:
            x = x.clone()
            x.register_hook(self.fail)
        return x

    def fail(self, _: Tensor) -> None:
        raise ZeroDivisionError("broken")


def plain(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH))


class WithAside(nn.Module):
    """Two values, the second for a loss of its own; and when that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.main(x), "aside": self.aside(x), "when": x[:, :1]}


class UsesAside(nn.Linear):
    """Uses the second value, multiplies it by zero, or does not look at it."""

    def forward(self, given: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(given["y"].tanh())
        when = float(given["when"].detach()[0])
        return y if when == 0 else y + (given["aside"] if when > 0 else given["aside"] * 0)


def sometimes(*when: int) -> Callable[[int], Given]:
    def given(step: int) -> Given:
        inputs = numbers(step, 16, WIDTH)
        inputs[:, 0] = when[step]
        return Given(inputs, numbers(step + 100, 16, WIDTH))

    return given


CASES = {
    "a gradient that vanishes": Case(
        seeded(lambda: [WithAside(), nn.Identity(), UsesAside(WIDTH, WIDTH), Mlp()]),
        sometimes(1, 0, -1),
        options={"dynamic_shapes": True},
    ),
    "a gradient that appears": Case(
        seeded(lambda: [WithAside(), nn.Identity(), UsesAside(WIDTH, WIDTH), Mlp()]),
        sometimes(0, -1, 1),
        options={"dynamic_shapes": True},
    ),
    "residual convolutions, in place": Case(seeded(residual), pictures, nn.functional.cross_entropy),
    "tuples in and out": Case(seeded(lambda: [Mlp(), Split(), Joined(), Mlp()]), plain),
    "a layer that lets no gradient through": Case(
        seeded(lambda: [Mlp(), Mlp(), Detached(WIDTH, WIDTH), Mlp()]), plain
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("workers", SCHEMES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Case, workers: int) -> None:
    agrees(case, workers, turn=list(CASES.values()).index(case))


def _fails(layers: list[nn.Module], mode: Any) -> None:
    pipeline = Pipeline(
        layers, nn.functional.mse_loss, schemes.chimera(2, 4), optimizer=adamw, recompute=mode, cuts=[2]
    )
    given = plain(0)
    for _ in range(3):
        pipeline.step(given.inputs, given.targets)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 3])
def test_an_error_in_a_layer_ends_all_workers(where: str, mode: Any, place: int) -> None:
    layers: list[Any] = seeded(lambda: [Mlp() for _ in range(3)])()
    layers.insert(place, Fails(where))
    if not place and where == "backward":
        layers.insert(0, layers.pop(1))  # the first input has no gradient
    with pytest.raises(WorkerError, match="ZeroDivisionError: broken"):
        launch(_fails, layers, mode, workers=2, transport="local", timeout_seconds=30)
