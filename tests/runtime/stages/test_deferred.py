"""Deferred batch norms: running statistics of whole mini-batches, whatever the schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import run


def numbers(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return 3 * x + 5, y


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def norms(momentum: float | None, *, again: bool = False) -> list[nn.Module]:
    """Norms of what no norm has normalised before: all that a mini-batch gives them one process has too."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)).double()
    every = [first, nn.Linear(4, 4).double()]
    return [Checkpointed(each) for each in every] if again else every


def statistics(state: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for name, tensor in state.items() if "running" in name or "num_batches" in name]


def trained(schedule: Schedule, layers: list[nn.Module], options: dict[str, Any]) -> list[Tensor]:
    pipeline = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        deferred_batch_norm=True,
        digest_every=1,
        **options,
    )
    for step in range(3):
        rows = slice(pipeline.replica, None, pipeline.replicas)
        pipeline.step(*(tensor[rows] for tensor in numbers(step)))
    return statistics(pipeline.model_state_dict())


@pytest.mark.table
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (schemes.dapple(2, 4), 1, {}),
        (schemes.chimera(2, 4), 2, {"barrier": False}),
        (schemes.chimera(2, 4, concat="backward-halving", split=True), 1, {}),
        (schemes.zb_h1(2, 4), 2, {"recompute": "layer"}),
    ],
    ids=str,
)
def test_statistics_are_those_of_one_process_that_sees_the_mini_batch(
    schedule: Schedule, replicas: int, options: dict[str, Any], momentum: float | None
) -> None:
    alone = nn.Sequential(*copy.deepcopy(norms(momentum)))
    for step in range(3):
        alone(numbers(step)[0])
    expected = statistics(alone.state_dict())
    for found in run(trained, schedule, norms(momentum), options, workers=schedule.workers * replicas):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_in_the_users_own_checkpoints_they_do_not_follow_the_order_of_backwards() -> None:
    found = [
        run(trained, schedule, norms(0.1, again=True), {})[0]
        for schedule in (schemes.dapple(2, 4), schemes.gpipe(2, 4), schemes.chimera(2, 4))
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)
    alone = nn.Sequential(*norms(0.1))
    for step in range(3):
        alone(numbers(step)[0])
    torch.testing.assert_close(found[0][0], statistics(alone.state_dict())[0], rtol=1e-12, atol=1e-12)


def test_norms_outside_a_step_and_in_evaluation_mode_are_plain_ones() -> None:
    def work() -> None:
        layers = norms(0.1)
        pipeline = Pipeline(
            layers,
            nn.functional.mse_loss,
            schemes.dapple(1, 4),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            deferred_batch_norm=True,
        )
        norm = next(m for m in pipeline.stages[0].layers[0].module.modules() if isinstance(m, nn.BatchNorm1d))
        plain = nn.BatchNorm1d(4).double()
        assert norm.state_dict().keys() == plain.state_dict().keys()
        x = numbers(0)[0]
        torch.testing.assert_close(norm(x), plain(x))
        torch.testing.assert_close(statistics(norm.state_dict()), statistics(plain.state_dict()))
        norm.eval()
        before = copy.deepcopy(norm.state_dict())
        pipeline.step(*numbers(1))
        pipeline.evaluate(*numbers(2))
        torch.testing.assert_close(norm.state_dict(), before)

    run(work, workers=1)


@pytest.mark.parametrize(
    ("schedule", "norm", "words"),
    [
        (
            schemes.pipedream(2),
            nn.BatchNorm1d(4),
            "deferred_batch_norm: pipedream begins a mini-batch before",
        ),
        (
            schemes.dapple(2, 4),
            nn.InstanceNorm1d(4, track_running_stats=True),
            "running statistics of a InstanceNorm1d cannot be summed",
        ),
    ],
)
def test_what_cannot_be_deferred_is_refused(schedule: Schedule, norm: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(trained, schedule, [nn.Linear(4, 4), norm], {})
