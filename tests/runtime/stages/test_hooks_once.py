"""Hooks of activations run once a micro-batch where backwards are split, with the numbers of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import sgd

F = torch.float64
WIDTH, COUNT = 6, 4
SPLIT = [
    schemes.zb_h1(2, COUNT),
    schemes.zb_v(2, COUNT),
    schemes.interleaved_zb(2, COUNT, chunks=2),
    schemes.dualpipe(2, COUNT),
]


class Hooked(nn.Module):
    """Two layers with a hook between, which keeps what it saw; one of three steps is without."""

    def __init__(self, hook: Callable[[Hooked, Tensor], Tensor | None], first: int = 0) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, dtype=F), nn.Linear(WIDTH, WIDTH, dtype=F)
        self.hook, self.first = hook, first
        self.forwards, self.mean, self.seen = 0, 0.0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        between = self.one(x)
        self.forwards += between.requires_grad
        if between.requires_grad and self.forwards > self.first * COUNT:
            between.register_hook(self.called)
        found: Tensor = self.other(between)
        return found

    def called(self, gradient: Tensor) -> Tensor | None:
        self.seen.append(gradient.norm().item())
        return self.hook(self, gradient)


def balanced(layer: Hooked, gradient: Tensor) -> Tensor:
    """A gradient divided by the running mean of its norms."""
    layer.mean = 0.5 * layer.mean + gradient.norm().item()
    return gradient / layer.mean


def in_place(_: Hooked, gradient: Tensor) -> None:
    gradient.clamp_(-0.01, 0.01)


def looks(_: Hooked, gradient: Tensor) -> None:
    del gradient


def layers(hook: Any, first: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=F) for _ in range(8)]
    made[1], made[5] = Hooked(hook, first), Hooked(hook, first)
    return made


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(8, WIDTH, generator=generator, dtype=F) for _ in range(2))
    return x, y


def trained(schedule: Schedule, hook: Any, first: int, options: dict[str, Any]) -> Any:
    with Pipeline(layers(hook, first), functional.mse_loss, schedule, optimizer=sgd, **options) as pipeline:
        for _ in range(3):
            pipeline.step(*batch())
        seen = {
            layer.index: layer.module.seen
            for copy in pipeline.stages.values()
            for layer in copy.layers
            if isinstance(layer.module, Hooked)
        }
        return pipeline.model_state_dict(), seen


def alone(hook: Any, first: int) -> tuple[dict[str, Tensor], dict[int, list[float]]]:
    """One process, micro-batch after micro-batch."""
    made = layers(hook, first)
    model = nn.Sequential(*made)
    optimizer = sgd(list(model.parameters()))
    for _ in range(3):
        for x, y in zip(*(t.chunk(COUNT) for t in batch()), strict=True):
            (functional.mse_loss(model(x), y) / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), {n: layer.seen for n, layer in enumerate(made) if isinstance(layer, Hooked)}


@pytest.mark.table
@pytest.mark.parametrize("options", [{}, {"recompute": "stage"}, {"barrier": False}], ids=str)
@pytest.mark.parametrize("schedule", SPLIT, ids=str)
@pytest.mark.parametrize("hook", [balanced, in_place, looks])
def test_a_hook_runs_once_a_micro_batch(hook: Any, schedule: Schedule, options: dict[str, Any]) -> None:
    first = 1 if hook is looks else 0  # such a hook may come later
    if hook is balanced and schedule.scheme == "dualpipe":
        pytest.skip("two copies of a layer have a running mean each")
    state, seen = alone(hook, first)
    for ours, ours_seen in launch(
        lambda: trained(schedule, hook, first, options), workers=2, transport="local", timeout_seconds=30
    ):
        for name, tensor in state.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12)
        if schedule.scheme != "dualpipe" and not options.get("recompute"):
            for number, norms in ours_seen.items():
                assert norms == pytest.approx(seen[number], rel=1e-9)


class Keeps(nn.Linear):
    """Has its output keep its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.output = super().forward(x)
        if self.output.requires_grad:
            self.output.retain_grad()
        return self.output.tanh()


@pytest.mark.parametrize("schedule", [schemes.gpipe(2, 1), schemes.zb_h1(2, 1)], ids=str)
def test_a_gradient_that_is_retained_is_so_once(schedule: Schedule) -> None:
    torch.manual_seed(0)
    made = [Keeps(WIDTH, WIDTH, dtype=F) for _ in range(4)]
    alone = deepcopy(made)
    x, y = batch()

    def work() -> dict[int, Tensor | None]:
        with Pipeline(made, functional.mse_loss, schedule, optimizer=sgd) as pipeline:
            pipeline.step(x, y)
            copies = pipeline.stages.values()
            return {x.index: x.module.output.grad for c in copies for x in c.layers}  # type: ignore[misc]

    found = {n: gradient for row in launch(work, workers=2, transport="local") for n, gradient in row.items()}
    functional.mse_loss(nn.Sequential(*alone)(x), y).backward()
    for number, layer in enumerate(alone):
        gradient = found[number]
        assert gradient is not None
        assert layer.output.grad is not None
        torch.testing.assert_close(gradient, layer.output.grad)


def hooked_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.requires_grad:
        output.register_hook(CALLS.append)
    return functional.mse_loss(output, target)


CALLS: list[Tensor] = []


def test_a_hook_that_the_loss_registers_too() -> None:
    CALLS.clear()

    def work() -> None:
        torch.manual_seed(0)
        model = [nn.Linear(WIDTH, WIDTH, dtype=F) for _ in range(2)]
        options: dict[str, Any] = {"per_micro_batch_loss": True}  # no check calls the loss on copies
        with Pipeline(model, hooked_loss, schemes.zb_h1(2, COUNT), optimizer=sgd, **options) as pipeline:
            pipeline.step(*batch())

    launch(work, workers=2, transport="local")
    assert len(CALLS) == COUNT


class HooksNode(nn.Linear):
    """Halves the gradients of its weights by a hook of the node."""

    def forward(self, x: Tensor) -> Tensor:
        """Output with the hook."""
        output = super().forward(x)
        if output.grad_fn is not None:
            output.grad_fn.register_hook(
                lambda gradients, _: tuple(None if g is None else g / 2 for g in gradients)
            )
        return output.tanh()


@pytest.mark.parametrize("kind", [nn.Linear, HooksNode])
def test_a_hook_of_a_node_changes_the_weights_of_a_product(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    made = [kind(WIDTH, WIDTH, dtype=F) for _ in range(4)]
    model = nn.Sequential(*deepcopy(made))
    x, y = batch()

    def work() -> tuple[dict[str, Tensor], bool]:
        with Pipeline(made, functional.mse_loss, schemes.zb_h1(2, COUNT), optimizer=sgd) as pipeline:
            pipeline.step(x, y)
            hooked = [stage.split_planner.hooks.has_hooks for stage in pipeline.stages.values()]
            return pipeline.model_state_dict(), all(hooked)

    optimizer = sgd(list(model.parameters()))
    for micro_batch in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
        (functional.mse_loss(model(micro_batch[0]), micro_batch[1]) / COUNT).backward()
    optimizer.step()
    for state, hooked in launch(work, workers=2, transport="local"):
        assert hooked is (kind is HooksNode)  # without any, products take the short way
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)
