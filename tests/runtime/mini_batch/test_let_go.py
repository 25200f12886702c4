"""A mini-batch goes with its step, without Python's garbage collector."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.measure.stages.allocations import allocated
from counterflow.runtime.mini_batch.batch import Batch
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes


def _steps() -> int:
    """Mini-batches that are there after four steps."""
    made = partial(torch.optim.SGD, lr=0.1)
    one = schemes.dapple(1, 2)
    with Pipeline([nn.Linear(4, 4)], nn.functional.mse_loss, one, optimizer=made) as pipeline:
        gc.collect()
        before = [each for each in gc.get_objects() if type(each) is Batch]  # other tests'
        gc.disable()
        try:
            for _ in range(4):
                pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
            return sum(type(each) is Batch for each in gc.get_objects()) - len(before)
        finally:
            gc.enable()


def test_no_mini_batch_but_the_last_is_kept() -> None:
    assert launch(_steps, workers=1, transport="local") == [1]


def _kept_bytes() -> int:
    """What a step leaves, and does not find from the step before."""
    made = partial(torch.optim.SGD, lr=0.1)
    layers = [nn.Linear(4, 1000, bias=False)]
    with Pipeline(layers, nn.functional.mse_loss, schemes.dapple(1, 4), optimizer=made) as pipeline:
        pipeline.step(torch.ones(4, 4), torch.zeros(4, 1000))
        inputs, targets = torch.ones(8, 4), torch.zeros(8, 1000)
        with allocated() as found:
            pipeline.step(inputs, targets)
        return found.current


def test_losses_are_kept_without_those_of_their_elements() -> None:
    (kept,) = launch(_kept_bytes, workers=1, transport="local")
    assert kept < 8000  # those of one micro-batch


class Outputs(nn.Module):
    """A linear layer whose output has a structure."""

    def __init__(self, structure: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.structure = nn.Linear(4, 4), structure

    def forward(self, x: Tensor) -> Any:
        return self.structure(self.linear(x))


def _first(output: Any) -> Tensor:
    return torch.as_tensor(next(iter(output.values())) if isinstance(output, dict) else output[0])


def _circular_tensors(structure: Callable[[Tensor], Any], training: bool) -> list[tuple[int, ...]]:
    """Shapes of the tensors that steps, or evaluations, leave to Python's garbage collector."""
    layers = [nn.Linear(4, 4), Outputs(structure)]

    def loss(output: Any, target: Any) -> Tensor:
        return nn.functional.mse_loss(_first(output), _first(target))

    made = partial(torch.optim.SGD, lr=0.1)
    with Pipeline(layers, loss, schemes.dapple(1, 2), optimizer=made) as pipeline:
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(2):
                batch = torch.ones(6, 4), structure(torch.zeros(6, 4))
                (pipeline.step if training else pipeline.evaluate)(*batch)
            del batch
            gc.collect()
            return [tuple(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "structure",
    [lambda x: {"y": x}, lambda x: OrderedDict(y=x), lambda x: [x, x], lambda x: ((x,), x)[0]],
    ids=["dict", "ordered", "list", "tuple"],
)
def test_no_tensor_waits_for_the_garbage_collector(
    structure: Callable[[Tensor], Any], training: bool
) -> None:
    # Pytree's functions refer to themselves, and so hold what their arguments refer to.
    (shapes,) = launch(_circular_tensors, structure, training, workers=1, transport="local")
    assert shapes == []
