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
        recompute="stage" if which == "recompute" and other else "none",
        timeout_seconds=30.0 if other else 20.0,  # which may differ
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
        ("recompute", "recompute = 'none', and rank 1 recompute = 'stage'"),
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


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Other(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale


Other.__name__, Other.__qualname__ = Scaled.__name__, Scaled.__qualname__


def one_differs(which: str) -> float:
    other = current_transport().rank == 1
    if which == "weights":
        torch.manual_seed(5 + other)
    layers: list[nn.Module] = [Scaled(1.0) for _ in range(4)]
    if which == "source" and other:
        layers[2] = Other(1.0)
    if which == "attribute" and other:
        layers[2] = Scaled(2.0)
    if which == "later seed":
        torch.manual_seed(5 + other)
    pipeline = Pipeline(
        layers,
        nn.functional.l1_loss if which == "loss" and other else nn.functional.mse_loss,
        schemes.dapple(2, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        seed=1 if which == "seed" and other else 0,
    )
    return pipeline.step(torch.ones(8, 2), torch.ones(8, 2)).loss


@pytest.mark.parametrize(
    ("which", "told"),
    [
        (
            "source",
            r"2 of the model is .*\.Scaled \(source \w+\) on rank 0, and .*\.Scaled \(source \w+\) on",
        ),
        ("attribute", r"2\.scale of the model is 1\.0 on rank 0, and 2\.0 on rank 1; give all workers the"),
        ("loss", r"the loss function is torch\.nn\.functional\.mse_loss on rank 0, and .*l1_loss on rank 1"),
        ("seed", "rank 0 was given seed = 0, and rank 1 seed = 1"),
        ("weights", r"ranks 0 and 1 made linear\.weight of layer 0 with other .*torch's seed is 5 on the"),
    ],
)
def test_another_model_on_one_worker_is_refused(which: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        launch(one_differs, which, workers=2, transport="local", timeout_seconds=20)


def test_seeds_may_differ_once_the_model_is_made() -> None:
    found = launch(one_differs, "later seed", workers=2, transport="local", timeout_seconds=20)
    assert found[0] == found[1]


def test_another_version_on_one_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def versions() -> dict[str, object]:
        return {"torch": "2.13.1" if current_transport().rank == 1 else "2.13.0"}

    monkeypatch.setattr("counterflow.runtime.assembly.pipeline_arguments.versions", versions)
    with pytest.raises(
        ConfigError, match=r"rank 0 was given torch = '2\.13\.0', and rank 1 torch = '2\.13\.1'"
    ):
        launch(work, "nothing", workers=2, transport="local", timeout_seconds=20)
