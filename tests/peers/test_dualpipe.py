"""What DualPipe's example does: a criterion over several outputs, outputs of a step, own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import Pipeline, launch
from counterflow.schedule.ir import Schedule

from .alone import MODES, SCHEMES, Case, Given, adamw, agrees, numbers, seeded
from .models import WIDTH, ByHand, Mlp


class TwoHeads(nn.Module):
    """Two outputs a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def criterion(output: tuple[Tensor, Tensor], target: dict[str, Tensor]) -> Tensor:
    left, right = output
    return nn.functional.cross_entropy(left, target["class"]) + nn.functional.l1_loss(right, target["box"])


def given(step: int) -> Given:
    labels = torch.arange(16).roll(step) % 3
    return Given(numbers(step, 16, WIDTH), {"class": labels, "box": numbers(step + 100, 16, 2)})


CASE = Case(seeded(lambda: [Mlp(), ByHand(WIDTH, WIDTH), ByHand(WIDTH, WIDTH), TwoHeads()]), given, criterion)


@pytest.mark.parametrize("workers", SCHEMES)
def test_a_criterion_over_several_outputs_and_targets(workers: int) -> None:
    agrees(CASE, workers)


def _with_outputs(schedule: Schedule, mode: Any) -> Any:
    pipeline = Pipeline(CASE.layers(), criterion, schedule, optimizer=adamw, recompute=mode)
    one = given(0)
    step = pipeline.step(one.inputs, one.targets, outputs=True)
    return step.outputs


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEMES[2], ids=str)
def test_outputs_of_a_step_in_the_samples_order(schedule: Schedule, mode: Any) -> None:
    with torch.no_grad():
        left, right = nn.Sequential(*CASE.layers())(given(0).inputs)
    found = launch(_with_outputs, schedule, mode, workers=2, transport="local")
    told = [outputs for outputs in found if outputs is not None]
    assert told
    for ours in told:
        torch.testing.assert_close(ours, (left, right), rtol=1e-10, atol=1e-12)
