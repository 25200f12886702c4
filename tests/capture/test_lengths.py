"""Sequences of other lengths than the example's: right, or refused in the step that has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.capture import layers
from counterflow.capture.guards import Environment
from counterflow.capture.recording import RecordSlot, recordings_of
from counterflow.errors import ConfigError

TABLES = {7: torch.ones(8), 9: torch.full((8,), 2.0)}


def branch(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 7 else x


def minimum(x: Tensor) -> Tensor:
    return x + x[:, : min(x.shape[1], 7)].mean(1, keepdim=True)


def number(x: Tensor) -> Tensor:
    return x / max(x.shape[1], 7)


def member(x: Tensor) -> Tensor:
    return x * (2.0 if x.shape[1] in {9, 10} else 1.0)


def compared(x: Tensor) -> Tensor:
    return x * (2.0 if x.shape[1] >= x.shape[2] else 1.0)


def text(x: Tensor) -> Tensor:
    return x * len(f"{x.shape[1] + 2}")


def table(x: Tensor) -> Tensor:
    return x * TABLES.get(x.shape[1], TABLES[7])


def window(x: Tensor) -> Tensor:
    return x[:, -5:].mean(1, keepdim=True) + x


def positions(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, x.shape[1])[:, None] * x.shape[1] + x[:, : x.shape[1] // 1]


def counted(x: Tensor) -> Tensor:
    rows = 0.0
    for part in x.flatten(0, 1), x.flatten(0, 1):
        rows = rows + part.shape[0]
    return x * x.square().sum(1, keepdim=True) / rows


def half(x: Tensor) -> Tensor:
    return x / float(max(x.shape[1], 7))


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor], *, features: bool = False) -> None:
        super().__init__()
        self.words = nn.Linear(20, 8) if features else nn.Embedding(20, 8)
        self.head, self.change = nn.Linear(8, 20), change
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = self.change(torch.tanh(block(x)))
        return self.head(x)  # type: ignore[no-any-return]


LENGTHS = 6, 6, 9, 5, 9


def batch(step: int, *, features: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 20, (2, 8, LENGTHS[step]), generator=generator)
    return functional.one_hot(ids[0], 20).float() if features else ids[0], ids[1]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def work(change: Callable[[Tensor], Tensor], *, features: bool) -> list[float]:
    torch.manual_seed(0)
    model, losses = Net(change, features=features), []
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    scheme, example = "dapple(workers=2, micro_batches=2)", batch(0, features=features)[0]
    with cf.Pipeline(
        model, loss_of, scheme, optimizer=optimizer, example=example, witness_every=0
    ) as pipeline:
        for step in range(len(LENGTHS)):
            try:
                losses.append(pipeline.step(*batch(step, features=features)).loss)
            except ConfigError as error:
                refused = "for sequences of length 9 what it does for those of the example" in str(error)
                losses.append(0.0 if refused else -1.0)
    return losses


def expected_losses(change: Callable[[Tensor], Tensor], *, features: bool, refused: bool) -> list[float]:
    torch.manual_seed(0)
    model, losses = Net(change, features=features), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, length in enumerate(LENGTHS):
        if refused and length == 9:
            losses.append(0.0)
            continue
        optimizer.zero_grad()
        inputs, targets = batch(step, features=features)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def agree(change: Callable[[Tensor], Tensor], *, features: bool, refused: bool) -> None:
    losses = cf.launch(work, change, features=features, workers=2, transport="local")[0]
    assert losses == pytest.approx(expected_losses(change, features=features, refused=refused), rel=1e-4)


@pytest.mark.parametrize("change", [branch, minimum, number, half, member, compared, text, table])
def test_a_length_with_another_forward_is_refused_and_training_goes_on(change: Any) -> None:
    agree(change, features=False, refused=True)


@pytest.mark.parametrize("change", [positions, window, counted])
def test_any_length_with_the_same_forward_is_right(change: Any) -> None:
    agree(change, features=False, refused=False)


def test_features_may_have_other_lengths_as_token_ids_may() -> None:
    agree(number, features=True, refused=True)
    agree(positions, features=True, refused=False)


def test_a_length_is_recorded_once() -> None:
    model = Net(positions)
    (recording,) = recordings_of(layers(model, batch(0)[0]))
    variant = recording.current[RecordSlot.TRAINING]
    for step in (0, 2, 4, 3):
        recording.refuse_length(RecordSlot.TRAINING, Environment.current("cpu"), batch(step)[0], {})
    assert variant.lengths == {(9,), (5,)}
