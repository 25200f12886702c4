"""What users give beside a model, rightly and not: optimizers, losses, metrics, options, calls from threads.

What is not right is refused with a sentence that says what to change, on all workers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow import ConfigError, Pipeline, launch, schemes
from counterflow.schedule.ir import Schedule

from .alone import SCHEMES, Case, Given, adamw, agrees, numbers, seeded
from .models import WIDTH, Mlp

DOUBLING = schemes.chimera(2, 8, concat="forward-doubling")


def plain(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH))


def layers() -> list[nn.Module]:
    return [Mlp() for _ in range(4)]


class Gives(nn.Linear):
    """An object of no class that pytrees know, with the loss in it."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return SimpleNamespace(loss=y.square().mean(), logits=y)


@pytest.mark.parametrize("schedule", [schemes.dapple(2, 4), DOUBLING, schemes.zb_v(2, 4)], ids=str)
def test_a_last_layer_may_give_an_object(schedule: Schedule) -> None:
    case = Case(seeded(lambda: [*layers(), Gives(WIDTH, WIDTH)]), plain, loss=None)
    agrees(case, 2, schedules=[schedule], every=True)


def _filtered(schedule: Schedule) -> Any:
    """Updates by optimizers that leave out what is frozen: of the first stages all."""
    frozen = seeded(layers)()
    for layer in frozen[:2]:
        layer.requires_grad_(requires_grad=False)
    with Pipeline(
        frozen,
        functional.mse_loss,
        schedule,
        optimizer=lambda parameters: torch.optim.Adam([p for p in parameters if p.requires_grad]),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    ) as pipeline:
        losses = [pipeline.step(*pair).loss for pair in [(plain(0).inputs, plain(0).targets)] * 3]
        pipeline.load_state_dict(pipeline.state_dict())
        return losses


@pytest.mark.parametrize("schedule", SCHEMES[2][::3], ids=str)
def test_an_optimizer_may_take_nothing_of_a_stage(schedule: Schedule) -> None:
    model = nn.Sequential(*seeded(layers)())
    model[:2].requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(plain(0).inputs), plain(0).targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        expected.append(float(loss.detach()))
    for losses in launch(_filtered, schedule, workers=2, transport="local", timeout_seconds=30):
        assert losses == pytest.approx(expected, rel=1e-12)


def penalised(output: Tensor, target: Tensor) -> Tensor:
    """With a gradient made on the way."""
    (slope,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
    return functional.mse_loss(output, target) + slope.square().mean()


def test_a_loss_may_make_gradients() -> None:
    case = Case(seeded(layers), plain, penalised, modes=("none", "layer"))
    agrees(case, 2, schedules=[schemes.dapple(2, 4), DOUBLING], every=True)


def by_name(given: Any) -> torch.optim.Optimizer:
    first = [pair for pair in given.named if pair[0].startswith("0.")]
    return torch.optim.AdamW([{"params": first}, {"params": [p for p in given.named if p not in first]}])


def with_metric(value: object) -> Callable[[Any, Any], Any]:
    return lambda output, target: (functional.mse_loss(output, target), {"found": value})


other = nn.Parameter(torch.ones(3))
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"optimizer": torch.optim.SGD([other], lr=0.1)},
        "optimizer must be callable, got a value of class SGD; give",
    ),
    ({"scheduler": 0.5}, "scheduler must be callable, got a value of class float; give"),
    ({"scheduler": lambda _: None}, "scheduler gives a NoneType for stage"),
    ({"optimizer": lambda given: [torch.optim.SGD(given)]}, "optimizer gives a list for stage"),
    ({"optimizer": by_name}, "raised ValueError for stage 1.* leave out groups"),
    ({"optimizer": lambda given: adamw([*given, other])}, r"a parameter of shape \(3,\) that its function"),
    ({"loss_function": with_metric(torch.ones(3))}, r"the metric 'found' is a tensor of shape \(3,\)"),
    ({"loss_function": with_metric("much")}, "the metric 'found' is 'much'; give real numbers"),
    ({"loss_function": lambda output, _: output.argmax()}, "the loss is of dtype torch.int64"),
    ({"loss_function": penalised, "recompute": "stage"}, "makes gradients in its forward .* take recompute="),
    ({"cuts": ["2"]}, "cuts must be numbers of layers"),
    ({"input_dims": "first"}, "input_dims='first' does not fit the inputs"),
]


def _step(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"loss_function": functional.mse_loss, "optimizer": adamw}
    pipeline = Pipeline(seeded(layers)(), schedule=schemes.dapple(2, 4), **(given | options))
    pipeline.step(plain(0).inputs, plain(0).targets)


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_is_not_right_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(_step, options, workers=2, transport="local", timeout_seconds=30)


def _calls(call: Callable[[Pipeline], None]) -> None:
    with Pipeline(seeded(layers)(), functional.mse_loss, schemes.dapple(2, 4), optimizer=adamw) as pipeline:
        call(pipeline)


def in_a_thread(pipeline: Pipeline) -> None:
    """And wait for it."""
    found: list[Exception] = []

    def step() -> None:
        try:
            pipeline.step(plain(0).inputs, plain(0).targets)
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    raise found[0]


def with_one_more(pipeline: Pipeline) -> None:
    for optimizer in pipeline.optimizers.values():
        optimizer.add_param_group({"params": [other]})
    pipeline.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (in_a_thread, "workers are threads, and one's pipeline was called in another thread"),
        (with_one_more, r"the optimizer of stage \d has a parameter of shape \(3,\)"),
        (copy.deepcopy, "a pipeline cannot be copied or pickled"),
    ],
)
def test_calls_that_are_not_right_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(_calls, call, workers=2, transport="local", timeout_seconds=30)


def _detached(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.detach(), target)


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("barrier", [True, False])
def test_a_loss_that_depends_on_no_weight_is_refused(recompute: Any, barrier: bool) -> None:
    def run() -> None:
        pipeline = Pipeline(
            seeded(layers)(),
            _detached,
            schemes.chimera(2, 4),
            optimizer=adamw,
            recompute=recompute,
            barrier=barrier,
        )
        for step in range(3):
            pipeline.step(plain(step).inputs, plain(step).targets)
        pipeline.flush()

    with pytest.raises(ConfigError, match="no loss of the mini-batch has a graph"):
        launch(run, workers=2, transport="local")


@pytest.mark.parametrize("schedule", [schemes.dapple(2, 4), schemes.chimera(2, 4), DOUBLING], ids=str)
def test_some_micro_batches_may_have_nothing_to_learn_from(schedule: Schedule) -> None:
    def given(step: int) -> Given:
        sign = torch.tensor([1.0, -1.0]).repeat_interleave(8)[:, None]  # of the first half, and of the other
        return Given(numbers(step, 16, WIDTH), sign * numbers(step + 100, 16, WIDTH).abs())

    agrees(Case(seeded(layers), given, loss=_some_detached), 2, schedules=[schedule])


def _some_detached(output: Tensor, target: Tensor) -> Tensor:
    counts = (target.sum(1) > 0)[:, None]
    if not bool(counts.any()):
        return functional.mse_loss(output.detach(), target)
    return functional.mse_loss(torch.where(counts, output, output.detach()), target)
