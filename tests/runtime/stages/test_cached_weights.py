"""Layers that keep what they made of a weight, by its ``_version`` and memory: as if they made it anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.versions import Versions
from counterflow.runtime.workers.launch import launch

from ...kit import batch

F = torch.float64
STEPS = 7


class Normed(nn.Module):
    """Divides its weight by the norms of its columns, which have no gradient."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=F))

    def norms(self) -> Tensor:
        return self.weight.detach().square().sum(0).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (x @ (self.weight / self.norms())).tanh()
        return found


class KeepsLast(Normed):
    """Keeps the norms until its weight is another."""

    key: Any = None

    def norms(self) -> Tensor:
        key = self.weight._version, self.weight.data_ptr()
        if key != self.key:
            self.key, self.last = key, super().norms()
        return self.last


class KeepsAll(Normed):
    """Keeps the norms of each weight that it had."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.seen: dict[Any, Tensor] = {}

    def norms(self) -> Tensor:
        key = id(self.weight), self.weight._version, self.weight.data_ptr()
        if key not in self.seen:
            self.seen[key] = super().norms()
        return self.seen[key]


def model(kind: type[Normed]) -> nn.Sequential:
    return nn.Sequential(*(kind(number) for number in range(4)))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.to(F), target)  # torch before 2.13 has no gradient of two dtypes


def losses(kind: type[Normed], schedule: str, options: dict[str, Any]) -> list[float]:
    pipeline = Pipeline(model(kind), loss, schedule, optimizer=momentum, **options)
    steps = [pipeline.step(*batch(number)) for number in range(STEPS)]
    steps += pipeline.flush()
    found = [step.loss for step in steps if step.reports_step is not None]
    found.append(pipeline.evaluate(*batch(99)).loss)
    steps = [pipeline.step(*batch(number)) for number in range(3)]  # versions are counted anew
    steps += pipeline.flush()
    return found + [step.loss for step in steps if step.reports_step is not None]


def piped(kind: type[Normed], schedule: str, **options: Any) -> list[float]:
    return launch(losses, kind, schedule, options, workers=2, transport="local", timeout_seconds=30)[0]


def stale_losses() -> list[float]:
    """PipeDream-2BW by hand: each gradient is of the weights before the last update."""
    layers = model(Normed)
    optimizer = momentum(layers.parameters())
    before = now = [weight.detach().clone() for weight in layers.parameters()]
    found = []
    for number in range(STEPS):
        for weight, stale in zip(layers.parameters(), before, strict=True):
            weight.data.copy_(stale)
        optimizer.zero_grad()
        inputs, targets = batch(number)
        loss = functional.mse_loss(layers(inputs), targets)
        loss.backward()
        found.append(loss.item())
        for weight, latest in zip(layers.parameters(), now, strict=True):
            weight.data.copy_(latest)
        before = now
        optimizer.step()
        now = [weight.detach().clone() for weight in layers.parameters()]
    return found


@pytest.mark.parametrize("kind", [KeepsLast, KeepsAll])
def test_stale_weights_are_those_by_hand(kind: type[Normed]) -> None:
    found = piped(kind, "pipedream-2bw(stages=2, micro_batches=4)")
    assert found[:STEPS] == pytest.approx(stale_losses(), rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("pipedream(stages=2)", {}),
        ("pipedream-2bw(stages=2, micro_batches=2)", {"recompute": "stage"}),
        ("wpipe(stages=4, micro_batches=4)", {}),
        ("wpipe(stages=4, micro_batches=4)", {"compute_dtype": torch.bfloat16}),
        ("gpipe(stages=2, micro_batches=2)", {"compute_dtype": torch.bfloat16}),
        ("dapple(stages=2, micro_batches=2)", {"barrier": False}),
    ],
)
@pytest.mark.parametrize("kind", [KeepsLast, KeepsAll])
def test_they_are_as_if_made_anew(kind: type[Normed], schedule: str, options: dict[str, Any]) -> None:
    assert piped(kind, schedule, **options) == piped(Normed, schedule, **options)


def test_no_two_versions_have_the_same_count() -> None:
    weight = nn.Parameter(torch.zeros(2))
    versions = Versions(0, lambda: [weight], lambda _: None)
    counts: dict[int, set[int]] = {}
    for _ in range(2):
        versions.begin()
        for version in range(5):
            if version:
                versions.make(version, (version - 2,))
                with torch.no_grad(), versions.unseen():
                    weight.add_(1.0)
            for shown in versions.stored:
                versions.use(shown)
                counts.setdefault(int(weight.detach()[0]), set()).add(weight._version)
        versions.end()
    every = [count for of_content in counts.values() for count in of_content]
    assert sorted(counts) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert len(every) == len(set(every))


def test_a_version_that_is_changed_in_place_is_told_when_others_are_shown() -> None:
    weight = nn.Parameter(torch.zeros(2))
    versions = Versions(0, lambda: [weight], lambda _: None)
    versions.begin()
    versions.make(1, ())
    versions.note()
    versions.use(0)
    assert versions.overwritten() == []
    with torch.no_grad():
        weight.add_(1.0)
    versions.use(1)
    assert versions.overwritten()[0] is weight
    versions.note()
    assert versions.overwritten() == []
