"""Losses with weights and metrics, and models that compute their own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.api.loss_sum import LossSum
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import run, sgd

F = torch.float64
SCHEMES = [
    schemes.gpipe(2, 4),
    schemes.dapple(2, 4),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.hanayo(2, 4, waves=1),
]


def layers_of(schedule: Schedule) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=F) for _ in range(schedule.stages)]


def masked(output: Tensor, target: Tensor) -> Any:
    """Of the samples whose target is not negative."""
    counts = target[:, :1] >= 0
    error = torch.where(counts, (output - target).square(), 0).sum()
    metrics = {"first": (output[:, :1] * counts).sum(), "constant": counts.sum()}
    return LossSum(error, counts.sum(), metrics)


def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(samples, 4, generator=generator, dtype=F) for _ in range(2))
    y[: samples // 2 + 1] *= -1  # whole micro-batches do not count
    return x, y


BATCHES = [batch(20, seed) for seed in range(6)]


def truth(layers: list[nn.Module], groups: list[list[tuple[Tensor, Tensor]]], clip: float) -> Any:
    """One process: the mini-batches of a group make one update."""
    model = nn.Sequential(*layers)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = sgd(list(model.parameters()))
    told = []
    for group in groups:
        x, y = (torch.cat(same) for same in zip(*group, strict=True))
        found = masked(model(x), y)
        loss = found.sum / found.weight
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        told.append((loss.item(), norm.item(), float((found.metrics["first"] / found.weight).detach())))
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    return told, after


def _train(  # noqa: PLR0917
    layers: list[nn.Module], schedule: Schedule, batches: Any, mode: Any, clip: float = 0.5, updates: int = 1
) -> Any:
    pipeline = Pipeline(layers, masked, schedule, optimizer=sgd, recompute=mode, clip_norm=clip)
    told = []
    for number, whole in enumerate(batches, 1):
        rows = slice(None)
        if pipeline.replicas == 2:
            rows = slice(0, 12) if pipeline.replica == 0 else slice(12, 20)
        step = pipeline.step(*(t[rows] for t in whole), update=number % updates == 0)
        told.append((step.loss, step.grad_norm, step.metrics["first"]))
        assert step.metrics["constant"] == pytest.approx(1.0)
    found = pipeline.evaluate(*(t[rows] for t in batches[0]))
    return told, pipeline.model_state_dict(), found.loss, found.metrics["first"]


@pytest.mark.table
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mode", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_a_loss_is_normalised_over_the_whole_mini_batch(schedule: Schedule, mode: Any, replicas: int) -> None:
    layers = layers_of(schedule)
    clip = 0.5
    told, state = truth(layers, [[one] for one in BATCHES], clip)
    found = run(_train, layers, schedule, BATCHES, mode, clip, workers=2 * replicas)
    for ours, after, _, _ in found:
        for one, other in zip(ours, told, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-12)
    model = nn.Sequential(*layers)
    model.load_state_dict(state)
    value = masked(model(BATCHES[0][0]), BATCHES[0][1])
    for _, _, loss, first in found:
        assert loss == pytest.approx(float(value.sum.detach() / value.weight), rel=1e-9)
        assert first == pytest.approx(float((value.metrics["first"] / value.weight).detach()), rel=1e-9)


def test_weights_of_several_steps_make_one_update() -> None:
    schedule = SCHEMES[1]
    layers = layers_of(schedule)
    groups = [BATCHES[i : i + 3] for i in (0, 3)]
    told, state = truth(layers, groups, 0.5)
    for ours, after, _, _ in run(_train, layers, schedule, BATCHES, "none", 0.5, 3):
        assert [ours[2][1], ours[5][1]] == pytest.approx([norm for _, norm, _ in told], rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-12)


def test_where_nothing_counts_a_step_stops() -> None:
    x = torch.rand(16, 4, dtype=F)
    with pytest.raises(WorkerError, match="step 0: the weights of all losses of the mini-batch sum to 0"):
        run(_train, layers_of(SCHEMES[0]), SCHEMES[0], [(x, -x)], "none", 1.0)


def test_without_a_flush_sums_are_refused_unless_they_are_of_all() -> None:
    layers = layers_of(SCHEMES[0])
    with pytest.raises(ConfigError, match="updates weights before the LossSum of all micro-batches is known"):
        run(_flushed, layers, schemes.pipedream_2bw(2, 2), masked)
    found = run(_flushed, layers, schemes.pipedream(2), masked)
    assert found == run(_flushed, layers, schemes.pipedream(2), _mean)


def _mean(output: Tensor, target: Tensor) -> Any:
    found = masked(output, target)
    return found.sum / found.weight, {name: value / found.weight for name, value in found.metrics.items()}


def _flushed(layers: list[nn.Module], schedule: Schedule, loss: Any) -> Any:
    pipeline = Pipeline(deepcopy(layers), loss, schedule, optimizer=sgd)
    steps = [pipeline.step(*one) for one in BATCHES] + pipeline.flush()
    told = {step.reports_step: (step.loss, step.metrics) for step in steps if step.reports_step is not None}
    assert all(
        set(metrics) == {"first"} or set(metrics) == {"first", "constant"} for _, metrics in told.values()
    )
    return [(told[i][0], told[i][1]["first"]) for i in range(len(BATCHES))]


class Own(nn.Linear):
    """Computes its loss, and tells it as ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4, dtype=F)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x).square().mean()
        return {"tensor": loss, "dict": {"loss": loss}, "metrics": (loss, {"a": loss}), "none": "loss"}[
            self.kind
        ]


def _own(layers: list[nn.Module], schedule: Schedule, mode: Any) -> list[float]:
    pipeline = Pipeline(deepcopy(layers), None, schedule, optimizer=sgd, recompute=mode)
    return [*(pipeline.step(x).loss for x, _ in BATCHES), pipeline.evaluate(BATCHES[0][0]).loss]


@pytest.mark.table
@pytest.mark.parametrize("mode", ["none", "stage", "layer"])
@pytest.mark.parametrize("kind", ["tensor", "dict", "metrics"])
def test_a_model_computes_its_own_loss(kind: str, mode: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=F), Own(kind)]
    model, expected = nn.Sequential(nn.Linear(4, 4, dtype=F), nn.Linear(4, 4, dtype=F)), []
    for mine, theirs in zip(model.parameters(), (p for x in layers for p in x.parameters()), strict=True):
        mine.data.copy_(theirs)
    optimizer = sgd(list(model.parameters()))
    for x, _ in BATCHES:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    expected.append(model(BATCHES[0][0]).square().mean().item())
    for schedule in SCHEMES[1:4]:
        for told in run(_own, layers, schedule, mode):
            assert told == pytest.approx(expected, rel=1e-9)


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="the loss is str; a loss function"):
        run(_own, [nn.Linear(4, 4, dtype=F), Own("none")], SCHEMES[0], "none")
    with pytest.raises(ConfigError, match=r"the loss is a tensor of shape \(5, 4\)"):
        run(_flushed, layers_of(SCHEMES[0]), SCHEMES[0], lambda output, _: output)


def _with_parts(output: Tensor, target: Tensor) -> Any:
    error = output - target
    loss = error.square().mean()
    return {"loss": loss, "l1": error.abs().mean(), "count": 3, "output": output}


@pytest.mark.parametrize("schedule", [*SCHEMES[1:4], schemes.pipedream_2bw(2, 4)], ids=str)
@pytest.mark.parametrize("barrier", [True, False])
def test_a_dict_has_a_loss_and_metrics(schedule: Schedule, barrier: bool) -> None:
    layers = layers_of(schedule)
    x, y = BATCHES[0]
    output = nn.Sequential(*layers)(x)
    error = (output - y).detach()
    by_micro_batch = [part.square().mean().item() for part in error.chunk(schedule.micro_batches)]

    def work() -> Any:
        options: dict[str, Any] = {} if barrier or not schedule.synchronous else {"barrier": False}
        with Pipeline(layers, _with_parts, schedule, optimizer=sgd, **options) as pipeline:
            told = [pipeline.step(x, y), *pipeline.flush()]
            (step,) = (step for step in told if step.reports_step is not None)
            return step.loss, step.metrics, step.losses, schedule.stages - 1 in pipeline.stages

    rows = run(work)
    found: dict[int, float] = {}
    for loss, metrics, losses, last in rows:
        assert loss == pytest.approx(error.square().mean().item())
        assert metrics == pytest.approx({"l1": error.abs().mean().item(), "count": 3.0})
        assert bool(losses) == last
        found |= losses
    assert [found[n] for n in range(schedule.micro_batches)] == pytest.approx(by_micro_batch)


def test_gradients_are_a_snapshot() -> None:
    def work() -> bool:
        with Pipeline(layers_of(SCHEMES[1]), masked, SCHEMES[1], optimizer=sgd) as pipeline:
            pipeline.keeps_gradients = True
            pipeline.step(*BATCHES[0])
            first = pipeline.gradients
            before = {name: gradient.clone() for name, gradient in first.items()}
            pipeline.step(*BATCHES[1])
            same = [torch.equal(first[name], before[name]) for name in before]
            return all(same) and not any(torch.equal(before[n], g) for n, g in pipeline.gradients.items())

    assert all(run(work))


def test_a_missing_target_names_the_way_out() -> None:
    def work() -> None:
        with Pipeline(layers_of(SCHEMES[1]), masked, SCHEMES[1], optimizer=sgd) as pipeline:
            pipeline.step(BATCHES[0][0])

    with pytest.raises(ConfigError, match=r"needs the targets; where the model .* loss_function=None"):
        run(work)


def test_steps_of_an_update_have_one_kind_of_loss() -> None:
    calls = [0]

    def changing(output: Tensor, target: Tensor) -> Any:
        return masked(output, target) if calls[0] else (output - target).square().mean()

    def work() -> None:
        with Pipeline(layers_of(SCHEMES[1]), changing, SCHEMES[1], optimizer=sgd) as pipeline:
            pipeline.step(*BATCHES[0], update=False)
            calls[0] = 1
            pipeline.step(*BATCHES[0])

    with pytest.raises(ConfigError, match="return the same kind of loss in all"):
        run(work)
