"""A fork of a worker cannot use its pipeline, says so, and disturbs nobody."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss

import counterflow as cf


def outcome_of_fork(call: Callable[..., object]) -> str:
    """Error of a call in a fork of this process; empty: none."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            call()
            text = ""
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    return text


def work() -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    pipeline = cf.Pipeline(
        layers, mse_loss, "1f1b(workers=2, micro_batches=2)", optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    x = torch.randn(4, 4)
    losses = [pipeline.step(x, x).loss]
    calls: list[Callable[..., object]] = [
        lambda: pipeline.step(x, x),
        pipeline.close,
        pipeline.model_state_dict,
        lambda: None,
    ]
    outcomes = list(map(outcome_of_fork, calls))
    losses.append(pipeline.step(x, x).loss)
    return outcomes, losses


def test_calls_in_a_fork_are_refused_and_the_workers_go_on() -> None:
    for outcomes, losses in cf.launch(work, workers=2, transport="gloo", threads=1):
        *refused, accepted = outcomes
        for outcome in refused:
            assert outcome.startswith("ConfigError: the pipeline is of process ")
            assert "this one is a fork of it" in outcome
        assert not accepted
        assert losses[1] < losses[0]
