"""Recomputations as ops of their own: beside the wait for a gradient, and anywhere before their backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.execution.tasks import RunOp
from counterflow.runtime.mini_batch.batch import Batch
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.verification.training_agreement import verify

from ...kit import sgd


class Counting(nn.Linear):
    """Counts its forwards."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x)


def test_a_stage_is_computed_again_before_the_gradient_is_waited_for() -> None:
    def work() -> list[tuple[str, int]]:
        layers = [Counting(4, 4), Counting(4, 4)]
        pipeline = Pipeline(
            layers, nn.MSELoss(), schemes.dapple(2, 1), optimizer=sgd, recompute="stage", witness_every=0
        )
        batch = torch.ones(2, 4), torch.zeros(2, 4)
        pipeline.step(*batch)  # the first one has checks
        (copy,) = pipeline.stages.values()
        layer = copy.layers[0].module
        assert isinstance(layer, Counting)
        layer.runs = 0
        seen: list[tuple[str, int]] = []

        def noted(task: RunOp) -> Any:
            take = task.receive

            def taken(batch: Batch) -> Any:
                seen.append((str(task.op), layer.runs))
                return take(batch)

            return taken

        for tasks in pipeline._engine.runner.lists:
            for task in tasks:
                if isinstance(task, RunOp):
                    task.receive = noted(task)  # type: ignore[method-assign]
        pipeline.step(*batch)
        assert [str(op) for op, _, _ in pipeline.timeline(0)[pipeline.worker]] == [op for op, _ in seen]
        return seen

    for stage, found in enumerate(launch(work, workers=2, transport="local", timeout_seconds=30)):
        assert found == [(f"F0.{stage}", 0), (f"R0.{stage}", 1), (f"B0.{stage}", 2)]


def early(schedule: Schedule) -> Schedule:
    """The schedule with each recomputation as early as it may be: after its forward and what follows that."""
    found = with_recomputations(schedule)

    def moved(order: tuple[Op, ...]) -> Iterator[Op]:
        again = [op for op in order if op.kind is OpKind.RECOMPUTATION]
        done: set[tuple[int, int, int, int]] = set()
        for op in order:
            if op.kind is OpKind.RECOMPUTATION:
                continue
            yield op
            if op.kind is OpKind.FORWARD:
                done |= {(op.pipe, op.stage, op.part, m) for m in op.micro_batches}
            sliced = found.workload.slices > 1
            ready = [
                r
                for r in again
                if done.issuperset((r.pipe, r.stage, r.part if sliced else 0, m) for m in r.micro_batches)
            ]
            yield from ready[1:]  # the last one waits, as one may
            again = [r for r in again if r not in ready[1:]]

    orders = [list(moved(order)) for order in found.orders]
    for order in orders:  # those that waited are before their backwards
        left = [op for op in order if op.kind.again and op.kind.makes]
        for op in left:
            again = op._replace(kind=OpKind.RECOMPUTATION)
            if again not in order:
                order.insert(order.index(op), again)
    return replace(found, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize(
    "schedule",
    [
        schemes.gpipe(2, 4),
        schemes.chimera(2, 4, concat="forward-doubling"),
        schemes.chimera(2, 4, concat="backward-halving", split=True),
        schemes.zb_v(2, 4),
        schemes.dapple(stages=2, micro_batches=2, slices=2),
    ],
    ids=str,
)
def test_recomputations_anywhere_before_their_backwards_give_the_same(schedule: Schedule) -> None:
    """As a computed order has them where memory allows, with draws that a second forward repeats."""
    moved = early(schedule)
    cf.check(moved)
    assert moved != with_recomputations(schedule)
    model = GPTConfig(layers=6, hidden=8, heads=2, vocabulary=11, positions=8, dropout=0.25)
    sliced = schedule.workload.slices > 1
    if sliced:  # masks of parts of a sequence are others than those of the whole
        model = replace(model, dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    batches = [[model.sample(2 * schedule.micro_batches, generator=generator)] for _ in range(2)]
    found = verify(moved, model.build(), model.loss, batches, optimizer=sgd, recompute="stage")
    assert found.ok, found


def test_a_schedule_with_recomputations_needs_them() -> None:
    schedule = with_recomputations(schemes.dapple(1, 2))

    def work() -> None:
        Pipeline([nn.Linear(2, 2)], nn.MSELoss(), schedule, optimizer=sgd)

    with pytest.raises(ConfigError, match=r"recomputes whole stages \(R\), but recompute='none'; give"):
        launch(work, workers=1, transport="local")
