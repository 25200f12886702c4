"""State of optimizers and schedulers by group, loaded where weights are in other groups: as plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from typing_extensions import override

import counterflow as cf
from counterflow.runtime.parameters.optimizers import Parameters

WIDTH, LAYERS, FAST = 2, 6, 4
Make = Callable[..., Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)))


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return inputs, inputs.flip(1)


def two_rates(parameters: Parameters) -> optim.Optimizer:
    """Groups of the first layers and of the last ones; a stage may have one of both alone."""
    first = [p for name, p in parameters.named if int(name.split(".")[0]) < FAST]
    last = [p for name, p in parameters.named if int(name.split(".")[0]) >= FAST]
    groups = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.001}]
    return optim.SGD([group for group in groups if group["params"]], lr=1.0)


def one_rate(parameters: Parameters) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


class Counting(optim.SGD):
    """Steps whose length depends on their number, which is of no weight."""

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / state["steps"]
        super().step(closure)


def counting(parameters: Parameters) -> optim.Optimizer:
    return Counting(parameters, lr=0.1)


def warm_up(optimizer: optim.Optimizer) -> Any:
    parts = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 8)
    return lr_scheduler.SequentialLR(optimizer, [*parts], milestones=[3])


def cyclic(optimizer: optim.Optimizer) -> Any:
    rates = [group["lr"] for group in optimizer.param_groups]
    lower = [rate / 10 for rate in rates]
    return lr_scheduler.CyclicLR(optimizer, lower, rates, step_size_up=4, cycle_momentum=False)


def chained(optimizer: optim.Optimizer) -> Any:
    parts = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.ChainedScheduler([*parts], optimizer=optimizer)


class Milestones(lr_scheduler.LRScheduler):
    """Rates that are halved at two steps, whatever the groups are, by factors of the groups."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.milestones = [3, 6]
        self.factors = [1.0 + group["lr"] for group in optimizer.param_groups]
        self.rates: list[float] = []
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | Tensor]:
        halvings = sum(self.last_epoch >= step for step in self.milestones)
        rates = [
            base * factor * 0.5**halvings for base, factor in zip(self.base_lrs, self.factors, strict=True)
        ]
        self.rates.append(len(self.rates))
        return rates


def one_process(optimizer_of: Make, scheduler_of: Make | None, steps: int) -> dict[str, Tensor]:
    net = model()
    optimizer = optimizer_of(Parameters(net.named_parameters()))
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(data()[0]), data()[1]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return net.state_dict()


def run(  # noqa: PLR0917
    schedule: Any, optimizer: Make, scheduler: Make | None, folder: Path | None, state: Any, steps: int
) -> tuple[dict[str, Tensor], Any]:
    sharded: Any = {"zero_stage": 1} if schedule.placement.pipes > 1 else {}
    pipeline = cf.Pipeline(
        model(), nn.MSELoss(), schedule, optimizer=optimizer, scheduler=scheduler, **sharded
    )
    if state is not None:
        pipeline.load_state_dict(state)
    elif folder is not None and any(folder.iterdir()):
        cf.load_checkpoint(pipeline, folder)
    for _ in range(steps):
        pipeline.step(*data())
    if folder is not None:
        cf.save_checkpoint(pipeline, folder)
    return pipeline.model_state_dict(), pipeline.state_dict()


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (two_rates, warm_up),
        (two_rates, cyclic),
        (two_rates, chained),
        (two_rates, Milestones),
        (counting, None),
    ],
)
def test_other_cuts_and_owners_go_on_as_one_process(
    optimizer: Make, scheduler: Make | None, by_file: bool, tmp_path: Path
) -> None:
    state, folder = None, tmp_path if by_file else None
    schedules = (
        cf.schemes.dapple(3, 2),
        cf.schemes.gpipe(1, 2),
        cf.schemes.chimera(2, 2),
        cf.schemes.zb_v(1, 2),
    )
    for schedule in schedules:
        weights, state = cf.launch(
            run, schedule, optimizer, scheduler, folder, state, 2, workers=schedule.workers, transport="local"
        )[0]
        state = None if by_file else state
    expected = one_process(optimizer, scheduler, 2 * len(schedules))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_schedulers_of_owners_with_other_groups_are_accepted() -> None:
    """One owner has both groups, the other one alone: as many as there are milestones."""
    for scheduler in (warm_up, cyclic):
        cf.launch(
            run, cf.schemes.chimera(2, 2), two_rates, scheduler, None, None, 1, workers=2, transport="local"
        )


def refused(schedule: Any, state: Any, optimizer: Make, scheduler: Make | None) -> str:
    pipeline = cf.Pipeline(model(), nn.MSELoss(), schedule, optimizer=optimizer, scheduler=scheduler)
    before = pipeline.state_dict()
    with pytest.raises(cf.ConfigError) as error:
        pipeline.load_state_dict(state)
    torch.testing.assert_close(pipeline.model_state_dict(), before["model"], rtol=0, atol=0)
    after = pipeline.state_dict()
    for name, saved in before["optimizer"].items():
        assert (after["optimizer"][name].state, after["optimizer"][name].options) == (
            saved.state,
            saved.options,
        )
    return str(error.value)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    schedule = cf.schemes.gpipe(1, 2)

    def refuse() -> list[str]:
        _, state = run(schedule, two_rates, warm_up, None, None, 2)
        incomplete = {**state, "optimizer": {**state["optimizer"]}}
        del incomplete["optimizer"]["3.bias"]
        prefixed = {f"module.{name}": value for name, value in state["model"].items()}
        return [
            refused(schedule, state, one_rate, warm_up),
            refused(schedule, state, two_rates, partial(lr_scheduler.StepLR, step_size=1)),
            refused(schedule, incomplete, two_rates, warm_up),
            refused(
                schedule, {**state, "model": {**state["model"], "5.bias": torch.zeros(9)}}, two_rates, warm_up
            ),
            refused(schedule, state, partial(optim.AdamW, lr=0.1), None),
            refused(schedule, {**state, "model": prefixed}, two_rates, warm_up),
        ]

    groups, schedulers, weights, shapes, classes, names = cf.launch(refuse, workers=1, transport="local")[0]
    assert groups.startswith(
        "'0.weight' and '4.weight' are in one group of the optimizer, and the training state has lr = "
    )
    assert schedulers.startswith("the training state has no learning-rate schedule for stage 0")
    assert weights == "the training state has nothing of the optimizer for '3.bias'"
    assert shapes.startswith("5.bias has shape (9,) in the state")
    assert "nesterov of another optimizer, and no amsgrad, betas, " in classes
    assert names.startswith("the state has no '0.weight'; it has 'module.0.weight': leave out")


def load_other(folder: Path) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The second worker of two makes another optimizer for its weights than the state has."""
    schedule = cf.schemes.dapple(2, 2)
    run(schedule, two_rates, None, folder, None, 2)
    pipeline = cf.Pipeline(
        model(), nn.MSELoss(), schedule, optimizer=lambda p: optim.SGD(p, lr=0.1), cuts=[3]
    )
    before = pipeline.model_state_dict()
    with pytest.raises(cf.ConfigError) as error:
        cf.load_checkpoint(pipeline, folder)
    return str(error.value), before, pipeline.model_state_dict()


def test_a_checkpoint_that_does_not_fit_one_worker_is_loaded_by_none(tmp_path: Path) -> None:
    (first, *_), (second, *_) = rows = cf.launch(load_other, tmp_path, workers=2, transport="local")
    assert first == f"rank 1 cannot load it: {second}"
    for _, before, after in rows:
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def frozen(folder: Path, *, compress: bool = False, resumes: bool = False) -> dict[str, Tensor]:
    sums: Any = {} if compress else {"gradient_compression": "int8"}
    pipeline = cf.Pipeline(
        model().float(), nn.MSELoss(), cf.schemes.chimera(2, 2), optimizer=one_rate, compress=compress, **sums
    )
    if resumes:
        cf.load_checkpoint(pipeline, folder)
    if not compress:
        pipeline.set_trainable(lambda name: name[0] != "1")
    for step in range(2 if resumes else 4):
        pipeline.step(*(tensor.float() for tensor in data()))
        if step == 1 and not resumes:
            cf.save_checkpoint(pipeline, folder)
    return pipeline.model_state_dict()


@pytest.mark.parametrize("compress", [False, True], ids=["sums", "messages"])
def test_compression_goes_on_bit_for_bit(compress: bool, tmp_path: Path) -> None:
    """Also of weights that were frozen, and in the first step, whose messages are described."""
    weights = [
        cf.launch(frozen, tmp_path, compress=compress, resumes=resumes, workers=2, transport="local")[0]
        for resumes in (False, True)
    ]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
