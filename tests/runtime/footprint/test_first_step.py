"""Warnings of a first step that does not fit, before it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import counterflow as cf
from counterflow.runtime.footprint import first_step
from counterflow.runtime.footprint.available import WORKER_BYTES

WIDTH, SAMPLES = 64, 1024

ADVICE = re.compile("; take (fewer samples in a micro-batch|more stages), .*; pipeline[.]memory")


class Skipping(nn.Module):
    """A module whose layers are found."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x).relu()
        output: Tensor = self.up(torch.cat([hidden.sin(), x], 1))
        return output


def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]


def steps(schedule: str, found: bool, counts: bool, options: dict[str, Any]) -> list[int]:
    """Bytes of each worker, if they are counted after two steps."""
    x = torch.ones(SAMPLES, WIDTH)
    more: dict[str, Any] = {"optimizer": torch.optim.AdamW, "witness_every": 0, **options}
    if found:
        pipeline = cf.Pipeline(Skipping(), mse_loss, schedule, example=x, **more)
    else:
        pipeline = cf.Pipeline(blocks(), mse_loss, schedule, **more)
    reads = pipeline.reads_inputs, pipeline.reads_targets
    for _ in range(2):
        pipeline.step(*(x if read else None for read in reads))
    return [worker.total for worker in pipeline.memory(x, x).workers] if counts else []


def warnings(
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    *,
    found: bool = False,
    counts: bool = False,
    **options: Any,
) -> tuple[list[str], list[int]]:
    """Warnings of steps, and bytes of each worker."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        arguments = schedule, found, counts, options
        (totals, *_) = cf.launch(steps, *arguments, workers=2, transport="local", threads=1)
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "pipeline.memory" in text], totals


@pytest.mark.parametrize(
    ("schedule", "found", "options"),
    [
        ("1f1b(stages=2, micro_batches=4)", False, {}),
        ("1f1b(stages=2, micro_batches=4)", True, {}),
        ("1f1b(stages=2, micro_batches=4)", False, {"recompute": "layer"}),
        ("zb-h1(stages=2, micro_batches=4)", False, {}),
        ("gpipe(stages=1, micro_batches=4)", False, {}),  # of two replicas
    ],
)
def test_a_step_that_does_not_fit_is_warned_of_and_none_else(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    found: bool,
    options: dict[str, Any],
) -> None:
    silent, totals = warnings(caplog, schedule, found=found, counts=True, **options)
    assert not silent
    monkeypatch.setenv(WORKER_BYTES, str(max(totals)))
    assert not warnings(caplog, schedule, found=found, **options)[0]
    monkeypatch.setenv(WORKER_BYTES, str(int(0.99 * max(totals))))
    (text,), _ = warnings(caplog, schedule, found=found, **options)
    assert re.match("(worker|rank) [01] needs [0-9.]+ [KM]iB in a step ", text)
    assert ADVICE.search(text)


def test_weights_alone_are_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(WORKER_BYTES, "100000")
    (text,), _ = warnings(caplog, "1f1b(stages=2, micro_batches=4)", autocast="bfloat16")
    assert text.startswith("worker 0 needs at least 130 KiB in a step (optimizer 65 KiB, ")
    assert "take more stages, zero_stage=1, or an optimizer with fewer states" in text


def test_a_machine_is_shared(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("counterflow.runtime.footprint.memory_limits.free_bytes_on", lambda _: 2**18)
    (text,), _ = warnings(caplog, "1f1b(stages=2, micro_batches=4)")
    assert text.startswith("workers 0 to 1 need ")
    assert " are available to them; take fewer samples in a micro-batch, " in text


def test_what_fits_by_far_costs_no_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WORKER_BYTES, str(2**40))
    monkeypatch.setattr("counterflow.runtime.footprint.memory_limits.free_bytes_on", lambda _: 2**40)

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(first_step, "saved_in_stages", refuse)
    assert not warnings(caplog, "1f1b(stages=2, micro_batches=4)")[0]
