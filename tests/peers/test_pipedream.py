"""What PipeDream's users train: recurrent translation models with states, asynchronously."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import schemes
from counterflow.verification.training_agreement import verify

from .alone import MODES, SCHEMES, STEPS, Case, Given, adamw, agrees, numbers, seeded
from .models import WIDTH, First, Mlp, Recurrent


class LastStep(nn.Module):
    """The state of the last layer, as a value of a sample."""

    def forward(self, given: Any) -> Tensor:
        y, (h, c) = given
        found: Tensor = y[:, -1] + (h * c).squeeze(1)
        return found


def sequences(step: int) -> Given:
    length = 3 + step % 2  # another length in every step
    return Given(numbers(step, 16, length, WIDTH), numbers(step + 100, 16, WIDTH))


CASES = {
    "a state that goes through the layers": Case(
        seeded(lambda: [Recurrent(), Recurrent(), Recurrent(), LastStep()]), sequences
    ),
    "the outputs alone": Case(
        seeded(lambda: [Recurrent(), First(), Recurrent(), Recurrent(), LastStep()]), sequences
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("workers", SCHEMES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Case, workers: int) -> None:
    agrees(case, workers, turn=list(CASES.values()).index(case))


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "schedule",
    [schemes.pipedream(2), schemes.pipedream_2bw(2, 4), schemes.wpipe(2, 4)],
    ids=str,
)
def test_states_without_a_flush(schedule: Any, mode: str) -> None:
    layers = seeded(lambda: [Recurrent(), Recurrent(), Mlp2(), LastStep()])()
    batches = [[(numbers(step, 16, 3, WIDTH), numbers(step + 100, 16, WIDTH))] for step in range(4)]
    found = verify(
        schedule,
        layers,
        nn.functional.mse_loss,
        batches,
        optimizer=adamw,
        recompute=mode,
        transport="strict-local",
    )
    assert found.ok, found


class Mlp2(nn.Module):
    """A layer between recurrent ones, which changes the output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, given: Any) -> Any:
        y, state = given
        return self.mlp(y), state


def test_lengths_differ_by_step() -> None:
    assert {sequences(step).inputs.shape[1] for step in range(STEPS)} == {3, 4}
    assert torch.equal(sequences(0).inputs, sequences(0).inputs)
