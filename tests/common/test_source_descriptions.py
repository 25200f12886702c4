"""Descriptions of models and functions that two workers compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.common.tensors import source_descriptions


class Block(nn.Module):
    def __init__(self, activation: Any = functional.relu, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 2), nn.Dropout(dropout)
        self.activation, self.scale, self.calls, self.rank_scale = activation, 1.0, 0, 2.0

    def forward(self, x: Tensor) -> Tensor:
        return shaped(self.activation(self.linear(x)) * self.scale)


def shaped(x: Tensor) -> Tensor:
    return x + 1


def of(text: str, name: str = "forward") -> Any:
    """A function that ``text`` defines."""
    scope: dict[str, Any] = {"__name__": __name__, "functional": functional}
    exec(text, scope)
    return scope[name]


def details(change: Callable[[Block], object]) -> dict[str, str]:
    block = Block()
    change(block)
    return source_descriptions.details_of(block)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda block: setattr(block, "activation", functional.gelu), "activation"),
        (lambda block: setattr(block, "activation", nn.GELU()), "activation"),
        (lambda block: setattr(block, "scale", 2.0), "scale"),
        (lambda block: setattr(block.dropout, "p", 0.5), "dropout.p"),
        (lambda block: block.dropout.eval(), "dropout.training"),
        (lambda block: block.linear.bias.requires_grad_(False), "linear.bias"),
        (lambda block: setattr(block, "linear", nn.Linear(2, 3)), "linear.weight"),
        (lambda block: setattr(block, "linear", nn.Identity()), "linear"),
    ],
)
def test_what_makes_another_model_is_seen(change: Callable[[Block], object], part: str) -> None:
    usual, other = details(lambda _: None), details(change)
    assert part in {name for name in usual | other if usual.get(name) != other.get(name)}


def test_what_may_differ_is_not_looked_at() -> None:
    def change(block: Block) -> None:
        block.calls, block.rank_scale = 3, 1.0
        vars(block).update(folder="/tmp/1", device="cuda:1")
        block.linear.weight.data += 1
        block.register_buffer("cache", torch.ones(3))

    assert details(change) == details(lambda _: None)


SOURCE = """
def forward(x):
    \"\"\"As it is.\"\"\"
    return functional.gelu(x) * 2
"""


def test_source_counts_by_what_it_does() -> None:
    usual = source_descriptions.described(of(SOURCE))
    assert usual == source_descriptions.described(
        of("\n\n# a comment" + SOURCE.replace("As it is", "Otherwise"))
    )
    assert usual != source_descriptions.described(of(SOURCE.replace("gelu", "relu")))
    assert usual != source_descriptions.described(of(SOURCE.replace("* 2", "* 3")))


def test_functions_that_a_source_calls_count(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def helper(x): return x + {}\ndef forward(x): return helper(x)"
    assert source_descriptions.described(of(text.format(1))) == source_descriptions.described(
        of(text.format(1))
    )
    assert source_descriptions.described(of(text.format(1))) != source_descriptions.described(
        of(text.format(2))
    )
    constant = "SCALE = {}\ndef forward(x): return x * SCALE"
    assert source_descriptions.described(of(constant.format(1.0))) != source_descriptions.described(
        of(constant.format(2.0))
    )
    ranked = "rank_scale = {}\ndef forward(x): return x * rank_scale"
    assert source_descriptions.described(of(ranked.format(1.0))) == source_descriptions.described(
        of(ranked.format(2.0))
    )


def test_losses_count_with_their_arguments() -> None:
    def loss(output: Tensor, target: Tensor, weight: float) -> Tensor:
        return functional.mse_loss(output, target) * weight

    def closed(weight: float) -> Any:
        return lambda output, target: functional.mse_loss(output, target) * weight

    of_loss = source_descriptions.loss_details
    assert of_loss(partial(loss, weight=1.0)) != of_loss(partial(loss, weight=2.0))
    assert of_loss(closed(1.0)) != of_loss(closed(2.0))
    assert of_loss(closed(1.0)) == of_loss(closed(1.0))
    assert of_loss(nn.HuberLoss(delta=1.0)) != of_loss(nn.HuberLoss(delta=2.0))
    assert of_loss(nn.MSELoss()) != of_loss(nn.L1Loss())
    assert of_loss(None) == of_loss(None)


def test_versions_name_the_source() -> None:
    found = source_descriptions.versions()
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert str(found["counterflow"]).endswith(f"(source {source_descriptions.own_source()})")
    assert len(source_descriptions.own_source()) == 8


def test_installed_packages_count_by_their_versions() -> None:
    assert source_descriptions.source_of_name(pytest.MonkeyPatch).startswith(
        "_pytest.monkeypatch.MonkeyPatch (_pytest"
    )
    assert "(source" not in source_descriptions.source_of_name(pytest.MonkeyPatch)
    assert source_descriptions.source_of_name(nn.Linear) == "torch.nn.modules.linear.Linear"
