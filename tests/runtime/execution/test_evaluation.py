"""Evaluations behind steps: the numbers of those that wait; who may be ahead; who may ask."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.execution.evaluation import PendingEvaluation
from counterflow.runtime.execution.step import Evaluation, Step
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

SCHEDULES = [
    schemes.gpipe(1, 2),
    schemes.dapple(4, 6),
    schemes.dapple(2, 1),
    schemes.interleaved(2, 4, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 8),
    schemes.chimera(4, 4, concat="backward-halving"),
    schemes.mixpipe(4, 4, injected=4),
    schemes.hanayo(2, 4, waves=2),
    schemes.zb_h1(4, 6),
    schemes.zb_v(2, 4),
    schemes.dualpipe(2, 4),
    schemes.dapple(stages=2, micro_batches=2, slices=2),
    schemes.pipedream_2bw(2, 2, periods=3),
]


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    error = output - target
    return (error**2).mean(), {"error": error.abs().mean()}


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    found = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5)) for _ in range(count - 1)]
    return [*found, nn.Linear(3, 3)]


def numbers(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = samples, 4, 3
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


def run(work: Any, *args: Any, workers: int, transport: str = "strict-local") -> list[Any]:
    found: list[Any] = launch(work, *args, workers=workers, transport=transport, timeout_seconds=30)
    return found


def _train(
    schedule: Schedule, model: Sequence[nn.Module], waits: bool, barrier: bool, options: dict[str, Any]
) -> Any:
    replicas = options.pop("replicas", 1)
    pipeline = Pipeline(
        deepcopy(model), loss, schedule, optimizer=momentum, barrier=barrier, seed=3, **options
    )
    mine = pipeline.replica * 100 * (replicas > 1)
    steps: list[Step] = []
    begun: list[PendingEvaluation] = []
    found: list[Evaluation] = []
    for k in range(5):
        inputs, targets = numbers(8, k + mine)
        steps.append(pipeline.step(inputs, targets))
        for samples in (5, 6):
            inputs, targets = numbers(samples, 50 + k + mine)
            if waits:
                found.append(pipeline.evaluate(inputs, targets))
            else:
                begun.append(pipeline.start_evaluation(inputs, targets))
            inputs.zero_()
            targets.zero_()
    steps += pipeline.flush()
    assert not pipeline.in_flight
    state = pipeline.state_dict()["model"]
    told = {step.reports_step: (step.loss, step.metrics) for step in steps if step.reports_step is not None}
    return told, found + [each.result() for each in begun], state


def agrees(schedule: Schedule, model: Sequence[nn.Module] | None = None, **options: Any) -> None:
    """Evaluate twice after each step, waiting and not: the same results, steps and weights, to a bit."""
    transport = options.pop("transport", "strict-local")
    model = layers(schedule.stages) if model is None else model
    workers = schedule.workers * options.get("replicas", 1)
    waiting, *others = (
        run(_train, schedule, model, waits, barrier, dict(options), workers=workers, transport=transport)
        for waits, barrier in ((True, True), (False, True), (False, False))
    )
    for before, *now in zip(waiting, *others, strict=True):
        for its in now:
            assert its[:2] == before[:2]
            assert all(torch.equal(its[2][name], tensor) for name, tensor in before[2].items())
    assert len({result.loss for result in waiting[0][1]}) == 10
    assert list(waiting[0][1][0].metrics) == ["error"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_scheme_evaluates_between_steps(schedule: Schedule) -> None:
    agrees(schedule)


def test_options() -> None:
    for schedule in (schemes.dapple(2, 2), schemes.chimera(2, 2)):
        agrees(schedule, replicas=2)
        agrees(schedule, clip_norm=0.1)
        agrees(schedule, compute_dtype="bfloat16", transport="local")
        agrees(schedule, autocast="bfloat16", recompute="stage")
        agrees(schedule, dynamic_shapes=True, transport="local")
    statistics = [nn.BatchNorm1d(4), nn.Linear(3, 3), nn.BatchNorm1d(4), nn.Linear(3, 3)]
    agrees(schemes.dapple(2, 2), statistics, cuts=(2,), replicas=2)


def test_between_processes_and_by_the_rules_of_nccl() -> None:
    agrees(schemes.dapple(2, 2), transport="gloo")
    agrees(schemes.chimera(2, 4), transport="strict-nccl")


@pytest.mark.parametrize("barrier", [True, False])
def test_a_worker_goes_on_while_another_evaluates(barrier: bool) -> None:
    went_on, waited = threading.Event(), list[bool]()

    class Late(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            if not self.training and len(waited) < 2:  # first all agree on the metrics
                waited.append(len(waited) > 0 and went_on.wait(20))
            return super().forward(value)

    model = [nn.Linear(3, 3), Late(3, 3)]

    def work() -> None:
        pipeline = Pipeline(deepcopy(model), loss, schemes.dapple(2, 1), optimizer=momentum, barrier=barrier)
        for k in range(3):
            if k == 2 and pipeline.worker == 0:
                pipeline.stages[0].layers[0].module.register_forward_pre_hook(lambda *_: went_on.set())
            pipeline.step(*numbers(2, k))
            pipeline.start_evaluation(*numbers(2, k))
        pipeline.flush()

    run(work, workers=2, transport="local")
    assert waited == [False, True]


def test_each_worker_asks_when_it_likes() -> None:
    model = layers(2)

    def work() -> list[float]:
        pipeline = Pipeline(deepcopy(model), loss, schemes.dapple(2, 2), optimizer=momentum, barrier=False)
        found = []
        for k in range(4):
            pipeline.step(*numbers(4, k))
            found.append(pipeline.start_evaluation(*numbers(6, k)))
        asked: list[float] = []
        if pipeline.worker == 1:
            asked += [each.result().loss for each in reversed(found)]
        pipeline.step(*numbers(4, 9))
        pipeline.close()
        assert [each.result().loss for each in found][::-1] == asked or pipeline.worker == 0
        return [each.result().loss for each in found]

    one, other = run(work, workers=2)
    assert one == other
    assert len(set(one)) == 4


def test_what_differs_between_workers_is_found() -> None:
    model = layers(2)

    def work(what: str, schedule: Schedule) -> None:
        pipeline = Pipeline(deepcopy(model), loss, schedule, optimizer=momentum, barrier=False)
        for k in range(3):
            pipeline.step(*numbers(4, k))
            if not (what == "calls" and k == 2 and pipeline.worker == 1):
                seed = k + (what == "contents" and k == 2 and pipeline.worker == 1)
                pipeline.start_evaluation(numbers(4, k)[0], numbers(4, seed)[1])
        pipeline.flush()

    with pytest.raises(ConfigError, match="all workers make the same calls in the same order"):
        run(work, "calls", schemes.dapple(2, 2), workers=2)
    with pytest.raises(ConfigError, match="have the same shape but different contents"):
        run(work, "contents", schemes.chimera(2, 2), workers=2)


def test_metrics_of_other_names_are_refused() -> None:
    model = layers(2)

    def named(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = (output - target).abs().mean()
        return error, {"error" if len(target) > 1 else "seldom": error.detach()}

    def work() -> None:
        pipeline = Pipeline(deepcopy(model), named, schemes.dapple(2, 2), optimizer=momentum, barrier=False)
        pipeline.step(*numbers(4, 0))
        pipeline.start_evaluation(*numbers(4, 0))
        pipeline.step(*numbers(4, 1))
        found = pipeline.start_evaluation(*numbers(2, 0))
        pipeline.step(*numbers(4, 2))
        with pytest.raises(ConfigError, match="metrics of other names"):
            found.result()
        found.result()  # asked again it says the same

    with pytest.raises(ConfigError, match="evaluation after step 1 has metrics of other names"):
        run(work, workers=2)
