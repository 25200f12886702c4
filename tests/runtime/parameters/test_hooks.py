"""Hooks of parameters see the gradient of the whole mini-batch once an update, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import LossSum
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

from ...kit import run

F = torch.float64
FLUSHING = [
    schemes.dapple(2, 4),
    schemes.chimera(2, 4),
    schemes.chimera(2, 8, concat="forward-doubling"),
    schemes.chimera(2, 8, concat="backward-halving", split=True),
    schemes.zb_v(2, 4),
]
CONTINUOUS = [schemes.pipedream(2), schemes.pipedream_2bw(2, 2), schemes.wpipe(1, 2)]
LIMIT = 0.02
State = dict[str, Tensor]


@pytest.fixture
def in_this_process() -> Iterator[None]:
    """Pipelines of one worker without a launch, whose layers are the model's own."""
    yield
    torch.distributed.destroy_process_group()


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def rooted(parameter: Tensor) -> None:
    """In place, and with the weight."""
    assert parameter.grad is not None
    parameter.grad.copy_(parameter.grad.sign() * parameter.grad.abs().sqrt() + 0.1 * parameter.detach())


def squashed(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.tanh()


def left_out(parameter: Tensor) -> None:
    parameter.grad = None


class Tied(nn.Module):
    """A layer with the weight of another."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.other.t()


def layers(*, tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    found = [nn.Linear(4, 4, dtype=F) for _ in range(5)]
    found[0].weight.register_hook(clamped)
    found[1].weight.register_hook(lambda gradient: gradient * 3)
    found[1].weight.register_hook(clamped)
    found[1].bias.register_post_accumulate_grad_hook(rooted)
    found[2].weight.register_post_accumulate_grad_hook(squashed)
    found[3].bias.register_post_accumulate_grad_hook(left_out)
    return [*found[:4], Tied(found[0]) if tied else found[4]]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def counted(output: Tensor, target: Tensor) -> LossSum:
    counts = target[:, :1] > 0
    return LossSum(((output - target) ** 2 * counts).sum(), counts.sum())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(seed), dtype=F)
    return x, y


def alone(tied: bool, loss: Any, clip: float | None) -> tuple[list[float], State]:
    model = nn.Sequential(*layers(tied=tied))
    optimizer = adamw(list(model.parameters()))
    norms = []
    for number in range(3):
        x, y = batch(number)
        found = loss(model(x), y)
        (found.sum / found.weight if isinstance(found, LossSum) else found).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def piped(schedule: Schedule, tied: bool, loss: Any, options: dict[str, Any]) -> tuple[list[float], State]:
    model = nn.Sequential(*layers(tied=tied))
    pipeline = Pipeline(model, loss, schedule, optimizer=adamw, digest_every=1, **options)
    rows = slice(pipeline.replica, None, pipeline.replicas)
    told = [pipeline.step(*(t[rows] for t in batch(number))) for number in range(3)]
    told += pipeline.flush()
    return [step.grad_norm for step in told if step.reports_step is not None], pipeline.model_state_dict()


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", FLUSHING, ids=str)
@pytest.mark.parametrize(
    ("replicas", "tied", "loss", "more"),
    [
        (1, True, mean_square, {}),
        (2, True, counted, {"clip_norm": 0.1}),
        (1, False, counted, {"barrier": False}),
        (2, False, mean_square, {"barrier": False, "clip_norm": 0.1}),
        (1, False, mean_square, {"skip_non_finite": True}),
    ],
)
def test_hooks_see_the_whole_gradient(  # noqa: PLR0917
    schedule: Schedule, recompute: str, replicas: int, tied: bool, loss: Any, more: dict[str, Any]
) -> None:
    norms, state = alone(tied, loss, more.get("clip_norm"))
    options = {**more, "recompute": recompute}
    for ours, after in run(piped, schedule, tied, loss, options, workers=2 * replicas):
        assert ours == pytest.approx(norms, rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.table
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", CONTINUOUS, ids=str)
def test_without_a_flush_too(schedule: Schedule, replicas: int) -> None:
    batches = [[batch(replicas * n + r) for r in range(replicas)] for n in range(8)]
    found = verify(
        schedule,
        layers(),
        mean_square,
        batches,
        optimizer=adamw,
        cuts=(2,),
        transport="strict-local",
        clip_norm=0.1,
    )
    assert found.ok, found


def test_what_verify_compares_with_is_one_process() -> None:
    batches = [[batch(n)] for n in range(3)]
    found = verify(
        schemes.dapple(2, 4), layers(), mean_square, batches, optimizer=adamw, transport="strict-local"
    )
    assert found.ok, found


def test_gradients_of_several_steps_are_seen_once() -> None:
    model = nn.Sequential(*layers())
    seen: list[Tensor] = []
    model.get_parameter("4.weight").register_hook(lambda gradient: seen.append(gradient.clone()))
    expected = copy.deepcopy(nn.Sequential(*layers()))
    x, y = (torch.cat(same) for same in zip(batch(0), batch(1), strict=True))
    mean_square(expected(x), y).backward()

    def work() -> None:
        pipeline = Pipeline(model, mean_square, schemes.dapple(2, 4), optimizer=adamw)
        pipeline.step(*batch(0), update=False)
        pipeline.step(*batch(1))

    run(work)
    (gradient,) = seen
    torch.testing.assert_close(gradient, expected[4].weight.grad)


@pytest.mark.usefixtures("in_this_process")
def test_a_hook_may_remove_itself_and_the_user_a_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=F))
    calls: list[str] = []

    def once(_: Tensor) -> None:
        calls.append("once")
        first.remove()

    first = model.get_parameter("0.weight").register_hook(once)
    second = model.get_parameter("0.bias").register_post_accumulate_grad_hook(
        lambda _: calls.append("second")
    )
    with Pipeline(model, mean_square, schemes.dapple(1, 4), optimizer=adamw) as pipeline:
        pipeline.step(*batch(0))
        pipeline.step(*batch(1))
        assert calls == ["once", "second", "second"]
        second.remove()
        model.get_parameter("0.bias").register_hook(lambda _: calls.append("third"))
        pipeline.step(*batch(2))
        assert calls[3:] == ["third"]
    mean_square(model(batch(0)[0]), batch(0)[1]).backward()  # the model has its hooks again
    assert calls[3:] == ["third"] * 2


@pytest.mark.usefixtures("in_this_process")
def test_the_first_hook_after_the_pipeline_was_made_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=F))
    with Pipeline(model, mean_square, schemes.dapple(1, 4), optimizer=adamw) as pipeline:
        model.get_parameter("0.bias").register_hook(clamped)
        with pytest.raises(ConfigError, match=r"0\.bias has a hook that was registered after the pipeline"):
            pipeline.step(*batch(0))


@pytest.mark.parametrize("schedule", [FLUSHING[1], CONTINUOUS[2]], ids=str)
def test_hooks_draw_the_same_on_all_copies(schedule: Schedule) -> None:
    model = nn.Sequential(*layers()[:2])
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient))

    def work() -> State:
        pipeline = Pipeline(model, mean_square, schedule, optimizer=adamw, digest_every=1)
        for number in range(3):
            pipeline.step(*batch(number // 2))
        return pipeline.model_state_dict()

    states = run(work, workers=2 * schedule.workers)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)


@pytest.mark.usefixtures("in_this_process")
def test_a_gradient_of_another_shape_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=F))
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient[:2])
    with (
        Pipeline(model, mean_square, schemes.dapple(1, 4), optimizer=adamw) as pipeline,
        pytest.raises(WorkerError, match="assign a gradient of size"),
    ):
        pipeline.step(*batch(0))
