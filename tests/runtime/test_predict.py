"""Outputs of the last stage, put together in the samples' order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ..kit import sgd

F = torch.float64
SCHEMES = [
    schemes.gpipe(2, 4),
    schemes.dapple(2, 4),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.hanayo(2, 4, waves=1),
    schemes.pipedream_2bw(2, 4),
]


class Last(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "turned": [y.t(), "text"], "weight": self.weight}


DIMS = {"y": 0, "turned": [1, 0], "weight": None}


def loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output["y"], target)


def numbers(samples: int) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples), dtype=F)


COUNTS = (8, 11, 3, 1, 8)


def _predicted(layers: list[nn.Module], schedule: Schedule, mode: Any, dims: Any) -> Any:
    pipeline = Pipeline(layers, loss, schedule, optimizer=sgd, recompute=mode, output_dims=dims)
    found = []
    for samples in COUNTS:
        pipeline.step(numbers(8), numbers(8))
        given = numbers(samples) if pipeline.worker == 0 or 0 in pipeline.stages else None
        found.append((pipeline.predict(given), pipeline.model_state_dict()))
    return found


@pytest.mark.table
@pytest.mark.parametrize("mode", ["none", "stage"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_outputs_come_in_the_samples_order(schedule: Schedule, mode: Any) -> None:
    torch.manual_seed(0)
    inner = [nn.Linear(4, 4, dtype=F) for _ in range(schedule.stages - 1)]
    layers: list[nn.Module] = [*inner, Last(4, 4, dtype=F)]
    model = nn.Sequential(*layers)
    job = layers, schedule, mode, DIMS
    for told in launch(_predicted, *job, workers=2, transport="strict-local", timeout_seconds=30):
        for samples, (output, state) in zip(COUNTS, told, strict=True):
            model.load_state_dict(state)
            with torch.no_grad():
                true = model(numbers(samples))
            torch.testing.assert_close(output["y"], true["y"], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(output["turned"][0], true["turned"][0], rtol=1e-10, atol=1e-12)
            assert output["turned"][1] == "text"
            assert torch.equal(output["weight"], true["weight"])


def test_outputs_that_cannot_be_put_together_are_refused() -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4, dtype=F), Last(4, 4, dtype=F)]
    job = layers, SCHEMES[0], "none", (0, 0)
    with pytest.raises(ConfigError, match=r"output_dims=\(0, 0\) does not fit the outputs, which are a dict"):
        launch(_predicted, *job, workers=2, transport="local", timeout_seconds=30)


class Tokens(nn.Module):
    """Logits of tokens, which are as many as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11, dtype=F)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


def _of_tree(schedule: Schedule, dims: Any, name: Any) -> list[Any]:
    def token_loss(output: Tensor, target: Any) -> Tensor:
        return nn.functional.cross_entropy(output.mT, target[name])

    torch.manual_seed(0)
    layers = [Tokens(), *(nn.Linear(11, 11, dtype=F) for _ in range(schedule.stages))]
    pipeline = Pipeline(layers, token_loss, schedule, optimizer=sgd, target_dims=dims)
    tokens = torch.arange(48).view(8, 6) % 11
    parts = [tokens.flip(1), torch.ones(2, 8)]
    targets = dict(zip(dims, parts, strict=True)) if isinstance(dims, dict) else tuple(parts)
    return [
        pipeline.predict(tokens).tolist(),
        pipeline.generate(tokens[:3], tokens=2).tolist(),
        pipeline.evaluate(tokens, targets).loss,
    ]


def test_predictions_need_no_targets_whose_dimensions_are_a_tree() -> None:
    for schedule in SCHEMES:
        found = [
            launch(_of_tree, schedule, dims, name, workers=2, transport="local")
            for dims, name in (({"y": 0, "more": 1}, "y"), ((0, None), 0), ((0, 1), 0))
        ]
        assert all(rows[0] == rows[1] == found[0][0] for rows in found), str(schedule)
