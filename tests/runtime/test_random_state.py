"""Calls of a pipeline leave torch's generator as it was: samplers of all workers go on alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import counterflow as cf


def changing_calls(is_found: bool) -> list[str]:
    """Return the calls that changed this worker's generator."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    options: dict[str, Any] = {"example": x} if is_found else {}
    before = torch.get_rng_state()
    pipeline = cf.Pipeline(
        nn.Sequential(*layers) if is_found else layers,
        nn.functional.mse_loss,
        "1f1b(workers=2, micro_batches=2)",
        optimizer=partial(torch.optim.SGD, lr=0.1),
        witness_every=1,
        **options,
    )
    calls: dict[str, Callable[[], Any]] = {
        "making it": lambda: None,
        "evaluate": lambda: pipeline.evaluate(x, y),
        "step": lambda: pipeline.step(x, y),
        "evaluate after a step": lambda: pipeline.evaluate(x[:7], y[:7]),
        "start_evaluation": lambda: pipeline.start_evaluation(x, y).result(),
        "predict": lambda: pipeline.predict(x),
        "memory": lambda: pipeline.memory(x, y),
        "state_dict": pipeline.state_dict,
        "model_state_dict": pipeline.model_state_dict,
    }
    changing = []
    for name, call in calls.items():
        call()
        if not torch.equal(torch.get_rng_state(), before):
            changing.append(name)
        before = torch.get_rng_state()
    pipeline.close()
    return changing


def work() -> list[list[str]]:
    return [changing_calls(is_found) for is_found in (True, False)]


def test_calls_leave_the_generator_as_it_was() -> None:
    """Processes, with and without the last stage: threads share generators, which each layer restores."""
    assert cf.launch(work, workers=2, threads=1) == [[[], []]] * 2
