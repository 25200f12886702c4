"""What workers are given differently is refused before it trains another model, or hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import schemes


def work(which: str) -> None:
    other = current_transport().rank == 1
    count = 5 if which == "layers" and other else 4
    every: dict[str, dict[str, Any]] = {
        "cuts": {"cuts": [3 if other else 2]},
        "clip_norm": {"clip_norm": 1.0 if other else None},
        "barrier": {"barrier": other},
        "layers": {"cuts": [2]},
    }
    schedule = schemes.dapple(2, 8 if which == "schedule" and other else 4)
    Pipeline(
        [nn.Linear(2, 2) for _ in range(count)],
        nn.functional.mse_loss,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        recompute="stage" if other else "none",  # which may differ
        **every.get(which, {}),
    ).step(torch.ones(8, 2), torch.ones(8, 2))


@pytest.mark.parametrize(
    ("which", "told"),
    [
        (
            "cuts",
            r"rank 0 was given cuts = \(2,\), and rank 1 cuts = \(3,\); give all workers the same; costs",
        ),
        ("layers", "layers = 4, and rank 1 layers = 5"),
        ("schedule", r"schedule = dapple\(stages=2, micro_batches=4\), and rank 1 schedule = dapple"),
        ("clip_norm", "clip_norm = None, and rank 1 clip_norm = 1.0"),
        ("barrier", "barrier = False, and rank 1 barrier = True"),
    ],
)
def test_what_differs_by_worker_is_refused(which: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        launch(work, which, workers=2, transport="local", timeout_seconds=20)


def test_what_may_differ_does() -> None:
    launch(work, "nothing", workers=2, transport="local", timeout_seconds=20)


def test_a_pipeline_whose_other_workers_fail_is_told_so() -> None:
    seen: list[BaseException] = []

    def one() -> None:
        if current_transport().rank == 1:
            raise ValueError("nobody comes")
        try:
            work("nothing")
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(WorkerError, match="nobody comes"):
        launch(one, workers=2, transport="local", timeout_seconds=20)
    (error,) = seen
    assert isinstance(error, WorkerError)
    assert str(error).startswith("rank 0, making its Pipeline: worker of rank 1 failed: ")
