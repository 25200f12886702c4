"""Sums of gradients start at their turn: in the order of the proved lists, on every communicator alike."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import counterflow as cf
from counterflow.program.actions import Compute, StartSync
from counterflow.runtime.transport.base import Group
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.ir import Schedule

STEPS = 3

Sums = list[tuple[tuple[int, ...], int]]
"""The sums that a worker starts: the ranks of each, and its stage."""


def started(schedule: Schedule, sync: Any, barrier: bool) -> tuple[Sums, list[int], bool]:
    """What a worker gives its communicators, the stages whose sums its list starts, and if ops follow one."""
    layers = [nn.Linear(3, 3) for _ in range(schedule.stages)]
    pipeline = cf.Pipeline(
        layers,
        mse_loss,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sync=sync,
        barrier=barrier,
    )
    stage_of = {
        flat.buffer.untyped_storage().data_ptr(): stage
        for stage, groups in pipeline.weights.placement.by_stage.items()
        for group in groups
        for flat in group._flats
    }
    transport, found = pipeline.transport, []
    all_reduce = transport.all_reduce

    def all_reduce_(tensor: Tensor, group: Group) -> Any:
        stage = stage_of.get(tensor.untyped_storage().data_ptr())
        if stage is not None:
            found.append((group.ranks, stage))
        return all_reduce(tensor, group)

    transport.all_reduce = all_reduce_  # type: ignore[method-assign]
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        pipeline.step(*torch.randn(2, 8, 3, generator=draw))
    pipeline.flush()
    actions = [task.action for task in pipeline._engine.runner.lists[0]]
    starts = [number for number, action in enumerate(actions) if isinstance(action, StartSync)]
    early = any(isinstance(action, Compute) for action in actions[starts[0] :])
    return found, [action.stage for action in actions if isinstance(action, StartSync)], early


@pytest.mark.table
@pytest.mark.parametrize("transport", ["local", "strict-nccl"])
@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize(
    ("schedule", "replicas", "sync"),
    [
        (cf.schemes.chimera(4, 4), 1, "eager"),
        (cf.schemes.chimera(4, 4), 1, "eager-opt"),
        (cf.schemes.interleaved(2, 4, 2), 2, "eager"),
        (cf.schemes.dualpipe(2, 4), 1, "eager"),
    ],
    ids=str,
)
def test_sums_start_in_the_order_of_the_lists(
    schedule: Schedule, replicas: int, sync: Any, barrier: bool, transport: Literal["local", "strict-nccl"]
) -> None:
    workers = schedule.workers * replicas
    found = launch(started, schedule, sync, barrier, workers=workers, transport=transport, timeout_seconds=60)
    by_communicator: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for sums, stages, _ in found:
        assert [stage for _, stage in sums] == STEPS * stages
        for ranks in {ranks for ranks, _ in sums}:
            by_communicator[ranks].add(tuple(stage for its, stage in sums if its == ranks))
    assert by_communicator
    assert all(len(orders) == 1 for orders in by_communicator.values())
    assert any(early for _, _, early in found)  # some do not wait for the last op
