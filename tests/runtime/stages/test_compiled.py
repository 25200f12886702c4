"""Layers through torch.compile: the numbers of plain ones, whatever runs them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.ir import Schedule

D = torch.float64


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x))))
        return x + added


def train(schedule: Schedule, recompute: str, dropout: float, how: str | bool) -> list[object]:
    torch._dynamo.reset()  # or what is compiled already runs

    torch.manual_seed(0)
    layers = [Block(dropout) for _ in range(4)]

    def job() -> list[object]:
        generator = torch.Generator().manual_seed(1)
        given = [torch.randn(9, 4, dtype=D, generator=generator) for _ in range(2)]  # not all lengths alike
        pipeline = cf.Pipeline(
            layers, nn.functional.mse_loss, schedule, recompute=recompute,
            optimizer=partial(torch.optim.SGD, lr=0.1), compile=how,
        )  # fmt: skip
        steps = [pipeline.step(*given) for _ in range(2)] + pipeline.flush()
        told = [step.loss for step in steps if step.reports_step is not None]
        return [told, pipeline.evaluate(*given).loss, pipeline.predict(given[0]), pipeline.model_state_dict()]

    found: list[object] = launch(job, workers=2, transport="local")[0]
    return found


HALVING = cf.schemes.chimera(2, 4, concat="backward-halving")


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
@pytest.mark.parametrize(
    ("schedule", "recompute", "dropout"),
    [
        (cf.schemes.chimera(2, 4, concat="forward-doubling"), "stage", 0.5),
        (cf.schemes.hanayo(2, 2), "layer", 0.5),
        (cf.schemes.wpipe(2, 2), "layer", 0.5),
        (HALVING, "layer", 0.0),
    ],
    ids=str,
)
def test_compiled_layers_give_the_same(schedule: Schedule, recompute: str, dropout: float) -> None:
    plain = train(schedule, recompute, dropout, how=False)
    compiled = train(schedule, recompute, dropout, how="aot_eager")
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_leaves_alone_what_notes_saved_tensors() -> None:
    """It took the version of a weight for a constant, and the next update for a change in place."""

    def job(how: str | bool) -> list[float]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        pipeline = cf.Pipeline(
            layers, nn.functional.mse_loss, cf.schemes.dapple(2, 4), recompute="layer",
            optimizer=partial(torch.optim.SGD, lr=0.1), compile=how,
        )  # fmt: skip
        inputs = torch.arange(32.0).view(8, 4) / 32
        return [pipeline.step(inputs, torch.ones(8, 4)).loss for _ in range(3)]

    torch._dynamo.reset()
    compiled, plain = (launch(job, how, workers=2, transport="local")[0] for how in ("aot_eager", False))
    assert compiled == pytest.approx(plain, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_draw_for_a_half_what_they_draw_when_computed_again() -> None:
    kept, again = (train(HALVING, recompute, 0.5, how="aot_eager") for recompute in ("none", "layer"))
    torch.testing.assert_close(again, kept, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
def test_changes_in_place_in_compiled_layers_are_right_where_layers_are_computed_again() -> None:
    def job(recompute: str, compiled: str | bool = "aot_eager") -> list[float]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.ELU(inplace=True)) for _ in range(2)]
        pipeline = cf.Pipeline(
            layers, nn.functional.mse_loss, cf.schemes.dapple(2, 2), recompute=recompute,
            optimizer=partial(torch.optim.SGD, lr=0.1), compile=compiled,
        )  # fmt: skip
        inputs = torch.arange(16.0).view(4, 4) / 16
        return [pipeline.step(inputs, torch.ones(4, 4)).loss for _ in range(3)]

    torch._dynamo.reset()
    run = partial(launch, job, workers=2, transport="local", timeout_seconds=60)
    expected = pytest.approx(run("none", False)[0], rel=1e-6)
    assert run("stage")[0] == expected
    assert run("layer")[0] == expected
