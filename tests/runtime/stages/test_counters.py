"""Counters in buffers: copies of a stage add them up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.buffers import Buffers
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import run


class Counts(nn.Linear):
    """Counts its samples, and in which of four directions they point most."""

    def __init__(self, *, in_place: bool = True, declared: bool = True) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.in_place = in_place
        self.seen: Tensor
        self.most: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("most", torch.full((4,), 0.5))
        if declared:
            cf.sum_over_copies(self, "seen", "most")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            most = torch.bincount(x.detach().argmax(1), minlength=4).float()
            if self.in_place:
                self.seen += len(x)
                self.most += most
            else:
                self.seen, self.most = self.seen + len(x), self.most + most
        return super().forward(x)


def model(**options: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Counts(**options) for _ in range(4)]


def numbers(step: int, samples: int = 16) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, samples, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, y


def counted(schedule: Schedule, layers: list[nn.Module], options: dict[str, Any]) -> dict[str, Tensor]:
    pipeline = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        digest_every=1,
        **options,
    )
    for step in range(3):
        rows = slice(pipeline.replica, None, pipeline.replicas)
        pipeline.step(*(tensor[rows] for tensor in numbers(step)))
        if not pipeline.in_flight:
            pipeline.evaluate(*(tensor[rows] for tensor in numbers(9)))
    return {
        name: tensor
        for name, tensor in pipeline.model_state_dict().items()
        if "seen" in name or "most" in name
    }


@pytest.mark.table
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (schemes.dapple(2, 4), 1, {}),
        (schemes.chimera(2, 4), 1, {}),
        (schemes.chimera(2, 4), 2, {"barrier": False}),
        (schemes.zb_h1(2, 4), 2, {"zero_stage": 1}),
        (schemes.pipedream_2bw(2, 4), 1, {}),
    ],
    ids=str,
)
def test_counters_are_those_of_one_process(
    schedule: Schedule, replicas: int, options: dict[str, Any], recompute: str, in_place: bool
) -> None:
    alone = nn.Sequential(*model())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        x, y = numbers(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
    layers = model(in_place=in_place)
    every = run(
        counted, schedule, layers, options | {"recompute": recompute}, workers=schedule.workers * replicas
    )
    for found in every:
        assert all(int(tensor) == 48 for name, tensor in found.items() if "seen" in name)
        if schedule.synchronous:  # else they are of other versions of the weights
            expected = alone.state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("schedule", "declared"), [(schemes.chimera(2, 4), False), (schemes.pipedream(2), True)], ids=str
)
def test_what_is_not_declared_is_refused_and_told_how(schedule: Schedule, declared: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"changes its buffer 'seen'.* declare a counter with counterflow\.sum"
    ):
        run(counted, schedule, model(declared=declared), {}, workers=4)


def test_what_is_no_counter() -> None:
    layer = nn.BatchNorm1d(4)
    layer.register_buffer("mask", torch.ones(4, dtype=torch.bool))
    with pytest.raises(ConfigError, match="BatchNorm1d has no buffer 'weight'; register it before"):
        cf.sum_over_copies(layer, "weight")
    with pytest.raises(ConfigError, match=r"buffer 'mask' of BatchNorm1d is torch\.bool; count in"):
        cf.sum_over_copies(layer, "mask")


def test_copies_that_see_fewer_micro_batches_count_as_many_batches() -> None:
    """Three samples in four micro-batches: one copy sees two of them, the other one."""

    def work() -> list[int]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)) for _ in range(2)]
        pipeline = Pipeline(
            layers,
            nn.functional.mse_loss,
            schemes.chimera(2, 4),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            digest_every=1,
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            pipeline.step(*torch.randn(2, 3, 3, 4, generator=generator))
        return [int(tensor) for name, tensor in pipeline.model_state_dict().items() if "num_batches" in name]

    assert run(work) == [[4, 4], [4, 4]]


def test_a_first_change_beside_the_steps_is_dropped() -> None:
    """A stage is timed before the first step, when no counter has been seen to change."""
    layer = Counts()
    buffers = Buffers([layer])
    for _ in range(2):
        with buffers.swapped_in(buffers.snapshot()):
            layer(torch.ones(3, 4, dtype=torch.float64))
            assert layer.seen == 3
        assert layer.seen == 0
        assert layer.most.tolist() == [0.5] * 4
