"""Bytes saved for backward: counted by the engine and predicted by the simulator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import counterflow as cf
from counterflow.common.tensors.graphs import graph_of
from counterflow.measure.stages.stage_record import StageCost
from counterflow.measure.stages.timing import measure_stages
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.saved_bytes import SavedBytes, SavedStorage
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

EXAMPLE = GPTConfig(layers=6, hidden=32, heads=4, vocabulary=64, positions=16, dropout=0.0)
SAMPLES = 2

SCHEDULES = [
    schemes.gpipe(4, 6),
    schemes.gpipe(2, 4, groups=2),
    schemes.dapple(4, 6),
    schemes.interleaved(2, 4, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 4),
    schemes.chimera(4, 8, pairs=2),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.mixpipe(4, 4, injected=2, early_forwards=1),
    schemes.mixpipe(4, 8, injected="max"),
    schemes.hanayo(2, 4, waves=1),
    schemes.hanayo(2, 4, waves=2),
    schemes.zb_h1(4, 6),
    schemes.zb_h2(3, 6),
    schemes.zb_v(2, 5),
    schemes.v_half(4, 5),
    schemes.interleaved_zb(2, 4),
    schemes.dualpipe(4, 8),
    schemes.chimera(4, 4, split=True),
]
SLICED = [
    schemes.dapple(stages=4, micro_batches=3, slices=4),
    schemes.dapple(stages=2, micro_batches=2, slices=8),
    schemes.zb_h1(stages=3, micro_batches=4, slices=2),
    schemes.chimera(stages=2, micro_batches=2, slices=(9, 7)),
]


def _work(schedule: Schedule, recompute: Any, **options: Any) -> tuple[list[StageCost], int]:
    with torch.device("meta"):
        layers = EXAMPLE.build()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = EXAMPLE.sample(SAMPLES * schedule.micro_batches, generator=generator)
    pipeline = Pipeline(
        layers,
        EXAMPLE.loss,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        recompute=recompute,
        **options,
    )
    costs = measure_stages(pipeline, inputs, targets, repeats=1)
    pipeline.step(inputs, targets)
    return costs, pipeline.peak_saved_bytes


class _Adds(torch.nn.Linear):
    def forward(self, pair: Any) -> torch.Tensor:
        x, skipped = pair
        found: torch.Tensor = super().forward(x) + skipped.tanh()
        return found


def _skipping(schedule: Schedule, recompute: Any) -> tuple[list[StageCost], int]:
    past, after = cf.Skip("past the next stage"), cf.Skip("to the next stage")
    layers = [
        torch.nn.Sequential(torch.nn.Linear(8, 64), past.saver()),
        torch.nn.Sequential(torch.nn.Linear(64, 32), after.saver()),
        torch.nn.Sequential(after.loader(), _Adds(32, 32)),
        torch.nn.Sequential(torch.nn.Linear(32, 64), past.loader(), _Adds(64, 64)),
    ]
    inputs, targets = torch.ones(4 * schedule.micro_batches, 8), torch.ones(4 * schedule.micro_batches, 64)
    pipeline = Pipeline(
        layers, torch.nn.functional.mse_loss, schedule, optimizer=_sgd, recompute=recompute, cuts=[1, 2, 3]
    )
    costs = measure_stages(pipeline, inputs, targets, repeats=1)
    pipeline.step(inputs, targets)
    return costs, pipeline.peak_saved_bytes


class _Remembers(torch.nn.Module):
    """Has a recurrent state that is larger than what a slice takes."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = cf.Carry()
        self.up, self.down = torch.nn.Linear(32, 256), torch.nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = self.up(x).cumsum(1) + self.carry.take(0.0)
        self.carry.leave(sums[:, -1:].clone())
        found: torch.Tensor = x + self.down(sums.tanh())
        return found


def _remembering(schedule: Schedule, recompute: Any) -> tuple[list[StageCost], int]:
    inputs = torch.ones(SAMPLES * schedule.micro_batches, 64, 4)
    pipeline = Pipeline(
        [torch.nn.Linear(4, 32), *(_Remembers() for _ in range(4)), torch.nn.Linear(32, 4)],
        torch.nn.functional.mse_loss,
        schedule,
        optimizer=_sgd,
        recompute=recompute,
    )
    costs = measure_stages(pipeline, inputs, -inputs, repeats=1)
    pipeline.step(inputs, -inputs)
    return costs, pipeline.peak_saved_bytes


class _AddsLoss(torch.nn.Linear):
    """Adds to the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x.tanh())
        cf.add_loss(found.logsumexp(-1).square().mean())
        return x + found


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_layers_that_add_to_the_loss(recompute: Any) -> None:
    schedule = schemes.zb_h1(3, 4)

    def work() -> tuple[list[StageCost], int]:
        model = [torch.nn.Linear(4, 32), *(_AddsLoss(32, 32) for _ in range(4)), torch.nn.Linear(32, 4)]
        loss = torch.nn.functional.mse_loss
        pipeline = Pipeline(model, loss, schedule, optimizer=_sgd, recompute=recompute)
        inputs = torch.ones(SAMPLES * schedule.micro_batches, 64, 4)
        costs = measure_stages(pipeline, inputs, -inputs, repeats=1)
        pipeline.step(inputs, -inputs)
        return costs, pipeline.peak_saved_bytes

    _is_predicted(schedule, recompute, launch(work, workers=3, transport="local"), within=0.05)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_a_recurrent_state_counts_for_each_slice(recompute: Any) -> None:
    for schedule in (
        schemes.dapple(stages=2, micro_batches=3, slices=4),
        schemes.zb_h1(stages=2, micro_batches=3, slices=8),
    ):
        found = launch(_remembering, schedule, recompute, workers=2, transport="local")
        costs = found[0][0]
        assert [cost.profile.state_bytes for cost in costs] == [0, 0]
        assert [cost.profile.slice_state_bytes for cost in costs] == [2 * SAMPLES * 256 * 4] * 2
        # What is missing are gradients of states on the way, and states that nothing saves.
        _is_predicted(schedule, recompute, found, within=0.05)


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_skips_are_measured_with_their_stages(recompute: Any) -> None:
    found = launch(_skipping, schemes.dapple(4, 4), recompute, workers=4, transport="local")
    costs = found[0][0]
    assert [cost.profile.output_bytes for cost in costs] == [4 * 4 * 64, 4 * 4 * 32, 4 * 4 * 32, 0]
    assert [[(s.targets, s.size_bytes, s.once) for s in cost.skips] for cost in costs] == [
        [((3,), 4 * 4 * 64, False)], [((2,), 4 * 4 * 32, False)], [], []
    ]  # fmt: skip
    assert costs[3].input_bytes == 4 * 4 * 32 + 4 * 4 * 64
    _is_predicted(schemes.dapple(4, 4), recompute, found)


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_count_is_the_prediction(schedule: Schedule, recompute: Any) -> None:
    found = launch(_work, schedule, recompute, workers=schedule.workers, transport="local")
    _is_predicted(schedule, recompute, found)


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", SLICED, ids=str)
def test_of_slices_states_count_where_the_rest_is_computed_again(schedule: Schedule, recompute: Any) -> None:
    found = launch(_work, schedule, recompute, workers=schedule.workers, transport="local")
    costs = found[0][0]
    keys_and_values = 2 * SAMPLES * EXAMPLE.positions * EXAMPLE.hidden * 4
    assert sum(cost.profile.state_bytes for cost in costs) == EXAMPLE.layers * keys_and_values
    assert all(0 <= cost.profile.attention_share + cost.profile.fixed_share <= 1 for cost in costs)
    _is_predicted(schedule, recompute, found)


@pytest.mark.parametrize("how", ["autocast", "compute_dtype"])
def test_cast_weights_count_once(how: str) -> None:
    """With one worker: torch's autocast has one cache for all threads, and each of them drops it."""
    options: dict[str, Any] = {how: torch.bfloat16}
    found = launch(partial(_work, schemes.gpipe(1, 4), "none", **options), workers=1, transport="local")
    (((cost,), counted),) = found
    assert 0 < cost.profile.cast_bytes <= cost.profile.weights_bytes / 2
    assert counted == pytest.approx(4 * cost.activation_bytes + cost.profile.cast_bytes, rel=0.02)


def _is_predicted(
    schedule: Schedule, recompute: Any, found: list[tuple[list[StageCost], int]], *, within: float = 0.02
) -> None:
    costs = found[0][0]
    memory = cf.ByteCosts(
        activations=[cost.activation_bytes for cost in costs],
        kept_for_weights=[cost.kept_bytes for cost in costs],
        inputs=[cost.input_bytes for cost in costs],
        beyond_inputs=[cost.beyond_input_bytes for cost in costs],
        layers=[cost.layers for cost in costs],
        layer_inputs=[cost.layer_input_bytes for cost in costs],
        largest_layer=[cost.largest_layer_bytes for cost in costs],
        state=[cost.profile.state_bytes for cost in costs],
        slice_state=[cost.profile.slice_state_bytes for cost in costs],
        state_gradients=0.0,  # are not counted as saved
    )
    predicted = cf.simulate(schedule, cf.Costs(recompute=recompute, memory=memory)).memory
    assert predicted is not None
    for use, (_, counted) in zip(predicted, found, strict=True):
        assert counted == pytest.approx(use.peak, rel=within)


def test_a_storage_counts_once_and_weights_do_not() -> None:
    weight = torch.ones(10, requires_grad=True)
    count = SavedBytes([weight])
    held: list[SavedStorage] = []
    x = torch.ones(10, requires_grad=True)
    y = (x * weight) * x[:5].sum()
    count.count_graph(graph_of([y]), held)
    # x once (it is multiplied, and its slice summed), the product, and the sum.
    assert count.current == 40 + 40 + 4
    count.release(held)
    assert (count.current, count.peak) == (0, 84)
