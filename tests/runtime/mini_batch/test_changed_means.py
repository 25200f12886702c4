"""Losses of torch's own that a loss function changes: in place, by a hook, or in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from ...kit import run, sgd
from .test_mean_losses import F, alone, batch, layers, plain, value

SCHEDULES = [cf.schemes.gpipe(1, 1), cf.schemes.dapple(2, 4), cf.schemes.zb_v(2, 4)]


def equal(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of which as much counts in each micro-batch."""
    return cross_entropy(output.flatten(0, 1), target.clamp(min=0).flatten())


def added(output: Tensor, target: Tensor) -> Any:
    loss = equal(output, target)
    loss += 0.3 * output.pow(2).mean()
    return loss


def with_metrics(output: Tensor, target: Tensor) -> Any:
    return added(output, target), {"output": output.detach().mean()}


def hooked(output: Tensor, target: Tensor) -> Any:
    loss = equal(output, target)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * 2)
    return loss


def hooked_before_it_is_halved(output: Tensor, target: Tensor) -> Any:
    loss = equal(output, target)
    half = loss / 2
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * 2)
    return half


def error_added(output: Tensor, target: Tensor) -> Any:
    loss = mse_loss(output, target[..., None].expand_as(output).to(output.dtype))
    loss += 0.3 * output.pow(2).mean()
    return loss


def checkpointed(output: Tensor, target: Tensor) -> Any:
    return checkpoint(equal, output, target, use_reentrant=False)


def checkpointed_with_reentry(output: Tensor, target: Tensor) -> Any:
    if not output.requires_grad:  # torch warns
        return equal(output, target)
    return checkpoint(equal, output, target, use_reentrant=True)


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(equal(leaf, target), leaf)
        ctx.save_for_backward(gradient)
        return equal(output, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient, None


def of_function(output: Tensor, target: Tensor) -> Any:
    apply: Any = _GradientInForward.apply
    return apply(output, target)


LOSSES = [
    added, with_metrics, hooked, hooked_before_it_is_halved, error_added, checkpointed,
    checkpointed_with_reentry, of_function,
]  # fmt: skip


def piped(schedule: Schedule, make: Callable[[], list[nn.Module]], loss: Any) -> Any:
    pipeline = cf.Pipeline(nn.Sequential(*make()), loss, schedule, optimizer=sgd)
    losses = [pipeline.step(*batch(number)).loss for number in range(2)]
    return [*losses, pipeline.evaluate(*batch(0)).loss], pipeline.model_state_dict()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_changes_of_a_loss_count(loss: Any, schedule: Schedule) -> None:
    losses, state = alone(loss)
    for numbers, after in run(piped, schedule, layers, loss, workers=schedule.workers):
        assert numbers == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(after, dict(state), rtol=1e-9, atol=1e-11)


def divided(output: Tensor, target: Tensor) -> Any:
    """Divided in place, as for an accumulation; other shares of targets count in each micro-batch."""
    loss = plain(output, target)
    loss /= 4
    loss *= 0.5
    return loss


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_numbers_divide_in_place(schedule: Schedule) -> None:
    losses, state = alone(divided)
    for numbers, after in run(piped, schedule, layers, divided, workers=schedule.workers):
        assert numbers == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(after, dict(state), rtol=1e-9, atol=1e-11)


def clamped(output: Tensor, target: Tensor) -> Any:
    return plain(output, target).clamp_(max=3.0)


def test_changes_where_other_shares_count_are_refused() -> None:
    def work() -> None:
        pipeline = cf.Pipeline(layers(), clamped, cf.schemes.dapple(2, 4), optimizer=sgd)
        x, y = batch(0)
        y[:3] = 1  # something counts in each
        pipeline.step(x, y)

    with pytest.raises(ConfigError, match=r"return a cf\.LossSum|no mean over samples"):
        run(work, workers=2)


class Penalty(nn.Linear):
    """A layer that adds to the loss."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        cf.add_loss(0.1 * output.pow(2).mean())
        return output


def with_penalty() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Penalty(4, 4, dtype=F), nn.Tanh(), nn.Linear(4, 5, dtype=F)]


@pytest.mark.parametrize("loss", [checkpointed_with_reentry, of_function])
@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=str)
def test_losses_of_layers_leave_the_gradient_of_a_checkpointed_loss(loss: Any, schedule: Schedule) -> None:
    modules = with_penalty()
    optimizer = sgd([weight for module in modules for weight in module.parameters()])
    expected = []
    for number in range(2):
        x, y = batch(number)
        first = nn.functional.linear(x, modules[0].weight, modules[0].bias)  # type: ignore[arg-type]
        output = modules[2](modules[1](first))
        total = value(loss(output, y)) + 0.1 * first.pow(2).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        expected.append(total.item())
    for numbers, after in run(piped, schedule, with_penalty, loss, workers=schedule.workers):
        assert numbers[:2] == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(after, nn.Sequential(*modules).state_dict(), rtol=1e-9, atol=1e-11)
