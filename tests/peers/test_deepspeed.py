"""What DeepSpeed's pipeline users have: tied layers, tuples with masks, iterators, accumulation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import Pipeline, launch
from counterflow.schedule.ir import Schedule

from .alone import SCHEMES, STEPS, Case, F, Given, adamw, agrees, alone, numbers, seeded
from .models import WIDTH, Adapted, Attention, Embedded, Head, Mlp

TOKENS = 11


def tokens(step: int) -> Given:
    drawn = torch.Generator().manual_seed(step)
    found = torch.randint(1, TOKENS, (16, 5), generator=drawn)
    found[::3, 3:] = 0
    return Given(found, found.roll(-1, 1))


def tied() -> list[nn.Module]:
    first = Embedded(TOKENS)
    return [first, Attention(), Attention(), Attention(), Head(TOKENS, first)]


def by_token(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class OwnLoss(nn.Module):
    """Gives the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return {"loss": y.square().mean(), "logits": y}


def plain(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH))


CASES = {
    "tied embeddings": Case(seeded(tied), tokens, by_token),
    "adapters beside frozen layers": Case(seeded(lambda: [Adapted() for _ in range(4)]), plain),
    "a model with its own loss": Case(seeded(lambda: [Mlp(), Mlp(), Mlp(), OwnLoss()]), plain, loss=None),
}


@pytest.mark.table
@pytest.mark.parametrize("workers", SCHEMES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Case, workers: int) -> None:
    agrees(case, workers, turn=list(CASES.values()).index(case))


def _from_an_iterator(case: Case, schedule: Schedule) -> Any:
    """Batches come as micro-batches, one after another."""
    pipeline = Pipeline(case.layers(), case.loss, schedule, optimizer=adamw, clip_norm=1.0)
    count = schedule.micro_batches

    def parts() -> Any:
        for step in range(STEPS):
            given = case.given(step)
            yield from zip(given.inputs.chunk(count), given.targets.chunk(count), strict=True)

    arriving = parts()
    losses = [pipeline.step(micro_batches=arriving).loss for _ in range(STEPS)]
    return losses, pipeline.model_state_dict()


@pytest.mark.parametrize("schedule", SCHEMES[2], ids=str)
def test_an_iterator_of_micro_batches(schedule: Schedule) -> None:
    case = CASES["adapters beside frozen layers"]
    losses, _, state = alone(case)
    for ours, after in launch(_from_an_iterator, case, schedule, workers=2, transport="local"):
        assert ours == pytest.approx(losses, rel=1e-10)
        for (key, tensor), other in zip(state.items(), after.values(), strict=True):
            torch.testing.assert_close(
                other, tensor, rtol=1e-9, atol=1e-11, msg=partial("{}: {}".format, key)
            )


def _accumulated(case: Case, schedule: Schedule) -> Any:
    pipeline = Pipeline(case.layers(), case.loss, schedule, optimizer=adamw)
    for step in range(4):
        given = case.given(step)
        pipeline.step(given.inputs, given.targets, update=step % 2 == 1)
    given = case.given(0)
    return (
        pipeline.model_state_dict(),
        pipeline.evaluate(given.inputs, given.targets).loss,
        pipeline.predict(given.inputs),
    )


@pytest.mark.parametrize("schedule", SCHEMES[2], ids=str)
def test_two_steps_make_one_update(schedule: Schedule) -> None:
    case = CASES["adapters beside frozen layers"]
    model = nn.Sequential(*case.layers())
    optimizer = adamw(list(model.parameters()))
    for step in range(4):
        given = case.given(step)
        (nn.functional.mse_loss(model(given.inputs), given.targets) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    given = case.given(0)
    with torch.no_grad():
        output = model(given.inputs)
    for after, evaluated, predicted in launch(_accumulated, case, schedule, workers=2, transport="local"):
        torch.testing.assert_close(predicted, output, rtol=1e-9, atol=1e-11)
        loss = nn.functional.mse_loss(output, given.targets)
        assert evaluated == pytest.approx(float(loss), rel=1e-9)
        for tensor, other in zip(model.state_dict().values(), after.values(), strict=True):
            torch.testing.assert_close(other, tensor.to(F), rtol=1e-9, atol=1e-11)
