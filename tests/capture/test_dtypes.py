"""Numbers that a forward makes of the weights' dtype are those of this dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import counterflow as cf

from ..kit import run, sgd


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.function = nn.Linear(8, 4), function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.function(x))  # type: ignore[no-any-return]


def noise(amount: Callable[[Tensor], float]) -> Callable[[Tensor], Tensor]:
    return lambda h: torch.log(h.relu() + amount(h)) * 0.1


FOLLOWING = {
    "eps": noise(lambda h: torch.finfo(h.dtype).eps),
    "tiny": noise(lambda h: torch.finfo(h.dtype).tiny),
    "minimum": lambda h: h.masked_fill(h < 0, torch.finfo(h.dtype).min).softmax(-1),
}
"""What layers follow in any dtype."""

FIXED = {
    "10 eps": noise(lambda h: 10 * torch.finfo(h.dtype).eps),
    "root of eps": noise(lambda h: torch.finfo(h.dtype).eps ** 0.5),
    "half the minimum": lambda h: h.masked_fill(h < 0, torch.finfo(h.dtype).min / 2).softmax(-1),
    "twice the smallest": noise(lambda h: 2 * torch.finfo(h.dtype).tiny),
    "resolution": noise(lambda h: torch.finfo(h.dtype).resolution),
    "bits": lambda h: h * torch.finfo(h.dtype).bits / 32,
    "size of an item": lambda h: h * h.element_size() / 4,
    "a branch": noise(lambda h: 1e-12 if h.dtype == torch.float64 else 1e-4),
    "a slice": lambda h: torch.cat([h[:, : h.element_size()], h[:, h.element_size() :] * 2], 1),
    "a number of samples": lambda h: h / (h.shape[0] * h.element_size()),
}
"""What layers have of the dtype in which they were found."""

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)


@pytest.mark.parametrize("name", [*FOLLOWING, *FIXED])
def test_layers_have_the_model_s_numbers(name: str) -> None:
    model = Net((FOLLOWING | FIXED)[name])
    layers = cf.layers(model, X)
    assert len(layers) > 1
    torch.testing.assert_close(nn.Sequential(*layers)(X), model(X), rtol=0, atol=0)
    assert cf.same_model(model, layers, X).ok


@pytest.mark.parametrize("name", ["eps", "10 eps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_that_changes_its_dtype_before_a_pipeline(name: str, dtype: torch.dtype) -> None:
    """Layers are found in float32; a pipeline records the model again if its numbers depend on it."""

    def work() -> float:
        model = Net((FOLLOWING | FIXED)[name])
        layers = cf.layers(model, X)
        model.to(dtype)
        pipeline = cf.Pipeline(layers, mse_loss, "1f1b(workers=1, micro_batches=2)", optimizer=sgd)
        return pipeline.step(X.to(dtype), Y.to(dtype)).loss

    model = Net((FOLLOWING | FIXED)[name]).to(dtype)
    expected = mse_loss(model(X.to(dtype)), Y.to(dtype)).item()
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
    assert run(work, workers=1)[0] == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", ["eps", "10 eps"])
def test_a_step_in_autocast(name: str) -> None:
    model = Net((FOLLOWING | FIXED)[name])

    def work() -> float:
        pipeline = cf.Pipeline(
            copy.deepcopy(model), mse_loss, "1f1b(workers=2, micro_batches=2)", optimizer=sgd, example=X
        )
        with torch.autocast("cpu", torch.bfloat16):
            return pipeline.step(X, Y).loss

    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.stack([mse_loss(model(x), y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)])
    assert run(work)[0] == pytest.approx(expected.mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["eps", "10 eps"])
def test_weights_that_are_cast_for_a_step(name: str) -> None:
    def work() -> Any:
        cf.Pipeline(
            Net((FOLLOWING | FIXED)[name]), mse_loss, "1f1b(workers=2, micro_batches=2)", optimizer=sgd,
            example=X, compute_dtype="bfloat16",
        )  # fmt: skip

    if name == "eps":
        run(work)
        return
    with pytest.raises(cf.ConfigError, match="compute_dtype casts weights, and the model's forward makes"):
        run(work)
