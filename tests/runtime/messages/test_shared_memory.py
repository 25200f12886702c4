"""Tensors in one memory that a stage passes on, of which the next stage changes one in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.runtime.messages.values import flatten_value

Pass = Callable[[Tensor], Any]


class Gives(nn.Module):
    def __init__(self, value: Pass) -> None:
        super().__init__()
        self.value, self.linear = value, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.value(self.linear(x))


class Takes(nn.Module):
    """Changes its first tensor in place, if it is to."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.linear = in_place, nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        first, second = value.values() if isinstance(value, dict) else value
        first = nn.functional.relu(first, inplace=self.in_place)
        output: Tensor = self.linear(nn.functional.pad(first, (0, 6 - first.shape[1]))) + second.sum(
            1, keepdim=True
        )
        return output


SHARED: dict[str, Pass] = {
    "part": lambda y: (y, y[:, :3]),
    "detached": lambda y: [y, y.detach()],
    "dict": lambda y: {"a": y, "b": y.view(-1, 2, 3).flatten(1)},
    "overlap": lambda y: (y[:, :4], y[:, 3:]),
}
APART: dict[str, Pass] = {
    "halves": lambda y: y.chunk(2, 1),
    "strides": lambda y: (y[:, ::2], y[:, 1::2]),
    "clone": lambda y: (y, y[:, :3].clone()),
}


def layers(value: Pass, *, in_place: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Gives(value), Takes(in_place=in_place)]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).unbind()  # type: ignore[return-value]


def staged(value: Pass, *, in_place: bool) -> float:
    def work() -> float:
        pipeline = cf.Pipeline(
            layers(value, in_place=in_place),
            nn.MSELoss(),
            cf.schemes.dapple(2, 2),
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
        return [pipeline.step(*batch()).loss for _ in range(2)][1]

    return cf.launch(work, workers=2, transport="local")[0]


def plain(value: Pass, *, in_place: bool) -> float:
    model = nn.Sequential(*layers(value, in_place=in_place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch()[0]), batch()[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[1]


@pytest.mark.parametrize("case", SHARED)
def test_a_change_in_place_that_another_tensor_has_as_well_is_refused(case: str) -> None:
    with pytest.raises(cf.ConfigError, match="stage 1 changes a tensor in place that it was given with"):
        staged(SHARED[case], in_place=True)


@pytest.mark.parametrize(
    ("value", "in_place"),
    [*((value, False) for value in SHARED.values()), *((value, True) for value in APART.values())],
)
def test_other_values_are_as_in_one_process(value: Pass, *, in_place: bool) -> None:
    if value is APART["halves"] and in_place:  # autograd allows no change of outputs of chunk
        value = partial(lambda y: tuple(part[:, :] for part in (y[:, :3], y[:, 3:])))
    assert staged(value, in_place=in_place) == pytest.approx(plain(value, in_place=in_place), rel=1e-5)


def test_common_elements_are_seen() -> None:
    x = torch.arange(24.0).view(4, 6)
    for value, shares in (
        ((x, x.clone()), False),
        ((x, x[1:2]), True),
        ((x[:, ::2], x[:, 1::2]), False),
        ((x[:, ::2], x[:, 2::3]), True),
        ((x[:2], x[2:]), False),
        ((x[:0], x), False),
        (({"a": x, "b": x}, x.T), True),
        ({"a": x, "b": 3}, False),
    ):
        structure, _ = flatten_value(value, "")
        assert structure is not None
        assert structure.shares is shares, value
