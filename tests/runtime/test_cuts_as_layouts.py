"""A pipeline whose cuts are a layout of Megatron-LM: the same stages and numbers as with cuts as numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

from ..kit import mean_square, sgd


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(4, 4, dtype=torch.float64) for _ in range(6)]


def made(schedule: Schedule, cuts: str) -> tuple[int, ...]:
    """The cuts that a pipeline makes of a layout."""
    return Pipeline(layers(), mean_square, schedule, optimizer=sgd, cuts=cuts).cuts


@pytest.mark.parametrize("schedule", [schemes.dapple(2, 4), schemes.chimera(2, 4)], ids=str)
def test_a_layout_makes_the_stages_it_says(schedule: Schedule) -> None:
    for layout, cuts in (("E|t*4,L", (1,)), ("Ettt|tL", (4,))):
        assert launch(made, schedule, layout, workers=2, transport="local") == [cuts, cuts]


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        (schemes.dapple(3, 4), "Et|ttt|L"),
        (schemes.hanayo(2, 4), "E|tt|t|tL"),
        (schemes.pipedream(2, 4), "E|t*4,L"),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_one_process(schedule: Schedule, layout: str) -> None:
    rows = torch.arange(32, dtype=torch.float64).reshape(8, 4) / 32
    batches = [[(rows + n, rows.flip(1))] for n in range(3)]
    found = verify(
        schedule, layers(), mean_square, batches, optimizer=sgd, cuts=layout, transport="strict-local"
    )
    assert found.ok, found


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (
            "Et|ttL",
            r"has 3 transformer layers \(t\), expected 4: the model has 6 layers with embedding and head",
        ),
        ("Et|tt|tL", r"has 3 stages, expected 2; counterflow layout 'Et\|tt\|tL' --stages 2 re-derives it"),
        ("Et*4,L|", r"expected the loss|stage 1 is empty, and here each stage has one layer or more"),
        ("Ett|ttmL", r"has 1 MTP layer \(m\), expected none, as the model has none"),
        ("Ett;ttL", r"at character 4 expected E, t, m, L, \| or \(, got ';'"),
    ],
)
def test_another_layout_is_refused(layout: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        launch(made, schemes.dapple(2, 4), layout, workers=2, transport="local")
