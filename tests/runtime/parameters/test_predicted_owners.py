"""The planner's bytes of sharded optimiser state are those that workers have, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.planning import (
    Cluster,
    Configuration,
    LayerProfile,
    LayerTie,
    Link,
    Model,
    Predictor,
    Profile,
)
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule


def layers() -> list[nn.Module]:
    """Of odd sizes; the first and the last share a weight, which both use as it is."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(4, 5 + i), nn.Linear(5 + i, 4, bias=i % 2 == 0)) for i in range(6)]
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return [first, *inner, last]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(dim=1).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def state_bytes(schedule: Schedule, cuts: tuple[int, ...]) -> int:
    """What this worker's optimisers keep, without their counts of steps."""
    pipeline = Pipeline(layers(), mean_square, schedule, optimizer=adamw, zero_stage=1, cuts=cuts)
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    pipeline.step(x, y)
    return sum(
        value.nbytes
        for optimizer in pipeline.optimizers.values()
        for kept in optimizer.state.values()
        for value in kept.values()
        if isinstance(value, Tensor) and value.dim()
    )


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [(schemes.chimera(4, 4), 1), (schemes.dapple(2, 4), 2), (schemes.chimera(2, 2), 2)],
)
def test_optimiser_state_is_predicted_to_the_byte(schedule: Schedule, replicas: int) -> None:
    sizes = [tuple(float(p.nbytes) for p in layer.parameters()) for layer in layers()]
    costs = {
        f"layer-{i}": LayerProfile((1.0,), (1.0,), (2.0,), (8.0,), sum(row), 16.0, parameter_bytes=row)
        for i, row in enumerate(sizes)
    }
    model = Model("m", tuple(costs), optimizer_states=2.0, ties=(LayerTie((0, 7), 64.0),))
    cluster = Cluster("c", 1, 4, 1e9, Link(0, 0), Link(0, 0))
    cuts = tuple(8 * stage // schedule.stages for stage in range(1, schedule.stages))
    measured = launch(
        state_bytes,
        schedule,
        cuts,
        workers=schedule.workers * replicas,
        transport="local",
        timeout_seconds=30,
    )
    options = {name: value for name, value in schedule.options if name in ("stages", "micro_batches")}
    plan = Configuration.of(schedule.scheme, options, replicas, 1, cuts=cuts, zero_stage=1)
    play = Predictor(model, Profile("p", "m", "2026-01-01", costs), cluster).play(plan)
    assert play.sharded is not None
    assert [2 * size for row in play.sharded.owned for size in row] == measured
    most = [max(measured[worker :: schedule.workers]) for worker in range(schedule.workers)]
    assert [2 * size for size in play.sharded.most] == most
