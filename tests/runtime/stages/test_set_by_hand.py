"""Weights that the user, or another pipeline, sets between calls: every thread's copy has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch

from ...kit import batch, momentum

F = torch.float64
DAPPLE, CHIMERA = "dapple(stages=2, micro_batches=2)", "chimera(stages=2, micro_batches=2)"


def block(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=F), nn.Tanh()) for _ in range(3)))


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data.clamp_(-0.2, 0.2)


def replace_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.data.clamp(-0.2, 0.2)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clamp(-0.2, 0.2) for name, tensor in model.state_dict().items()})


def clamped(
    schedule: str, change: Callable[[nn.Module], None], model: nn.Module, **options: Any
) -> list[float]:
    pipeline = Pipeline(model, nn.MSELoss(), schedule, optimizer=momentum, **options)
    found = []
    for number in range(7):
        found.append(pipeline.step(*batch(number)).loss)
        change(model)
    return [*found, pipeline.evaluate(*batch(9)).loss]


def clamped_in_one_process() -> list[float]:
    model = block(0)
    optimizer, found = momentum(model.parameters()), []
    for number in range(7):
        optimizer.zero_grad()
        inputs, targets = batch(number)
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        clamp(model)
        found.append(loss.item())
    inputs, targets = batch(9)
    return [*found, functional.mse_loss(model(inputs), targets).item()]


def run(work: Callable[..., Any], *args: Any, workers: int = 2) -> Any:
    return launch(work, *args, workers=workers, transport="local", timeout_seconds=30)[0]


@pytest.mark.parametrize("change", [clamp, clamp_data, replace_data, load])
@pytest.mark.parametrize(("schedule", "workers"), [(CHIMERA, 2), (DAPPLE, 4), (CHIMERA, 4)])
def test_all_copies_have_what_is_set(
    schedule: str, workers: int, change: Callable[[nn.Module], None]
) -> None:
    found = run(clamped, schedule, change, block(0), workers=workers)
    assert found == pytest.approx(clamped_in_one_process(), rel=1e-12)


def two(schedule: str, flushes: bool, body: nn.Sequential, *heads: nn.Sequential) -> list[float]:
    pipelines = [
        Pipeline(nn.Sequential(*body, *head), nn.MSELoss(), schedule, optimizer=momentum, cuts=[3])
        for head in heads
    ]
    found = []
    for number in range(4):
        for pipeline in pipelines:
            steps = [pipeline.step(*batch(number)), *(pipeline.flush() if flushes else ())]
            found += [step.loss for step in steps if step.reports_step is not None]
    return found


def two_in_one_process() -> list[float]:
    body, *heads = block(1), block(2), block(3)
    optimizers = [momentum([*body.parameters(), *head.parameters()]) for head in heads]
    found = []
    for number in range(4):
        inputs, targets = batch(number)
        for head, optimizer in zip(heads, optimizers, strict=True):
            optimizer.zero_grad()
            loss = functional.mse_loss(head(body(inputs)), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("schedule", "workers", "flushes"),
    [(CHIMERA, 2, False), (DAPPLE, 4, False), ("pipedream-2bw(stages=2, micro_batches=2)", 2, True)],
)
def test_two_pipelines_that_share_layers_train_the_same_ones(
    schedule: str, workers: int, flushes: bool
) -> None:
    found = run(two, schedule, flushes, block(1), block(2), block(3), workers=workers)
    assert found == pytest.approx(two_in_one_process(), rel=1e-12)


def test_layers_of_a_pipeline_in_flight_are_trained_by_it_alone() -> None:
    schedule = "pipedream-2bw(stages=2, micro_batches=2)"
    with pytest.raises(ConfigError, match=r"^layer 0 \(Sequential\) is trained by another pipeline too"):
        run(two, schedule, False, block(1), block(2), block(3))


@pytest.mark.parametrize("change", [clamp, clamp_data, replace_data, load])
@pytest.mark.parametrize("schedule", ["pipedream(stages=2)", "pipedream-2bw(stages=2, micro_batches=2)"])
def test_what_is_set_while_mini_batches_are_in_flight_is_refused(
    schedule: str, change: Callable[[nn.Module], None]
) -> None:
    with pytest.raises(ConfigError, match=r"was changed between steps while mini-batches are in flight"):
        run(clamped, schedule, change, block(0))


ASYNCHRONOUS = [
    ("pipedream(stages=2)", 2),
    ("pipedream-2bw(stages=2, micro_batches=2)", 2),
    ("wpipe(workers=2, micro_batches=4)", 2),
]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), betas=(0.5, 0.9))


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def set_lr(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.03


def fill_lr(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(0.03)


def set_betas(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["betas"] = (0.6, 0.9)


def set_decay(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5


def freeze(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(False)


def reduce_on_plateau(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for loss in (1.0, 2.0):
            scheduler.step(loss)


CHANGES: dict[Any, str] = {
    set_lr: r"'lr' of group 0 of the optimizer of stage \d",
    fill_lr: r"'lr' of group 0 of the optimizer of stage \d",
    set_betas: r"'betas' of group 0 of the optimizer of stage \d",
    set_decay: r"'weight_decay' of group 0 of the optimizer of stage \d",
    reduce_on_plateau: r"'lr' of group 0 of the optimizer of stage \d",
    freeze: r"requires_grad of '0\.bias' of layer \d \(Sequential\)",
}


def changed_by_hand(
    schedule: str, change: Any, scheduler: Any, changes: tuple[int, ...], flushes: bool
) -> list[float]:
    model = nn.Sequential(*block(0), *block(1))
    pipeline = Pipeline(model, nn.MSELoss(), schedule, optimizer=adam, scheduler=scheduler)
    losses = []
    for number in range(6):
        if number in changes:
            change(model, [*pipeline.optimizers.values()])
        steps = [pipeline.step(*batch(number)), *(pipeline.flush() if flushes else ())]
        losses += [step.loss for step in steps if step.reports_step is not None]
    losses += [step.loss for step in pipeline.flush()]
    rates = {float(group["lr"]) for each in pipeline.optimizers.values() for group in each.param_groups}
    return [*losses, *rates]


def changed_by_hand_in_one_process(change: Any, scheduler: Any, changes: tuple[int, ...]) -> list[float]:
    model = nn.Sequential(*block(0), *block(1))
    optimizer, losses = adam(model.parameters()), []
    schedule = scheduler and scheduler(optimizer)
    for number in range(6):
        if number in changes:
            change(model, [optimizer])
        optimizer.zero_grad()
        inputs, targets = batch(number)
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        losses.append(loss.item())
    return [*losses, float(optimizer.param_groups[0]["lr"])]


@pytest.mark.parametrize("scheduler", [None, decay])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("schedule", "workers"), ASYNCHRONOUS)
def test_options_that_are_set_after_a_flush_count(
    schedule: str, workers: int, change: Any, scheduler: Any
) -> None:
    """Before the first step too; a flush after each step leaves no old weights."""
    found = run(changed_by_hand, schedule, change, scheduler, (0, 3), True, workers=workers)
    expected = changed_by_hand_in_one_process(change, scheduler, (0, 3))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scheduler", [None, decay])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("schedule", "workers"), ASYNCHRONOUS)
def test_options_that_are_set_while_mini_batches_are_in_flight_are_refused(
    schedule: str, workers: int, change: Any, scheduler: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^{CHANGES[change]} was changed between steps while mini-"):
        run(changed_by_hand, schedule, change, scheduler, (3,), False, workers=workers)


@pytest.mark.parametrize(("schedule", "workers"), ASYNCHRONOUS)
def test_schedulers_and_equal_values_are_no_changes(schedule: str, workers: int) -> None:
    """The first change is before the first step, and the others write what is there."""
    for scheduler, change in ((decay, lambda *_: None), (None, set_lr)):
        found = run(changed_by_hand, schedule, change, scheduler, (0, 2, 3, 4), False, workers=workers)
        assert len(found) == 6 + 1
        assert found[-1] == pytest.approx(0.1 * 0.5**6 if scheduler else 0.03)


def test_a_tensor_that_the_user_wrote_into_in_flight_is_refused() -> None:
    def work() -> None:
        rate = torch.tensor(0.1)
        pipeline = Pipeline(
            block(0),
            nn.MSELoss(),
            "pipedream(stages=2)",
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
        )
        for number in range(3):
            pipeline.step(*batch(number))
        rate.fill_(0.01)
        pipeline.step(*batch(3))

    with pytest.raises(ConfigError, match=rf"^{CHANGES[set_lr]} was changed between steps"):
        run(work)
