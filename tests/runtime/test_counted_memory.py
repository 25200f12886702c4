"""Memory before the first step: what is counted without a step is what steps allocate."""

from __future__ import annotations

import functools
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.measure.stages.allocations import allocated
from counterflow.runtime.footprint.footprint import Memory
from counterflow.runtime.parameters.digest import digest

SAMPLES, WIDTH = 512, 128


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())]
    return nn.Sequential(*blocks)


class Skipping(nn.Module):
    """Encoder and decoder with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.relu(self.down(x))
        x = functional.max_pool2d(skip, 2)
        x = functional.interpolate(functional.relu(self.middle(x)), scale_factor=2)
        output: Tensor = self.up(torch.cat([x, skip], 1))
        return output


def batch() -> Tensor:
    return torch.ones(SAMPLES * 4, WIDTH)


def measured(make: Any, schedule: str, x: Tensor, options: dict[str, Any]) -> int:
    """Most bytes of this worker in a step that compares nothing."""
    digest([torch.zeros(2**17)], torch.device("cpu"))  # makes its tables, which are the process's
    gc.collect()
    with allocated() as now:
        pipeline = cf.Pipeline(
            make(), functional.mse_loss, schedule, digest_every=0, witness_every=0, **options
        )
    for _ in range(pipeline.warm_up_steps + 3):
        with allocated(since=now.current) as now:
            pipeline.step(x, x)
    pipeline.close()
    return now.peak


def measured_one_by_one(cases: list[tuple[Any, str, Tensor, dict[str, Any]]]) -> list[int]:
    return [measured(make, schedule, x, with_example(x, options)) for make, schedule, x, options in cases]


def with_example(x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    finds = options.get("finds", False)
    plain = {name: value for name, value in options.items() if name != "finds"}
    return {"optimizer": torch.optim.AdamW, **plain, **({"example": x} if finds else {})}


def counted(make: Any, schedule: str, x: Tensor, options: dict[str, Any]) -> list[int]:
    more = {name: value for name, value in with_example(x, options).items() if name != "example"}
    memory = cf.memory(make(), functional.mse_loss, schedule, x.to("meta"), x.to("meta"), **more)
    return [worker.total for worker in memory.workers]


IMAGES = torch.ones(32, 3, 32, 32)

ALONE: dict[str, tuple[Any, str, Tensor, dict[str, Any]]] = {
    "1f1b": (layers, "1f1b(stages=1, micro_batches=4)", batch(), {}),
    "stages of one worker": (layers, "interleaved(workers=1, micro_batches=4, chunks=3)", batch(), {}),
    "layers computed again": (layers, "1f1b(stages=1, micro_batches=4)", batch(), {"recompute": "layer"}),
    "found layers": (Skipping, "1f1b(stages=1, micro_batches=4)", IMAGES, {"finds": True}),
}

TOGETHER: dict[str, tuple[Any, str, Tensor, dict[str, Any]]] = {
    "split backwards": (layers, "zb-h1(stages=2, micro_batches=4)", batch(), {}),
    "two directions": (layers, "chimera(stages=2, micro_batches=4)", batch(), {}),
    "two versions": (layers, "pipedream-2bw(stages=2, micro_batches=4)", batch(), {}),
    "stages computed again": (layers, "1f1b(stages=2, micro_batches=4)", batch(), {"recompute": "stage"}),
    "found layers": (Skipping, "1f1b(stages=2, micro_batches=4)", IMAGES, {"finds": True}),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_worker_is_counted_as_it_is_measured(name: str) -> None:
    make, schedule, x, options = ALONE[name]
    (peak,) = cf.launch(measured, make, schedule, x, with_example(x, options), workers=1, transport="local")
    assert counted(*ALONE[name]) == [pytest.approx(peak, rel=0.02)]


def test_processes_are_counted_as_they_are_measured() -> None:
    rows = cf.launch(measured_one_by_one, [*TOGETHER.values()], workers=2, threads=1)
    for (name, case), *peaks in zip(TOGETHER.items(), *rows, strict=True):
        # A message may still be in flight, by the time that its receiver takes.
        message = SAMPLES * WIDTH * 4
        assert counted(*case) == [
            pytest.approx(peak, rel=0.01, abs=0.01 * peak + message) for peak in peaks
        ], name


def test_parts_are_exact() -> None:
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW}
    model, x = layers(), torch.empty(64, WIDTH, device="meta")
    memory = cf.memory(model, functional.mse_loss, "1f1b(stages=1, micro_batches=4)", x, x, **options)
    (worker,) = memory.workers
    weights = sum(p.nbytes for p in model.parameters())
    assert worker.gradients == weights
    assert worker.weights == weights + sum(buffer.nbytes for buffer in model.buffers())
    assert worker.optimizer == 2 * weights + 4 * len([*model.parameters()])
    two = cf.memory(model, functional.mse_loss, "chimera(stages=2, micro_batches=4)", x, x, **options)
    assert [worker.gradients for worker in two.workers] == [pytest.approx(weights, rel=0.01)] * 2


def test_the_model_stays_as_it_is() -> None:
    model, x = layers(), torch.empty(64, WIDTH, device="meta")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cf.memory(model, functional.mse_loss, "1f1b(stages=2, micro_batches=4)", x, x, optimizer=torch.optim.SGD)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_larger_than_the_machine_is_counted() -> None:
    with torch.device("meta"):
        model = [nn.Linear(2**14, 2**14, bias=False) for _ in range(4)]  # 1 GiB each, 16 with all states
    x = torch.empty(4, 2**14, device="meta")
    memory = cf.memory(
        model, functional.mse_loss, "1f1b(stages=2, micro_batches=4)", x, x,
        optimizer=torch.optim.AdamW, available_bytes=2**30,
    )  # fmt: skip
    assert [worker.weights for worker in memory.workers] == [2**31] * 2
    assert memory.fits is False


def train_after_counting() -> tuple[Memory, list[list[float]]]:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    losses: list[list[float]] = []
    for counts in (True, False):
        options: dict[str, Any] = {"optimizer": torch.optim.AdamW}
        pipeline = cf.Pipeline(layers(), functional.mse_loss, "1f1b(stages=2, micro_batches=4)", **options)
        if counts:
            memory = pipeline.memory(x, x)
        losses.append([pipeline.step(x, x).loss for _ in range(2)])
        pipeline.close()
    return memory, losses


def test_a_pipeline_counts_and_trains_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (first, losses), second = cf.launch(train_after_counting, workers=2, transport="local")
    assert first == second[0]
    assert first.available_bytes is not None
    assert losses[0] == losses[1]
    x = torch.empty(64, WIDTH, device="meta")
    alone = cf.memory(
        layers(), functional.mse_loss, "1f1b(stages=2, micro_batches=4)", x, x, optimizer=torch.optim.AdamW
    )
    assert first.workers == alone.workers


@functools.cache
def mask() -> Tensor:
    return torch.ones(WIDTH, WIDTH).tril()


class Caching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ mask()


def test_tensors_in_a_global_cache_are_refused() -> None:
    x = torch.empty(64, WIDTH, device="meta")
    with pytest.raises(ConfigError, match=r"64 KiB of tensors beyond the pipeline"):
        cf.memory(
            [Caching(WIDTH, WIDTH)], functional.mse_loss, "1f1b(stages=1, micro_batches=2)", x, x,
            optimizer=torch.optim.SGD,
        )  # fmt: skip
    mask.cache_clear()


def log_of_rest(output: Tensor, target: Tensor) -> Tensor:
    del target
    return (1 - output.mean()).log()  # of a mean that counts as 1: not finite


def test_losses_without_numbers_are_not_judged() -> None:
    x = batch()
    schedule = "gpipe(stages=2, micro_batches=2)"
    memory = cf.memory(layers(), log_of_rest, schedule, x, x, optimizer=torch.optim.Adam)
    assert memory.workers[0].optimizer > memory.workers[0].weights  # its updates are not skipped


class Demanding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.mean() > 0.5:
            raise ValueError("too large")
        return y


def test_a_model_that_refuses_values_is_not_counted() -> None:
    x = batch()
    with pytest.raises(ConfigError, match=r"without numbers: .*ValueError: too large; measure"):
        cf.memory(
            nn.Sequential(Demanding(WIDTH, WIDTH)),
            functional.mse_loss,
            "gpipe(stages=1, micro_batches=2)",
            *(x, x),
            optimizer=torch.optim.SGD,
        )
