"""Messages in half precision: what is restored, and training with them."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from counterflow.runtime.messages.compression import Compression
from counterflow.runtime.messages.values import BufferPool, TensorSpec
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial

from ...kit import sgd

CPU = torch.device("cpu")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def there_and_back(tensors: list[Tensor]) -> tuple[list[Tensor], Compression]:
    compression = Compression(torch.device("cpu"))
    message = compression.pack(tensors)
    specs = [TensorSpec.of(tensor) for tensor in tensors]
    assert [TensorSpec.of(part) for part in message] == compression.message(specs)
    return compression.unpack(message, specs, BufferPool(CPU)), compression


@given(st.lists(FLOATS, min_size=1, max_size=8), st.sampled_from([torch.float32, torch.float64]))
def test_what_is_restored_is_close(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    (found,), _ = there_and_back([tensor])
    assert found.dtype is dtype
    largest = max(map(abs, values))
    for ours, value in zip(found.tolist(), values, strict=True):
        limit = abs(value) * 2**-11 if abs(value) >= largest * 2**-28 else largest * 2**-39
        assert abs(ours - value) <= limit
    assert bool(found.any()) == bool(tensor.any())


@given(st.lists(st.integers(-2048, 2048), min_size=1, max_size=8), st.integers(-1000, 1000))
def test_what_half_precision_holds_is_restored_exactly(values: list[int], exponent: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float64) * 2.0**exponent
    (found,), _ = there_and_back([tensor])
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_restored_with_all_else(value: float) -> None:
    tensor = torch.tensor([0.0, value, 2.0**-130, -3 * 2.0**-130])
    (found,), _ = there_and_back([tensor])
    assert torch.equal(found.nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_other_types_go_as_they_are() -> None:
    tensors = [torch.tensor([3, 4]), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(3)]
    found, compression = there_and_back(tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert compression.sent_bytes == 16 + 4 + 6 + 4


def _train(
    schedule: Schedule, layers: list[nn.Module], loss: Any, batches: Any, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], int, int]:
    pipeline = Pipeline(deepcopy(layers), loss, schedule, **options)
    steps = [pipeline.step(*row[0]) for row in batches] + pipeline.flush()
    losses = [step.loss for step in steps if step.reports_step is not None]
    used = pipeline.compression or Compression(torch.device("cpu"))
    return losses, pipeline.model_state_dict(), used.plain_bytes, used.sent_bytes


@pytest.mark.parametrize(
    "schedule",
    [
        schemes.interleaved(2, 4, chunks=2),
        schemes.chimera(4, 4, concat="backward-halving"),
        schemes.wpipe(2, 4),
    ],
    ids=str,
)
def test_training_with_smaller_messages(schedule: Schedule) -> None:
    trial = small_trial(schedule, steps=8, dtype=torch.float32)
    job = trial.layers, trial.loss, trial.batches
    options = {"optimizer": trial.optimizer, "compress": True}
    workers = schedule.workers
    found = launch(_train, schedule, *job, options, workers=workers, transport="strict-local")
    plain = launch(_train, schedule, *job, options | {"compress": False}, workers=workers, transport="local")
    for (losses, state, whole, sent), (expected, other, *_) in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-2)
        assert losses != expected
        assert all(torch.allclose(state[name], other[name], atol=1e-2) for name in state)
        assert whole == 0 or 0.5 < sent / whole < 0.6  # the head takes 2 bytes a tensor


class Shrink(nn.Module):
    """Activations so small that no power of two of float32 brings them into float16's range."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factor * self.weight


@pytest.mark.parametrize("transport", ["strict-local", "gloo"])
def test_the_smallest_activations_are_close(transport: Any) -> None:
    layers = [Shrink(1e-38), Shrink(1.0), Shrink(1e38)]
    schedule = schemes.dapple(3, 4)
    generator = torch.Generator().manual_seed(0)
    batches = [
        [(torch.rand(8, 3, generator=generator), torch.rand(8, 3, generator=generator))] for _ in range(3)
    ]
    options = {"optimizer": sgd, "cuts": (1, 2), "compress": True}
    job = schedule, layers, nn.functional.mse_loss, batches
    found = launch(_train, *job, options, workers=3, transport=transport)
    plain = launch(_train, *job, options | {"compress": False}, workers=3, transport="local")
    assert found[0][0] == pytest.approx(plain[0][0], rel=1e-3)
