"""Asynchronous schemes against one process that keeps old weights, on threads with strict sends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.errors import ConfigError, WorkerError
from counterflow.program.segments import segments
from counterflow.runtime.execution.step import Step
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.versions import Versions
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial
from counterflow.verification.training_agreement import TrainingAgreement, compare

SCHEDULES: list[Schedule] = [
    *(schemes.pipedream(d) for d in (1, 2, 4)),
    *(schemes.pipedream_2bw(d, n) for d, n in ((1, 2), (2, 2), (2, 4), (4, 4), (4, 8))),
    *(schemes.wpipe(w, m) for w, m in ((1, 1), (1, 2), (2, 2), (2, 4), (2, 5), (4, 4), (4, 8))),
    *(schemes.wpipe(w, m, groups=g) for w, m, g in ((1, 3, 4), (2, 4, 3))),
]


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def agreement(
    schedule: Schedule,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float64,
    optimizer: Any = None,
    flush: bool = True,
    periods: int = 3,
    **options: Any,
) -> TrainingAgreement:
    """Some periods more than the warm-up; then a flush, and two periods more."""
    steps = segments(schedule, replicas=replicas).last + 1 + periods
    trial = small_trial(schedule, replicas=replicas, steps=steps + 2 * flush, dtype=dtype)
    if optimizer is not None:
        trial = replace(trial, optimizer=optimizer)
    return trial.verify(
        flush_after=(steps - 1,) if flush else (), **({"transport": "strict-local"} | options)
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_scheme_agrees_with_its_table(schedule: Schedule) -> None:
    found = agreement(schedule)
    assert found.ok, found


@pytest.mark.parametrize(
    "schedule", [schemes.pipedream(3), schemes.pipedream_2bw(2, 3), schemes.wpipe(2, 3)], ids=str
)
class TestOptions:
    @pytest.mark.table
    @pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
    def test_two_replicas_and_recomputation_agree(self, schedule: Schedule, recompute: str) -> None:
        found = agreement(schedule, replicas=2, recompute=recompute)
        assert found.ok, found

    def test_momentum_without_clipping_agrees(self, schedule: Schedule) -> None:
        found = agreement(schedule, optimizer=momentum, clip_norm=None, flush=False)
        assert found.ok, found

    def test_single_precision_agrees(self, schedule: Schedule) -> None:
        found = agreement(schedule, dtype=torch.float32)
        assert found.tolerance == 1e-5
        assert found.ok, found

    def test_dynamic_shapes_agree(self, schedule: Schedule) -> None:
        assert agreement(schedule, dynamic_shapes=True).ok

    def test_buffered_sends_agree(self, schedule: Schedule) -> None:
        assert agreement(schedule, transport="local").ok


def test_a_process_without_old_weights_differs() -> None:
    """The comparison would notice a wrong version."""
    schedule = schemes.pipedream_2bw(2, 2)
    trial = small_trial(schedule, steps=4)
    fresh = trial.one_process()
    late = trial.verify(reference=fresh)
    assert late.weight_error > 1e-4
    assert compare(fresh, [fresh]).ok


def linears(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(count)]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def numbers(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 3, generator=generator)


def run(function: Any, *args: Any, workers: int) -> list[Any]:
    found: list[Any] = launch(function, *args, workers=workers, transport="local", timeout_seconds=20)
    return found


def _steps(
    schedule: Schedule, layers: list[nn.Module], count: int
) -> tuple[list[Step], list[Step], dict[int, int], tuple[int, ...]]:
    pipeline = Pipeline(layers, mean_square, schedule, optimizer=momentum)
    steps = [pipeline.step(*numbers(8, seed)) for seed in range(count)]
    before = pipeline.in_flight
    flushed = pipeline.flush()
    assert (before, pipeline.in_flight) == (True, False)
    held = [copy.versions.stored for copy in pipeline.stages.values() if copy.versions is not None]
    return steps, flushed, pipeline.peak_versions, tuple(v for row in held for v in row)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schemes.pipedream(4), {0: 4, 1: 3, 2: 2, 3: 1}),
        (schemes.pipedream_2bw(4, 4), dict.fromkeys(range(4), 2)),
        (schemes.wpipe(2, 2), {0: 2, 1: 2, 2: 1, 3: 1}),
        (schemes.wpipe(2, 4, groups=3), {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}),
    ],
    ids=str,
)
def test_versions_held_are_those_of_the_table(schedule: Schedule, expected: dict[int, int]) -> None:
    found = run(_steps, schedule, linears(schedule.stages), 12, workers=schedule.workers)
    peaks = {stage: count for _, _, peaks, _ in found for stage, count in peaks.items()}
    assert peaks == expected
    assert all(held == () for _, _, _, held in found)  # after a flush only the optimiser's own are left


@pytest.mark.table
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", [schemes.pipedream(2), schemes.pipedream_2bw(2, 2)], ids=str)
def test_what_several_gathers_tell_is_of_the_right_steps(schedule: Schedule, replicas: int) -> None:
    found = agreement(schedule, replicas=replicas, periods=30)  # gathers of 8 and of 4, most of them in steps
    assert found.ok, found


@pytest.mark.parametrize(
    ("schedule", "together"),
    [(schemes.pipedream(2), 8), (schemes.pipedream_2bw(2, 2), 4), (schemes.pipedream_2bw(2, 8), 1)],
    ids=str,
)
def test_loss_and_norm_are_told_by_a_later_step(schedule: Schedule, together: int) -> None:
    count = 21
    steps, flushed, _, _ = run(_steps, schedule, linears(2), count, workers=2)[0]
    told = [step for step in steps if step.reports_step is not None]
    assert [step.number for step in steps] == list(range(count))
    assert math.isnan(steps[0].loss)
    assert steps[0].reports_step is None
    assert [step.reports_step for step in told + flushed] == list(range(count))
    late = {step.number - step.reports_step for step in told if step.reports_step is not None}
    assert len(late) == 1
    assert together <= late.pop() <= together + 3


def test_evaluation_and_weights_flush() -> None:
    layers = linears(2)

    def work() -> tuple[list[int | None], dict[str, torch.Tensor]]:
        pipeline = Pipeline(layers, mean_square, schemes.pipedream_2bw(2, 2), optimizer=momentum)
        steps = [pipeline.step(*numbers(4))]
        pipeline.evaluate(*numbers(4))
        steps += [pipeline.step(*numbers(4))]
        with pytest.raises(
            ConfigError, match=r"model_state_dict\(local=True\) while mini-batches are in flight"
        ):
            pipeline.model_state_dict(local=True)
        with pytest.raises(ConfigError, match=r"load_model_state_dict while .* call flush\(\) before"):
            pipeline.load_model_state_dict({})
        state = pipeline.model_state_dict()
        return [step.reports_step for step in steps + pipeline.flush()], state

    (about, state), (_, other) = run(work, workers=2)
    assert about == [None, None, 0, 1]
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_another_shape_needs_a_flush() -> None:
    layers = linears(2)

    def work(*, flush: bool) -> None:
        pipeline = Pipeline(layers, mean_square, schemes.pipedream_2bw(2, 2), optimizer=momentum)
        pipeline.step(*numbers(4))
        if flush:
            pipeline.flush()
        pipeline.step(*numbers(6))
        pipeline.flush()

    launch(work, workers=2, transport="local", flush=True)
    with pytest.raises(ConfigError, match="step 1 was given 6 samples, the one before 4"):
        launch(work, workers=2, transport="local", flush=False)


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    layers = linears(2)

    def work() -> None:
        pipeline = Pipeline(layers, mean_square, schemes.wpipe(1, 2), optimizer=momentum, cuts=(1,))
        for number in range(5):
            inputs, targets = numbers(4)
            pipeline.step(inputs, targets * (math.inf if number == 2 else 1))
        pipeline.flush()

    with pytest.raises(WorkerError, match="in step 2 the loss is inf"):
        run(work, workers=1)


def test_steps_before_one_that_is_not_finite_are_told() -> None:
    layers, told = linears(2), []

    def work() -> None:
        pipeline = Pipeline(layers, mean_square, schemes.pipedream(1), optimizer=momentum)
        for number in range(40):
            inputs, targets = numbers(4)
            step = pipeline.step(inputs, targets * (math.inf if number == 13 else 1))
            told.append(step.reports_step)

    with pytest.raises(WorkerError, match="in step 13 the loss is inf"):
        run(work, workers=1)
    assert [about for about in told if about is not None] == list(range(13))


class _Exploding(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * math.nan


class Exploding(nn.Linear):
    """Has gradients that are not finite from its third backward on."""

    count = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count += 1
        output = super().forward(value)
        return output if self.count < 3 else _Exploding.apply(output)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_ends_the_training(clip_norm: float | None) -> None:
    layers = [Exploding(3, 3), nn.Linear(3, 3)]
    weights: list[torch.Tensor] = []

    def work() -> None:
        pipeline = Pipeline(
            layers, mean_square, schemes.pipedream(1), optimizer=momentum, clip_norm=clip_norm
        )
        try:
            for _ in range(40):
                pipeline.step(*numbers(4))
        finally:
            weights.extend(pipeline.weights.state.state_dict().values())

    with pytest.raises(
        WorkerError, match=r"step 2: the gradient of one of its weights \(stage 0\) is not finite"
    ):
        run(work, workers=1)
    assert weights
    assert all(weight.isfinite().all() for weight in weights)


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3)) if weight is None else weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight


def test_weights_of_several_stages_are_refused() -> None:
    first = Tied()
    layers = [first, nn.Linear(3, 3), Tied(first.weight)]

    def work() -> None:
        Pipeline(layers, mean_square, schemes.pipedream(2), optimizer=momentum)

    with pytest.raises(ConfigError, match=r"pipedream updates each stage at its own time, and 0\.weight is"):
        run(work, workers=2)


def test_versions() -> None:
    layer = nn.Linear(2, 2)
    made: list[int] = []
    versions = Versions(0, layer.parameters, lambda tensors: made.append(len(tensors)))
    weight = layer.weight
    first = weight.detach().clone()
    versions.begin()
    versions.use(0)
    versions.make(1, ())
    before = weight._version
    with torch.no_grad(), versions.unseen():
        weight.add_(1.0)
    assert weight._version == before
    assert list(versions.stored) == [0, 1]
    assert made == [2]
    versions.use(0)
    assert torch.equal(weight, first)
    versions.use(1)
    assert torch.equal(weight, first + 1)
    versions.make(2, (0,))  # in the storage of version 0
    assert made == [2]
    versions.make(3, (1, 2))  # in place
    assert list(versions.stored) == [3]
    assert versions.peak == 2
    with pytest.raises(Exception, match="version 1 of stage 0 is not there, only 3"):
        versions.use(1)
    versions.end()
    assert layer.weight is weight
    assert torch.equal(weight, first + 1)
