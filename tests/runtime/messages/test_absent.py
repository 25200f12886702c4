"""Gradients that there are not: None on both sides of a border, in the same places in each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes


class Forks(nn.Linear):
    """Gives a second value, which needs a weight of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x * self.scale


class Joins(nn.Linear):
    """Uses the second value only where it is negative."""

    def forward(self, given: Any) -> Tensor:
        x, aside = given
        return super().forward(x) if float(aside.detach().flatten()[0]) > 0 else super().forward(x + aside)


def _scales(signs: tuple[int, ...], options: dict[str, Any]) -> list[Tensor]:
    """The weight after each step; the optimiser decays it where it has a gradient."""
    torch.manual_seed(0)
    decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    pipeline = Pipeline(
        [Forks(), Joins(2, 2)], nn.functional.mse_loss, schemes.dapple(2, 2), optimizer=decaying, **options
    )
    found = []
    for sign in signs:
        pipeline.step(sign * torch.ones(4, 2), torch.zeros(4, 2))
        found.append(pipeline.model_state_dict()["0.scale"].clone())
    return found


@pytest.mark.parametrize("options", [{}, {"compress": True}, {"dynamic_shapes": True}], ids=str)
def test_what_has_no_gradient_is_not_updated(options: dict[str, Any]) -> None:
    for found in launch(_scales, (1, 1, 1), options, workers=2, transport="local"):
        assert all(torch.equal(scale, torch.ones(2)) for scale in found)


@pytest.mark.parametrize(
    ("signs", "message"),
    [
        ((-1, -1, 1), "has no gradient for input 1 .* where it had one"),
        ((1, 1, -1), "a gradient .* had none"),
    ],
)
def test_a_gradient_that_appears_or_vanishes_is_refused(signs: tuple[int, ...], message: str) -> None:
    launch(_scales, signs[:2], {}, workers=2, transport="local")
    with pytest.raises(ConfigError, match=f"stage 1 .*{message}.*dynamic_shapes=True"):
        launch(_scales, signs, {}, workers=2, transport="local", timeout_seconds=20)


def test_it_may_where_shapes_go_with_each_message() -> None:
    for found in launch(_scales, (1, -1, 1), {"dynamic_shapes": True}, workers=2, transport="local"):
        one, other, last = found
        assert torch.equal(one, torch.ones(2))
        assert not torch.equal(other, one)
        assert torch.equal(last, other)
