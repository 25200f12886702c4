"""Functions that a user compiled, called by layers."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes

from ...kit import sgd


def plain(x: Tensor) -> Tensor:
    return x.tanh() * 2


class Compiled(nn.Module):
    """A layer that calls a compiled function, whose backward writes over what was saved for it if it may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.function = torch.compile(plain, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(self.linear(x))
        return found


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler looks at all
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_split_backwards_go_through_compiled_functions(recompute: Any) -> None:
    torch.manual_seed(0)
    layers = [Compiled() for _ in range(4)]
    inputs = torch.randn(8, 4, dtype=torch.float64)
    alone = nn.Sequential(*copy.deepcopy(layers))
    for layer in alone:
        cast("Any", layer).function = plain
    loss = nn.functional.mse_loss(alone(inputs), inputs)
    loss.backward()
    sgd(list(alone.parameters())).step()

    def work() -> tuple[float, dict[str, Tensor]]:
        schedule = schemes.zb_v(2, 4)
        pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, recompute=recompute)
        return pipeline.step(inputs, inputs).loss, pipeline.model_state_dict()

    (found, state), _ = launch(work, workers=2, transport="local", timeout_seconds=60)
    assert found == pytest.approx(loss.item(), rel=1e-9)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)
