"""Gradients that there are not: None on both sides of a border, whatever the numbers of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.messages.absent import absent, is_absent
from counterflow.runtime.messages.compression import Compression
from counterflow.runtime.messages.message_queue import MessageQueue
from counterflow.runtime.messages.values import BufferPool, TensorSpec
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes

CPU = torch.device("cpu")


def spec(dtype: torch.dtype, *shape: int) -> TensorSpec:
    return TensorSpec(torch.Size(shape), dtype, requires_grad=True)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
)
def test_nothing_that_is_computed_is_taken_for_none(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (2, 3)):
        of = spec(dtype, *shape)
        assert is_absent(absent(of, CPU))
        zeros = torch.zeros(shape, dtype=dtype)
        bad = zeros / 0
        for tensor in (zeros, bad, bad * -1, bad + torch.inf, torch.full(shape, torch.nan, dtype=dtype)):
            assert not is_absent(tensor)
    partly = absent(spec(dtype, 4), CPU)
    partly[2] = 1
    assert not is_absent(partly)
    assert not is_absent(torch.empty(0, dtype=dtype))


def test_it_goes_in_messages_of_half_precision() -> None:
    compression = Compression(torch.device("cpu"))
    there, none = torch.ones(3), absent(spec(torch.float32, 2), CPU)
    message, full = compression.pack([there, none])
    specs = [spec(torch.float32, 3), spec(torch.float32, 2)]
    found = compression.unpack(message, specs, BufferPool(CPU), lambda: full)
    assert [is_absent(tensor) for tensor in found] == [False, True]


class Forks(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x * self.bias


class Joins(nn.Linear):
    def forward(self, given: Any) -> Tensor:
        x, aside = given
        return super().forward(x) if float(aside.detach().flatten()[0]) > 0 else super().forward(x + aside)


def _steps(signs: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = [Forks(2, 2), Joins(2, 2)]
    nn.init.ones_(layers[0].bias)
    pipeline = Pipeline(layers, nn.functional.mse_loss, schemes.dapple(2, 2), optimizer=torch.optim.SGD)
    for sign in signs:
        pipeline.step(sign * torch.ones(4, 2), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("signs", "message"),
    [
        ((-1, -1, 1), "has no gradient for input 1 .* where it had one"),
        ((1, 1, -1), "a gradient .* had none"),
    ],
)
def test_where_messages_are_not_looked_into_a_change_is_refused(
    signs: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = MessageQueue.__init__

    def blind(self: MessageQueue, *args: Any) -> None:
        begin(self, *args)
        self.reads = False

    monkeypatch.setattr(MessageQueue, "__init__", blind)
    launch(_steps, signs[:2], workers=2, transport="local")
    with pytest.raises(ConfigError, match=f"stage 1 .*{message}.*dynamic_shapes=True"):
        launch(_steps, signs, workers=2, transport="local", timeout_seconds=20)
