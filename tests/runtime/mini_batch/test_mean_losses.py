"""Cross entropies are divided by what counts in the whole mini-batch, wherever a user calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow import LossSum
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.mini_batch.mean_losses import MeanLossDetector
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

from ...kit import run, sgd

F = torch.float64
SCHEMES = [
    schemes.dapple(2, 4),
    schemes.chimera(2, 8, concat="forward-doubling"),
    schemes.chimera(2, 8, concat="backward-halving"),
    schemes.zb_v(2, 4),
]
CLASSES, LENGTH = 5, 3
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=F)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, LENGTH, 4, generator=generator, dtype=F)
    y = torch.randint(0, CLASSES, (16, LENGTH), generator=generator)
    y[:3] = -100  # nothing of the first micro-batch counts
    y[5, 1:] = -100
    return x, y


def plain(output: Tensor, target: Tensor) -> Any:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def by_classes(output: Tensor, target: Tensor) -> Any:
    """With a metric, half of it."""
    logits = output.movedim(-1, 1).log_softmax(1)
    found = 0.5 * functional.nll_loss(logits, target, WEIGHTS.to(output.dtype)) / 2
    return found, {"half": found.detach() * 2}


class Smoothed(nn.Module):
    """A module of the user's own that has one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)

    def forward(self, output: Tensor, target: Tensor) -> Any:
        return {"loss": self.entropy(output.flatten(0, 1), target.flatten()), "more": output.mean()}


def weighted(output: Tensor, target: Tensor) -> Any:
    """An error that is divided by its weights."""
    counts = (target >= 0).to(output.dtype)[..., None].expand_as(output) * WEIGHTS.to(output.dtype)
    error: Any = functional.mse_loss  # torch's stubs know no weight
    return error(output, torch.sin(output.detach() + target[..., None]), weight=counts)


def weighted_absolute(output: Tensor, target: Tensor) -> Any:
    """torch tells modes nothing of these weights."""
    counts = (target >= 0).to(output.dtype)[..., None].expand_as(output) * WEIGHTS.to(output.dtype)
    error: Any = functional.l1_loss
    return 2 * error(output, target[..., None].expand_as(output).to(output.dtype), weight=counts)


def fused(output: Tensor, target: Tensor) -> Any:
    """The last product and its cross entropy in one."""
    by = WEIGHTS.to(output.dtype).diag()
    return functional.linear_cross_entropy(output.flatten(0, 1), by, target.flatten())


def last_token(output: Tensor, target: Tensor) -> Any:
    """With a part of another kind; as much counts in each sample."""
    target = torch.where(target < 0, 0, target)
    target = torch.cat([target[:, 1:], torch.full_like(target[:, :1], -100)], 1)
    return plain(output, target) + output.square().mean()


def value(found: Any) -> Tensor:
    if isinstance(found, dict):
        found = found["loss"]
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=F), nn.Tanh(), nn.Linear(4, 4, dtype=F), nn.Linear(4, CLASSES, dtype=F)]


def alone(loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = nn.Sequential(*layers())
    optimizer, losses = sgd(list(model.parameters())), []
    for number in range(2):
        x, y = batch(number)
        found = value(loss(model(x), y))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    x, y = batch(0)
    losses.append(value(loss(model(x), y)).item())
    return losses, model.state_dict()


def piped(schedule: Schedule, loss: Any, mode: Any) -> tuple[list[float], dict[str, Tensor], list[float]]:
    pipeline = Pipeline(nn.Sequential(*layers()), loss, schedule, optimizer=sgd, recompute=mode)
    rows = slice(None)
    if pipeline.replicas == 2:
        rows = slice(0, 10) if pipeline.replica == 0 else slice(10, 16)
    steps = [pipeline.step(*(t[rows] for t in batch(number))) for number in range(2)]
    losses = [step.loss for step in steps]
    evaluated = pipeline.evaluate(*(t[rows] for t in batch(0))).loss
    return [*losses, evaluated], pipeline.model_state_dict(), [s.metrics.get("half", 0.0) for s in steps]


FUSED = [fused] if hasattr(functional, "linear_cross_entropy") else []  # torch has it since 2.13
LOSSES = [plain, by_classes, Smoothed(), weighted, weighted_absolute, *FUSED, last_token]
MODES = ["none", "stage", "layer"]


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_counts_in_the_mini_batch_divides(loss: Any, schedule: Schedule, mode: Any) -> None:
    """One replica and two take turns, so that each pair of two values is in some case."""
    replicas = 1 + (LOSSES.index(loss) + SCHEMES.index(schedule) + MODES.index(mode)) % 2
    losses, state = alone(loss)
    for ours, after, metrics in run(piped, schedule, loss, mode, workers=2 * replicas):
        assert ours == pytest.approx(losses, rel=1e-9)
        if loss is by_classes:
            assert metrics == pytest.approx([2 * found for found in losses[:2]], rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-11)


class Own(nn.Module):
    """A last layer that gives the loss, as models of transformers do with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES, dtype=F)

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        logits = self.head(given[0])
        return {"loss": plain(logits, given[1]), "logits": logits}


class Passes(nn.Linear):
    """A layer that hands labels on."""

    def forward(self, given: Any) -> Any:
        return super().forward(given[0]).tanh(), given[1]


@pytest.mark.parametrize("mode", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_a_model_that_computes_its_own_loss(schedule: Schedule, mode: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Passes(4, 4, dtype=F) for _ in range(3)), Own())
    found = model(batch(0))
    found["loss"].backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    def work() -> Any:
        options: dict[str, Any] = {"recompute": mode, "output_dims": {"loss": None, "logits": 0}}
        pipeline = Pipeline(copy.deepcopy(model), None, schedule, optimizer=sgd, **options)
        pipeline.keeps_gradients = True
        step = pipeline.step(batch(0), outputs=True)
        return step.loss, pipeline.gradients, step.outputs

    for loss, gradients, outputs in run(work):
        assert loss == pytest.approx(found["loss"].item(), rel=1e-9)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name])
        assert outputs is None or torch.equal(outputs["logits"].sign(), found["logits"].sign())


class Clamps(nn.Linear):
    """What it does to gradients is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.004, 0.004))
        return y


def by_sum(output: Tensor, target: Tensor) -> Any:
    """As users write it: a mask made in place, a weight on the host."""
    counts = torch.ones(target.shape, dtype=output.dtype)
    counts[target < 0] = 0
    losses = functional.cross_entropy(output.movedim(-1, 1), target.clamp(min=0), reduction="none")
    return LossSum((losses * counts).sum(), (target != -100).sum().item())


def sums(found: Any, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """A loss as a sum and what it weighs."""
    if isinstance(found, LossSum):
        return found.sum, float(found.weight)
    if isinstance(found, tuple):
        counted = torch.where(target < 0, 0, WEIGHTS[target.clamp(0)]).sum().item()
        return value(found) * counted, counted
    counted = (target >= 0).sum().item()
    return found * counted, counted


@pytest.mark.table
@pytest.mark.parametrize("schedule", [SCHEMES[0], SCHEMES[2], schemes.gems(2, 4)], ids=str)
@pytest.mark.parametrize(
    ("loss", "replicas", "barrier"),
    [(plain, 1, True), (plain, 2, False), (by_classes, 2, True), (by_sum, 1, False), (by_sum, 2, True)],
)
def test_hooks_of_activations_see_the_gradients_of_the_sum(
    loss: Any, schedule: Schedule, replicas: int, barrier: bool
) -> None:
    """Divided by the samples; by what counts once they are summed. For what is not linear, as clamping."""
    torch.manual_seed(0)
    layers = [*(Clamps(4, 4, dtype=F) for _ in range(3)), nn.Linear(4, CLASSES, dtype=F)]
    model = nn.Sequential(*copy.deepcopy(layers))
    optimizer = sgd(list(model.parameters()))
    for number in range(3):
        x, y = batch(number)
        output = model(x)
        found, weight = sums(loss(output, y), output, y)
        optimizer.zero_grad()
        (found / len(x)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= len(x) / weight
        optimizer.step()

    def work() -> Any:
        pipeline = Pipeline(layers, loss, schedule, optimizer=sgd, barrier=barrier)
        rows = slice(None)
        if pipeline.replicas == 2:
            rows = slice(0, 10) if pipeline.replica == 0 else slice(10, 16)
        for number in range(3):
            pipeline.step(*(t[rows] for t in batch(number)))
        return pipeline.model_state_dict()

    for after in run(work, workers=2 * replicas):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-11)


def together(output: Tensor, target: Tensor) -> Any:
    return plain(output, target) + output.square().mean()


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_parts_of_a_loss_that_cannot_be_right_are_refused(schedule: Schedule, barrier: bool) -> None:
    def work() -> None:
        pipeline = Pipeline(layers(), together, schedule, optimizer=sgd, barrier=barrier)
        x, y = batch(0)
        y[:3] = 1  # something counts in each
        pipeline.step(x, y)
        pipeline.flush()

    with pytest.raises(ConfigError, match=r"other shares of targets that count .* return a cf\.LossSum"):
        run(work)


ASYNCHRONOUS = [schemes.pipedream_2bw(2, 4), schemes.wpipe(2, 4)]


def asynchronous(
    schedule: Schedule, loss: Any, targets: Callable[[Tensor], Tensor], **options: Any
) -> list[tuple[float, float]]:
    """The first step's loss, and that of an evaluation before."""

    def work() -> tuple[float, float]:
        pipeline = Pipeline(layers(), loss, schedule, optimizer=sgd, **options)
        x, y = batch(0)
        evaluated = pipeline.evaluate(x, targets(y)).loss
        steps = [pipeline.step(x, targets(y)), *pipeline.flush()]
        return evaluated, next(step.loss for step in steps if step.reports_step == 0)

    return run(work)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS, ids=str)
def test_asynchronous_schemes_take_what_counts_alike_in_all_micro_batches(schedule: Schedule) -> None:
    def targets(y: Tensor) -> Tensor:
        y = y.clamp(min=0)
        y[::2, 1] = -100
        return y

    x, y = batch(0)
    expected = plain(nn.Sequential(*layers())(x), targets(y)).item()
    for found in asynchronous(schedule, plain, targets):
        assert found == pytest.approx((expected, expected), rel=1e-9)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS, ids=str)
@pytest.mark.parametrize("loss", [plain, by_classes, *FUSED, weighted, together])
def test_asynchronous_schemes_refuse_other_shares(schedule: Schedule, loss: Any) -> None:
    def targets(y: Tensor) -> Tensor:
        y = y.clone()
        y[0], y[1] = 1, 2
        return y

    with pytest.raises(ConfigError, match=r"the scheme is asynchronous.*per_micro_batch_loss=True"):
        asynchronous(schedule, loss, targets)
    if loss is not together:
        x, y = batch(0)
        output = nn.Sequential(*layers())(x)
        parts = zip(output.chunk(4), targets(y).chunk(4), strict=True)
        expected = sum(value(loss(*part)).item() for part in parts) / 4
        for found in asynchronous(schedule, loss, targets, per_micro_batch_loss=True):
            assert found == pytest.approx((expected, expected), rel=1e-9)


def test_who_insists_has_parts_divided_by_each_micro_batch() -> None:
    x, y = batch(0)
    y[0] = 1
    output = nn.Sequential(*layers())(x)
    parts = zip(output.chunk(4), y.chunk(4), strict=True)
    expected = sum(together(*part).item() for part in parts) / 4

    def work() -> float:
        options: dict[str, Any] = {"per_micro_batch_loss": True}
        return Pipeline(layers(), together, SCHEMES[0], optimizer=sgd, **options).step(x, y).loss

    assert run(work) == pytest.approx([expected] * 2, rel=1e-9)


@pytest.mark.parametrize("barrier", [True, False])
def test_replicas_that_differ_are_refused_too(barrier: bool) -> None:
    def work() -> None:
        options: dict[str, Any] = {"optimizer": sgd, "barrier": barrier}
        pipeline = Pipeline(layers(), together, schemes.dapple(2, 4), **options)
        x, y = (t[:8] for t in batch(0))
        y[:] = 1
        if pipeline.replica:
            y[:, 0] = -100
        pipeline.step(x, y)

    with pytest.raises(ConfigError, match="other shares of targets that count"):
        run(work, workers=4)


def test_nothing_that_counts_is_an_error() -> None:
    def work() -> None:
        x, y = batch(0)
        Pipeline(layers(), plain, schemes.dapple(2, 4), optimizer=sgd).step(x, y * 0 - 100)

    with pytest.raises(WorkerError, match="the weights of all losses of the mini-batch sum to 0"):
        run(work)


@pytest.mark.parametrize("loss", [plain, by_classes])
def test_verify_compares_with_the_same(loss: Any) -> None:
    given = [[batch(n)] for n in range(2)]
    found = verify(SCHEMES[0], layers(), loss, given, optimizer=sgd, cuts=(2,), transport="strict-local")
    assert found.ok, found


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_what_torch_divides_by_is_the_weight(kind: Any) -> None:
    output = torch.randn(6, 3, 4, dtype=F).log_softmax(1)
    target = torch.randint(0, 3, (6, 4))
    target[:2] = 9
    loss, means = kind(weight=WEIGHTS[:3], ignore_index=9), MeanLossDetector()
    found = []
    for i in (0, 2, 4):
        with means.watching():
            output_loss = loss(output[i : i + 2], target[i : i + 2])
        found.append(means.read(output_loss, 2))
    assert found[0].weight == 0
    total = torch.stack([f.loss for f in found]).sum() / sum(float(f.weight or 0) for f in found)
    torch.testing.assert_close(total, loss(output, target))


def test_what_is_no_mean_over_targets_stays() -> None:
    output, target = torch.randn(6, 3, dtype=F), torch.tensor([0, 1, 2, -100, 1, 0])
    shares, means = output.softmax(1), MeanLossDetector()
    for loss in (
        lambda: functional.cross_entropy(output, shares),  # targets that are shares of classes: all count
        lambda: functional.cross_entropy(output, target, reduction="sum"),
        lambda: LossSum(functional.cross_entropy(output, target), 3.0),
    ):
        with means.watching():
            given: Any = loss()
        found = means.read(given, 6)
        assert found.counts is None
        assert found.loss is (given.sum if isinstance(given, LossSum) else given)


ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber, halved": lambda o, t: functional.huber_loss(o, t, delta=0.5) / 2,
    "by position": lambda o, t: functional.smooth_l1_loss(o, t, None, None, "mean"),
    "entropy": lambda o, t: functional.binary_cross_entropy_with_logits(o, t.sigmoid(), weight=t.cosh()),
    "poisson": lambda o, t: functional.poisson_nll_loss(o, t.abs()),
    "gaussian": lambda o, t: functional.gaussian_nll_loss(o, t, torch.ones_like(o)),
    "divergence": lambda o, t: functional.kl_div(o.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "cosine": lambda o, t: functional.cosine_embedding_loss(o, t, torch.ones(len(o))),
    "ranking": lambda o, t: functional.margin_ranking_loss(o, t, torch.ones(o.shape)),
    "margins": lambda o, t: functional.multi_margin_loss(o, t.argmax(-1)),
    "shares": lambda o, t: functional.cross_entropy(o, t.softmax(-1)),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_errors_of_chosen_elements_are_divided_by_all_that_were_chosen(error: Any) -> None:
    """Of some micro-batches nothing is."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(16, LENGTH, CLASSES, generator=generator, dtype=F) for _ in range(2))
    chosen = torch.rand(16, LENGTH, generator=generator) < torch.linspace(-0.3, 1, 16)[:, None]
    torch.manual_seed(0)
    layers = [nn.Linear(CLASSES, CLASSES, dtype=F) for _ in range(2)]

    def loss(output: Tensor, target: Any) -> Tensor:
        target, mask = target
        found: Tensor = error(output[mask], target[mask])
        return found

    model = nn.Sequential(*copy.deepcopy(layers))
    true = loss(model(x), (y, chosen))
    true.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    def work() -> tuple[float, float, float]:
        with Pipeline(layers, loss, schemes.chimera(2, 4), optimizer=sgd) as pipeline:
            rows = slice(0, 10) if pipeline.replica == 0 else slice(10, 16)
            given = x[rows], (y[rows], chosen[rows])
            before = pipeline.evaluate(*given).loss
            step = pipeline.step(*given)
            return before, step.loss, step.grad_norm

    for found in run(work, workers=4):
        assert found == pytest.approx((true.item(), true.item(), norm.item()), rel=1e-9)
