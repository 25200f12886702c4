"""In the first mini-batch of a kind a loss that is no mean over samples is refused, where it can be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow import LossSum
from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import sgd

WIDTH = 5
ONE = schemes.dapple(2, 4)


def layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).to(dtype) for _ in range(2)]


def batch(samples: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(samples, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return x, y


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def contrasted(output: Tensor, target: Tensor) -> Tensor:
    """InfoNCE."""
    scores = functional.normalize(output) @ functional.normalize(target).T
    return functional.cross_entropy(scores, torch.arange(len(output)))


def masked(output: Tensor, target: Tensor) -> Tensor:
    chosen = target > 0
    return ((output - target).square() * chosen).sum() / chosen.sum()


class Fused(torch.autograd.Function):
    """A cross entropy whose forward makes the gradient, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            chosen = target != -100
            loss = -leaf.log_softmax(1)[chosen, target[chosen]].mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0], None


def fused(output: Tensor, target: Tensor) -> Tensor:
    classes = target.argmax(1)
    classes[target[:, 0] > 0.5] = -100
    return Fused.apply(output, classes)  # type: ignore[no-any-return, no-untyped-call]


def no_sum(output: Tensor, target: Tensor) -> LossSum:
    """A mean, told as a sum of weight 1."""
    return LossSum(functional.mse_loss(output, target), 1.0 + len(output) ** 2)


def spread(output: Tensor, target: Tensor) -> Tensor:
    """With a term that looks across samples."""
    return functional.mse_loss(output, target) + output.var(0).mean()


def work(loss: Any, schedule: Schedule, options: dict[str, Any], samples: int, how: str) -> list[float]:
    dtype = options.pop("dtype", torch.float32) if "dtype" in options else torch.float32
    with Pipeline(layers(dtype), loss, schedule, optimizer=sgd, **options) as pipeline:
        x, y = batch(samples, dtype)
        if how == "evaluate":
            return [pipeline.evaluate(x, y).loss]
        if how == "kept":
            pipeline.step(x, y, update=False)
        steps = [pipeline.step(x, y) for _ in range(2)] + pipeline.flush()
        return [step.loss for step in steps]


def run(  # noqa: PLR0917
    loss: Any,
    schedule: Schedule = ONE,
    options: dict[str, Any] | None = None,
    samples: int = 16,
    how: str = "step",
    workers: int = 2,
) -> list[Any]:
    return launch(
        lambda: work(loss, schedule, dict(options or {}), samples, how),
        workers=workers,
        transport="local",
        timeout_seconds=30,
    )


def correlated(output: Tensor, target: Tensor) -> Tensor:
    """Barlow Twins: normalised by the deviations over the batch, of one sample not finite."""
    one, other = ((x - x.mean(0)) / x.std(0) for x in (output, target))
    return (one.T @ other / len(one) - torch.eye(WIDTH)).square().sum()


def hard(output: Tensor, target: Tensor) -> Tensor:
    """The mean over hard examples, of one sample over none."""
    errors = (output - target).square().mean(1)
    return errors[errors > errors.mean()].mean()


def focal(output: Tensor, target: Tensor) -> Any:
    """A focal loss, normalised by the number of positives, with metrics."""
    labels = (target > 0.5).float()
    errors = functional.binary_cross_entropy_with_logits(output, labels, reduction="none")
    count = labels.sum().clamp(min=1)
    return {"loss": (errors * (1 - output.sigmoid()) ** 2).sum() / count, "positives": count}


REFUSED = [total, contrasted, masked, fused, spread, no_sum, correlated, hard, focal]


@pytest.mark.parametrize("how", ["step", "evaluate"])
@pytest.mark.parametrize("loss", REFUSED)
def test_what_is_no_mean_over_samples_is_refused(loss: Any, how: str) -> None:
    with pytest.raises(ConfigError, match=r"no mean over samples.*LossSum.*per_micro_batch_loss=True"):
        run(loss, how=how)


@pytest.mark.parametrize(
    ("schedule", "options", "samples", "workers"),
    [
        (ONE, {"barrier": False}, 13, 2),
        (schemes.chimera(2, 4, concat="backward-halving"), {"recompute": "stage"}, 16, 2),
        (schemes.pipedream_2bw(2, 2), {}, 16, 2),
        (ONE, {}, 4, 2),  # of one sample each: two of them are looked at together
        (schemes.dapple(2, 1), {}, 8, 4),  # two replicas with one each
    ],
    ids=str,
)
def test_it_is_seen_wherever_losses_are_added_up(
    schedule: Schedule, options: dict[str, Any], samples: int, workers: int
) -> None:
    with pytest.raises(ConfigError, match="no mean over samples"):
        run(total, schedule, options, samples, workers=workers)


def test_several_steps_of_an_update_are_added_up_too() -> None:
    with pytest.raises(ConfigError, match="no mean over samples"):
        run(total, schemes.dapple(2, 1), how="kept")


def test_one_micro_batch_alone_has_any_loss() -> None:
    x, y = batch()
    for found in run(total, schemes.dapple(2, 1)):
        assert found[0] == pytest.approx(total(nn.Sequential(*layers())(x), y).item(), rel=1e-5)


def test_who_insists_trains_the_mean_of_the_micro_batches() -> None:
    x, y = batch()
    output = nn.Sequential(*layers())(x)
    expected = sum(contrasted(o, t).item() for o, t in zip(output.chunk(4), y.chunk(4), strict=True)) / 4
    for found in run(contrasted, options={"per_micro_batch_loss": True}):
        assert found[0] == pytest.approx(expected, rel=1e-5)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Parts balanced by their detached sizes: a mean by value, not by gradient."""
    one, other = functional.mse_loss(output, target), functional.l1_loss(output, target)
    return one + other * (one.detach() / other.detach())


class Normalised(nn.Module):
    """Divided by its detached size, times a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        loss = functional.mse_loss(output, target) * self.weight.exp()
        return loss / loss.detach(), {"size": loss.detach()}


def rescaled(output: Tensor, target: Tensor) -> LossSum:
    """A sum whose gradient is clipped by its norm."""
    loss = total(output, target)
    return LossSum(loss / loss.detach() ** 0.5 + (loss - loss / loss**0.5).detach(), len(output))


@pytest.mark.parametrize("loss", [balanced, Normalised(), rescaled], ids=["balanced", "a module", "a sum"])
@pytest.mark.parametrize(
    ("schedule", "options", "samples", "workers"),
    [
        (ONE, {}, 16, 2),
        (ONE, {"recompute": "stage"}, 13, 2),
        (ONE, {"dtype": torch.float64}, 4, 2),  # of one sample each
        (schemes.zb_h1(2, 4), {}, 16, 2),
        (schemes.chimera(2, 4, concat="backward-halving"), {"recompute": "stage"}, 16, 2),
        (schemes.dapple(2, 1), {}, 8, 4),
    ],
    ids=str,
)
def test_what_is_no_mean_by_its_gradient_is_refused(
    loss: Any, schedule: Schedule, options: dict[str, Any], samples: int, workers: int
) -> None:
    with pytest.raises(ConfigError, match=r"its value is, but the gradient.*per_micro_batch_loss=True"):
        run(loss, schedule, options, samples, workers=workers)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("loss", [correlated, hard])
@pytest.mark.parametrize("samples", [8, 11, 12])
def test_whole_units_are_compared_where_parts_are_not_finite(loss: Any, samples: int) -> None:
    for how in ("step", "evaluate"):
        with pytest.raises(ConfigError, match="no mean over samples: of"):
            run(loss, samples=samples, how=how)


def step_with(*chosen: list[int]) -> int:
    """Steps of two replicas with a unit each, whose targets have these numbers of positive elements."""
    steps: list[int] = []

    def work() -> None:
        with Pipeline(layers(), masked, schemes.dapple(2, 1), optimizer=sgd) as pipeline:
            for number, counts in enumerate(chosen):
                x, y = batch(len(counts))
                signs = torch.tensor([[1.0] * count + [-1.0] * (WIDTH - count) for count in counts])
                pipeline.step(x, y.abs() * signs)
                steps.append(number)

    with pytest.raises(ConfigError, match="no mean over samples: of"):
        launch(work, workers=4, transport="local")
    return len({*steps})


def test_other_parts_are_tried_where_that_of_a_half_is_not_finite() -> None:
    assert step_with([0, 0, 0, 1, 3, 0]) == 0


def test_a_kind_that_was_not_decided_is_checked_again(caplog: pytest.LogCaptureFixture) -> None:
    assert step_with([0, 1], [0, 1], [0, 1], [1, 4]) == 3
    found = [r.getMessage() for r in caplog.records if "could not verify that the loss" in r.getMessage()]
    assert "of some of the samples is not finite" in found[0]


def test_a_worker_that_has_one_sample_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run(functional.mse_loss, schemes.dapple(2, 1), samples=1, workers=4)
    found = [r.getMessage() for r in caplog.records if "could not verify that the loss" in r.getMessage()]
    assert found[0].endswith("(assumed): a worker has the loss of one sample alone")


def entropy(output: Tensor, target: Tensor) -> Tensor:
    classes = target.argmax(1)
    classes[target[:, 0] > 0.5] = -100
    return functional.cross_entropy(output, classes)


def own_mean(output: Tensor, target: Tensor) -> Any:
    error = (output - target).abs()
    return {"loss": error.mean() + 0.1, "largest": error.detach().mean()}


def chosen(output: Tensor, target: Tensor) -> Tensor:
    return functional.smooth_l1_loss(output[target > 0], target[target > 0])


def summed(output: Tensor, target: Tensor) -> LossSum:
    return LossSum(total(output, target), len(output))


@pytest.mark.table
@pytest.mark.parametrize("samples", [16, 13, 4, 3])
@pytest.mark.parametrize(
    "loss",
    [functional.mse_loss, nn.L1Loss(), nn.HuberLoss(), entropy, own_mean, chosen, summed],
    ids=["mse", "l1", "huber", "entropy", "own mean", "chosen", "a sum"],
)
def test_means_pass(loss: Any, samples: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        run(loss, options={"dtype": dtype}, samples=samples)
    run(loss, samples=samples, how="evaluate")


def dictionary(output: Any, target: Any) -> Tensor:
    found: Tensor = functional.mse_loss(output["a"], target["b"]) + output["c"].square().mean()
    return found


class ToDict(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"a": found, "c": found.T}


def test_outputs_and_targets_of_any_structure_are_halved() -> None:
    def step() -> float:
        model = [*layers()[:1], ToDict(WIDTH, WIDTH)]
        options: dict[str, Any] = {"output_dims": {"a": 0, "c": 1}, "target_dims": {"b": 0}}
        with Pipeline(model, dictionary, ONE, optimizer=sgd, **options) as pipeline:
            x, y = batch()
            return pipeline.step(x, {"b": y}).loss

    launch(step, workers=2, transport="local")


def counted(function: Callable[[Tensor, Tensor], Any], calls: list[int]) -> Callable[[Tensor, Tensor], Any]:
    def loss(output: Tensor, target: Tensor) -> Any:
        calls.append(len(output))
        return function(output, target)

    return loss


def test_it_costs_the_first_mini_batch_of_a_kind_and_a_unit_of_some_steps() -> None:
    calls: list[int] = []

    def steps() -> None:
        with Pipeline(layers(), counted(own_mean, calls), ONE, optimizer=sgd) as pipeline:
            for samples in (16, 16, 12, 16, 16):  # the second and the fourth are checked again
                pipeline.step(*batch(samples))

    launch(steps, workers=2, transport="local")
    first, again, third = [4, 2, 2, 4] * 4 + [16], [4, 2, 2] + [4] * 4, [3, 1, 2, 3] * 4 + [12]
    assert calls == first + again + third + again + [4] * 4


def drawing(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target + 0.1 * torch.randn_like(target))


def of_four(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.view(4, WIDTH), target)


@pytest.mark.parametrize(
    ("loss", "why"),
    [(drawing, "it draws random numbers"), (of_four, "of half of a micro-batch: RuntimeError")],
)
def test_what_cannot_be_told_is_said_once(loss: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    run(loss)
    found = [r.getMessage() for r in caplog.records if "could not verify that the loss" in r.getMessage()]
    assert len(found) == 1
    assert why in found[0]


class Counting(nn.Module):
    """Has a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.mse_loss(output, target.sub_(0.0))


def test_the_random_state_and_buffers_are_as_they_were() -> None:
    x, y = batch()

    def step() -> tuple[float, float, list[float]]:
        with Pipeline(layers(), Counting(), ONE, optimizer=sgd) as pipeline:
            torch.manual_seed(7)
            before = float(torch.rand(()))
            torch.manual_seed(7)
            pipeline.evaluate(x, y)
            pipeline.step(x, y)
            after = float(torch.rand(()))
            last = pipeline.stages.get(1)
            calls = [] if last is None else [float(b) for b in last.with_weights[-1].module.buffers()]
            return before, after, calls

    (before, after, _), (_, _, calls) = launch(step, workers=2, transport="local")
    assert before == after
    assert calls == [8.0]


@dataclasses.dataclass
class OpaqueTarget:
    """Targets that nothing can cut."""

    y: Tensor


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_loss_of_targets_that_cannot_be_cut_is_assumed_to_be_a_mean(
    samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> float:
        torch.manual_seed(0)
        pipeline = Pipeline(
            [nn.Linear(4, 8), nn.Linear(8, 3)], lambda output, target: ((output - target.y) ** 2).mean(),
            schemes.dapple(2, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )  # fmt: skip
        x, y = torch.randn(samples, 4), torch.randn(samples, 3)
        return pipeline.step(micro_batches=[(x, OpaqueTarget(y))] * 2, samples=[samples] * 2).loss

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    x, y = torch.randn(samples, 4), torch.randn(samples, 3)
    expected = ((model(x) - y) ** 2).mean().item()
    assert launch(work, workers=2, transport="local")[0] == pytest.approx(expected, rel=1e-6)
    assert "could not verify that the loss is a mean over samples (assumed)" in caplog.text
