"""A mini-batch goes with its step, without Python's garbage collector."""

from __future__ import annotations

import gc
from functools import partial

import torch
from torch import nn

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
