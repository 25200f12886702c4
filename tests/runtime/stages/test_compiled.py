"""Layers through torch.compile: the numbers of plain ones, whatever runs them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import counterflow as cf
from counterflow.api.carry import NOTHING
from counterflow.models import hf
from counterflow.models.gpt import GPTConfig
from counterflow.models.loss import next_token_loss
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

D = torch.float64


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x))))
        return x + added


def train(schedule: Schedule, recompute: Any, dropout: float, how: str | bool) -> list[object]:
    torch._dynamo.reset()  # or what is compiled already runs

    torch.manual_seed(0)
    layers = [Block(dropout) for _ in range(schedule.stages)]

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
def test_compiled_layers_give_the_same(schedule: Schedule, recompute: Any, dropout: float) -> None:
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
    def job(recompute: Any, compiled: str | bool = "aot_eager") -> list[float]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.ELU(inplace=True)), nn.Linear(4, 4)]
        layers += [
            nn.ELU(inplace=True),
            nn.Linear(4, 4),
            nn.ELU(inplace=True),
        ]  # first in a stage, and within
        pipeline = cf.Pipeline(
            layers, nn.functional.mse_loss, cf.schemes.dapple(2, 2), recompute=recompute,
            optimizer=partial(torch.optim.SGD, lr=0.1), compile=compiled, cuts=[2],
        )  # fmt: skip
        inputs = torch.arange(16.0).view(4, 4) / 16
        return [pipeline.step(inputs, torch.ones(4, 4)).loss for _ in range(3)]

    torch._dynamo.reset()
    run = partial(launch, job, workers=2, transport="local", timeout_seconds=60)
    expected = pytest.approx(run("none", False)[0], rel=1e-6)
    assert run("none")[0] == expected
    assert run("stage")[0] == expected
    assert run("layer")[0] == expected


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_in_slices_give_the_same() -> None:
    torch._dynamo.reset()
    config = GPTConfig(1, 8, 2, 17, 12, dropout=0.0)
    schedule = cf.schemes.dapple(stages=2, micro_batches=1, slices=3)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    layers = [layer.double() for layer in config.build()]
    batches = [[config.sample(2, 12)]]
    assert verify(schedule, layers, next_token_loss, batches, optimizer=optimizer, compile="eager").ok


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_of_transformers_gives_the_same_in_slices() -> None:
    """Its attention is called with more parts by each slice; what is around it is compiled."""
    torch._dynamo.reset()
    llama = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    first, block, _ = hf.layers(transformers.LlamaForCausalLM(llama).double().train())
    carries = [
        module for layer in (first, block) for module in layer.modules() if isinstance(module, cf.Carry)
    ]
    graphs = []

    def counted(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    def run() -> Tensor:
        states, found = [NOTHING, NOTHING], []
        for slice_ in torch.arange(12).view(1, 12).chunk(3, 1):
            for carry, state in zip(carries, states, strict=True):
                carry.expect_slices(expected=True)
                carry.begin(state)
            found.append(block(first(slice_))["hidden_states"])
            states = [carry.end() for carry in carries]
        return torch.cat(found, 1)

    plain = run()
    block.compile(backend=counted)
    torch.testing.assert_close(run(), plain, rtol=1e-10, atol=1e-10)
    if torch.__version__ >= "2.13":  # before, it compiles nothing of this layer
        assert graphs
