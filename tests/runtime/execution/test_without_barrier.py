"""Steps without a barrier: the same numbers as with one, bit for bit; who may be ahead; how a run ends."""

from __future__ import annotations

import math
import threading
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import LossSum
from counterflow.common.tensors import devices
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.execution.step import Step
from counterflow.runtime.parameters.state_records import ParameterState
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial

SCHEDULES: list[Schedule] = [
    schemes.gpipe(1, 2),
    schemes.gpipe(3, 4),
    schemes.dapple(2, 1),
    schemes.dapple(4, 6),
    schemes.interleaved(2, 4, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 1),
    schemes.chimera(4, 8),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.chimera(4, 4, pairs=2),
    schemes.mixpipe(4, 4, injected=4),
    schemes.hanayo(2, 4, waves=2),
]
SPLIT: list[Schedule] = [
    schemes.zb_h1(4, 6),
    schemes.zb_h2(2, 4),
    schemes.zb_v(4, 8),
    schemes.interleaved_zb(2, 4, chunks=2),
    schemes.chimera(4, 8, split=True),
    schemes.dualpipe(2, 4),
    schemes.dualpipe_v(2, 4),
]
"""With a backward in two ops."""


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def told(steps: list[Step]) -> list[tuple[Any, ...]]:
    """What came of the steps that are known, but for how long they took."""
    return [
        (step.reports_step, step.loss, str(step.grad_norm), step.samples, step.metrics, step.skipped)
        for step in steps
        if step.reports_step is not None
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, ParameterState):
        return same(one.state, other.state) and one.options == other.options
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def _train(
    schedule: Schedule, layers: list[nn.Module], loss: Any, batches: Any, options: dict[str, Any]
) -> Any:
    options = dict(options)
    updates = options.pop("updates", [True])
    pipeline = Pipeline(deepcopy(layers), loss, schedule, **options)
    steps = [
        pipeline.step(*row[pipeline.replica], update=updates[k % len(updates)])
        for k, row in enumerate(batches)
    ]
    late = [step.number - step.reports_step for step in steps if step.reports_step is not None]
    steps += pipeline.flush()
    assert not pipeline.in_flight
    return told(steps), pipeline.state_dict(), late


def agrees(
    schedule: Schedule,
    *,
    replicas: int = 1,
    layers: list[nn.Module] | None = None,
    loss: Any = None,
    batches: Any = None,
    transport: str = "strict-local",
    steps: int = 4,
    **options: Any,
) -> list[int]:
    """Train with a barrier and without; by how many steps the later told."""
    trial = small_trial(schedule, replicas=replicas, steps=steps, dtype=torch.float32)
    job = (schedule, layers or trial.layers, loss or trial.loss, batches or trial.batches)
    options = {"optimizer": adam} | options
    (with_barrier, *_), without = (
        launch(
            _train,
            *job,
            {"barrier": barrier, **options},
            workers=schedule.workers * replicas,
            transport=transport,
            timeout_seconds=30,
        )
        for barrier in (True, False)
    )
    for found in without:
        assert found[0] == with_barrier[0]
        assert same(found[1], with_barrier[1])
    late: list[int] = without[0][2]
    return late


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT], ids=str)
def test_every_scheme_gives_the_same_numbers(schedule: Schedule) -> None:
    assert agrees(schedule, steps=3) == [1, 1]  # each but the first step tells of the one before


@pytest.mark.table
@pytest.mark.parametrize("schedule", [schemes.dapple(2, 2), schemes.chimera(2, 4)], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_options(schedule: Schedule, replicas: int, recompute: str) -> None:
    agrees(schedule, replicas=replicas, recompute=recompute, scheduler=halving, optimizer=momentum)


@pytest.mark.table
@pytest.mark.parametrize("schedule", [schemes.dapple(2, 2), schemes.gems(2, 4)], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_clipping_is_exact(schedule: Schedule, replicas: int) -> None:
    assert agrees(schedule, replicas=replicas, clip_norm=0.1) == [0, 0, 0, 0]
    agrees(schedule, replicas=replicas, skip_non_finite=True)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}], ids=str)
def test_updates_for_several_steps(options: dict[str, Any]) -> None:
    agrees(schemes.dapple(3, 2), updates=[False, True], **options)
    agrees(schemes.chimera(2, 2), updates=[False, False, True, True], replicas=2, **options)


def test_sends_that_wait_for_nobody_and_messages_with_their_shapes() -> None:
    agrees(schemes.dapple(3, 4), transport="local")
    agrees(schemes.hanayo(2, 2, waves=2), transport="local", dynamic_shapes=True)
    agrees(schemes.dapple(2, 4), compress=True)


def test_running_statistics() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)]
    batches = [[(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(2)] for _ in range(3)]
    loss = nn.functional.mse_loss
    for schedule in (schemes.dapple(2, 2), schemes.chimera(2, 2)):
        agrees(schedule, layers=layers, loss=loss, batches=batches, replicas=2, cuts=(2,))


@pytest.mark.parametrize("barrier", [True, False])
def test_running_statistics_are_those_of_the_last_micro_batches(barrier: bool) -> None:
    """With a momentum of 1. Four copies have one micro-batch each: the mean of all, step by step."""
    layers = [nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 3)]

    def work() -> list[float]:
        pipeline = Pipeline(
            layers, nn.functional.mse_loss, schemes.chimera(2, 2), optimizer=momentum, barrier=barrier
        )
        for begin in (0.0, 100.0):
            mine = begin + torch.arange(24.0).reshape(8, 3).chunk(2)[pipeline.replica]
            pipeline.step(mine, torch.zeros(4, 3))
        pipeline.flush()
        found: list[float] = pipeline.model_state_dict()["0.running_mean"].tolist()
        return found

    assert run(work, workers=4) == [[110.5, 111.5, 112.5]] * 4


def weighed(output: Tensor, target: Tensor) -> LossSum:
    """A loss over what counts, which differs from mini-batch to mini-batch, with metrics that do too."""
    counts = (target > 0).float()
    metrics = {"error": (output - target).abs().sum()}
    if counts[0].sum() > 1:
        metrics["seldom"] = counts.sum()
    return LossSum(((output - target) ** 2 * counts).sum(), counts.sum(), metrics)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"updates": [False, True]}], ids=str)
def test_weights_of_losses_and_metrics(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(2, 2) for _ in range(4)]
    batches = [[(torch.randn(8, 2), torch.randn(8, 2)) for _ in range(2)] for _ in range(6)]
    for schedule in (schemes.dapple(4, 2), schemes.chimera(2, 4)):
        agrees(schedule, layers=layers, loss=weighed, batches=batches, replicas=2, **options)


# A device that its host does not wait for

DEVICE_SCHEDULES = [schemes.dapple(2, 3), schemes.zb_v(2, 4), schemes.gpipe(1, 2)]
"""Those where an op that waits for nobody follows the last loss."""


class Noted(devices.HostCopy):
    """A number that knows after how many ops of its worker it was asked for, and notes when it was read."""

    ops = threading.local()

    def __init__(self, numbers: Tensor) -> None:
        super().__init__(numbers)
        self.after = self.ops.count

    def read(self) -> Any:
        self.ops.waited.append(self.ops.count - self.after)
        return super().read()


@pytest.mark.parametrize("schedule", [*DEVICE_SCHEDULES, schemes.chimera(2, 4)], ids=str)
def test_losses_of_other_kinds_give_the_same_numbers(schedule: Schedule) -> None:
    assert agrees(schedule, replicas=2, scheduler=halving) == [1, 1, 1]
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(2, 2) for _ in range(4)]
    batches = [[(torch.randn(8, 2), torch.randn(8, 2)) for _ in range(2)] for _ in range(4)]
    agrees(schedule, layers=layers, loss=weighed, batches=batches, replicas=2, updates=[False, True])


@pytest.mark.parametrize("schedule", DEVICE_SCHEDULES, ids=str)
def test_a_device_has_an_op_to_run_while_its_host_reads(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "HostCopy", Noted)
    layers = linears(schedule.stages)

    def work() -> list[int]:
        Noted.ops.count, Noted.ops.waited = 0, []
        pipeline = Pipeline(deepcopy(layers), mean_square, schedule, optimizer=momentum, barrier=False)
        launched = pipeline.transport.computed

        def computed() -> None:
            Noted.ops.count += 1
            launched()

        monkeypatch.setattr(pipeline.transport, "computed", computed, raising=False)
        for _ in range(3):
            pipeline.step(*numbers(8))
        waited = list(Noted.ops.waited)
        pipeline.flush()
        return waited

    found = run(work, workers=schedule.workers)
    assert all(min(waited) > 0 for waited in found)  # two norms, and where they are made three losses
    assert sorted(map(len, found)) == [2] * (schedule.workers - 1) + [5]


# Who may be ahead


def linears(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(count)]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def numbers(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 3, generator=generator)


def run(work: Any, *args: Any, workers: int) -> list[Any]:
    found: list[Any] = launch(work, *args, workers=workers, transport="local", timeout_seconds=20)
    return found


@pytest.mark.parametrize("barrier", [True, False])
def test_a_worker_goes_on_while_another_has_not_updated(barrier: bool) -> None:
    layers, went_on, found = linears(2), threading.Event(), list[bool]()

    def work() -> None:
        pipeline = Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 2), optimizer=momentum, barrier=barrier
        )
        check = pipeline.weights.mutations.check

        def late() -> None:  # after all ops, before anything is heard or updated
            if not found:
                found.append(went_on.wait(0.2 if barrier else 20))
            check()

        if pipeline.worker == 0:
            pipeline.weights.mutations.check = late  # type: ignore[method-assign]
        pipeline.step(*numbers(4))
        if pipeline.worker == 1:
            went_on.set()
        pipeline.step(*numbers(4))
        pipeline.flush()

    run(work, workers=2)
    assert found == [not barrier]


def test_evaluation_and_weights_flush() -> None:
    layers = linears(2)

    def work() -> tuple[list[int | None], bool]:
        pipeline = Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 2), optimizer=momentum, barrier=False
        )
        steps = [pipeline.step(*numbers(4))]
        pipeline.evaluate(*numbers(6))
        assert not pipeline.in_flight
        steps += [pipeline.step(*numbers(4))]
        with pytest.raises(
            ConfigError, match=r"model_state_dict\(local=True\) while mini-batches are in flight"
        ):
            pipeline.model_state_dict(local=True)
        with pytest.raises(ConfigError, match=r"load_model_state_dict while .* call flush\(\) before"):
            pipeline.load_model_state_dict({})
        state = pipeline.state_dict()
        pipeline.load_state_dict(state)
        steps += [pipeline.step(*numbers(4)), pipeline.step(*numbers(4))]
        pipeline.predict(numbers(4)[0])
        return [step.reports_step for step in steps + pipeline.flush()], pipeline.in_flight

    assert run(work, workers=2) == [([None, None, None, 2, 0, 1, 3], False)] * 2


def test_outputs_are_of_the_step_at_hand() -> None:
    layers = linears(4)

    def work(schedule: Schedule, barrier: bool) -> list[Any]:
        pipeline = Pipeline(deepcopy(layers), mean_square, schedule, optimizer=momentum, barrier=barrier)
        steps = [pipeline.step(*numbers(4, k), outputs=True) for k in range(3)]
        pipeline.flush()
        return [step.outputs for step in steps]

    for schedule in (schemes.dapple(2, 2), schemes.chimera(2, 2)):
        one, other = (run(work, schedule, barrier, workers=2) for barrier in (True, False))
        for mine, theirs in zip(one, other, strict=True):
            assert all(
                (a is None and b is None) or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
            )


def test_mini_batches_that_follow_each_other_are_alike() -> None:
    layers = linears(2)

    def work(*, flush: bool) -> list[int]:
        pipeline = Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 4), optimizer=momentum, barrier=False
        )
        steps = [pipeline.step(*numbers(4))]
        if flush:
            steps += pipeline.flush()
        steps += [pipeline.step(*numbers(3)), pipeline.step(*numbers(3))]  # fewer than micro-batches
        return [step.samples for step in steps + pipeline.flush() if step.reports_step is not None]

    assert run(partial(work, flush=True), workers=2) == [[4, 3, 3]] * 2
    with pytest.raises(ConfigError, match=r"step 1 was given 3 samples, the one before 4.* flush\(\) before"):
        run(partial(work, flush=False), workers=2)


def test_inputs_may_be_overwritten_after_a_step() -> None:
    layers = [nn.Identity(), *linears(1)]

    def work(barrier: bool) -> list[str]:
        pipeline = Pipeline(
            deepcopy(layers),
            mean_square,
            schemes.dapple(2, 2),
            optimizer=momentum,
            barrier=barrier,
            cuts=(1,),
        )
        inputs, targets = numbers(4)
        steps = []
        for _ in range(4):
            steps.append(pipeline.step(inputs, targets))
            inputs.add_(1.0)
        return [repr(step) for step in told(steps + pipeline.flush())]

    assert run(work, True, workers=2) == run(work, False, workers=2)


@pytest.mark.parametrize("other", ["evaluate", "keep", "flush"])
def test_calls_that_differ_are_found(other: str) -> None:
    layers = linears(2)

    def work() -> None:
        pipeline = Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 2), optimizer=momentum, barrier=False
        )
        pipeline.step(*numbers(4))
        if pipeline.worker and other == "evaluate":
            pipeline.evaluate(*numbers(4))
        elif pipeline.worker and other == "flush":
            pipeline.flush()
        for _ in range(2):
            pipeline.step(*numbers(4), update=not (pipeline.worker and other == "keep"))

    with pytest.raises(ConfigError, match="all workers make the same calls in the same order"):
        run(work, workers=2)


def test_other_mini_batches_are_found() -> None:
    layers = linears(2)

    def work() -> None:
        pipeline = Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 2), optimizer=momentum, barrier=False
        )
        for number in range(3):
            pipeline.step(*numbers(4, number * (1 + pipeline.worker)))

    with pytest.raises(ConfigError, match="step 1: the inputs of ranks 0 and 1 have the same shape"):
        run(work, workers=2)


# How a run ends


@pytest.mark.table
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize(
    "schedule", [schemes.dapple(4, 4), schemes.gems(4, 2), schemes.hanayo(2, 2, waves=1)], ids=str
)
def test_a_loss_that_is_not_finite_leaves_the_last_good_weights(
    schedule: Schedule, options: dict[str, Any]
) -> None:
    layers, ended = linears(schedule.stages), list[bool]()

    def work(steps: int, bad: int, barrier: bool) -> list[str]:
        pipeline = Pipeline(
            deepcopy(layers),
            mean_square,
            schedule,
            optimizer=adam,
            scheduler=halving,
            barrier=barrier,
            **options,
        )
        try:
            for number in range(steps):
                inputs, targets = numbers(8, number)
                targets[5] *= math.inf if number == bad else 1.0
                pipeline.step(inputs, targets)
            pipeline.flush()
            ended.append(False)
        except WorkerError as error:
            ended.append("the loss is inf" in str(error) or "failed" in str(error))
        state = pipeline.weights.state.state_dict(), pipeline.weights.state.training_state()
        return [repr(state)]

    left = run(work, 6, 3, False, workers=schedule.workers)
    assert ended == [True] * schedule.workers
    assert left == run(work, 3, 3, True, workers=schedule.workers)


def root(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is not finite where its value is 0."""
    return (output * target).abs().sqrt().mean()


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_next_update() -> None:
    layers, made = linears(2), list[Pipeline]()

    def work(clip_norm: float | None) -> None:
        pipeline = Pipeline(
            deepcopy(layers),
            root,
            schemes.dapple(2, 2),
            optimizer=momentum,
            barrier=False,
            clip_norm=clip_norm,
        )
        made.append(pipeline)
        for number in range(5):
            inputs, targets = numbers(4, number)
            pipeline.step(inputs, targets * (number != 2))
            assert number < (3 if clip_norm is None else 2)
        pipeline.flush()

    with pytest.raises(WorkerError, match=r"step 2: the gradient of one of its weights \(stage 0\) is not"):
        run(work, None, workers=2)
    assert all(
        weight.isfinite().all()
        for pipeline in made
        for weight in pipeline.weights.state.state_dict().values()
    )
    with pytest.raises(WorkerError, match=r"step 2: .* nothing was updated with it"):
        run(work, math.inf, workers=2)


def test_an_error_ends_all_workers() -> None:
    layers = linears(4)

    class Fails(nn.Linear):
        calls = 0

        def forward(self, value: Tensor) -> Tensor:
            Fails.calls += 1
            if Fails.calls > 12:
                raise RuntimeError("out of luck")
            return super().forward(value)

    layers[2] = Fails(3, 3)

    def work() -> None:
        with Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(4, 4), optimizer=momentum, barrier=False
        ) as pipe:
            for number in range(9):
                pipe.step(*numbers(8, number))

    with pytest.raises(WorkerError, match="out of luck"):
        run(work, workers=4)


def test_closing_ends_what_is_in_flight() -> None:
    layers = linears(2)

    def work() -> bool:
        with Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 2), optimizer=momentum, barrier=False
        ) as pipe:
            for number in range(3):
                pipe.step(*numbers(4, number))
            assert pipe.in_flight
        return pipe.in_flight

    assert run(work, workers=2) == [False, False]


def _processes(layers: list[nn.Module]) -> Any:
    found = []
    for barrier in (True, False):
        made = Pipeline(
            deepcopy(layers), mean_square, schemes.dapple(2, 4), optimizer=momentum, barrier=barrier
        )
        with made as pipeline:
            steps = [pipeline.step(*numbers(8, number)) for number in range(12)]
            found.append((told(steps + pipeline.flush()), pipeline.model_state_dict()))
    return found


def test_processes_over_gloo() -> None:
    for (steps, state), (other, its) in launch(_processes, linears(2), workers=2, transport="gloo"):
        assert other == steps
        assert same(its, state)
