"""What an action costs the host, and which share of the device's peak kernels reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cost
import split_backward
import torch
from gpu_check import Subject, peak_of, speed
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from counterflow.models.gpt import GPTConfig
from counterflow.runtime.stages.split_backward import SplitBackwardPlanner
from one_gpu import Report

SECONDS_OF_A_SUBJECT = 25.0
"""Time without which no stages are timed, and nothing is compiled."""

SCHEDULES = ("dapple D=4 N=8", "zb-v D=4 N=8", "chimera D=4 N=8")


def host(name: str) -> tuple[str, str, dict[str, Any]]:
    """Microseconds of the host by kind of action; each worker runs alone."""
    found = engine_cost.cost(engine_cost.schedules()[name], 5, 0.0, first=False, barrier=True)
    return (
        "measured",
        "microseconds of processor time",
        {key: round(value, 2) for key, value in found.items()},
    )


def bare() -> tuple[str, str, dict[str, Any]]:
    """The same layers in a loop that does nothing else."""
    return (
        "measured",
        "microseconds of processor time",
        {k: round(v, 2) for k, v in engine_cost.bare().items()},
    )


# -- kernels


class LlamaBlock(nn.Module):
    """A layer of Llama 3 8B: 32 heads and 8 of keys and values of 128 numbers, 14,336 in between."""

    def __init__(self, hidden: int, heads: int, shared: int, between: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, hidden // heads
        self.first, self.second = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, shared * self.size, bias=False)
        self.value = nn.Linear(hidden, shared * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, between, bias=False)
        self.up = nn.Linear(hidden, between, bias=False)
        self.down = nn.Linear(between, hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        y = self.first(x_BLD)
        q, k, v = (
            layer(y).view(batch, length, heads, self.size).transpose(1, 2)
            for layer, heads in ((self.query, self.heads), (self.key, self.shared), (self.value, self.shared))
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BLD = x_BLD + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        y = self.second(x_BLD)
        found: Tensor = x_BLD + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return found


def gpt_block(hidden: int, heads: int, positions: int) -> nn.Module:
    config = GPTConfig(layers=1, hidden=hidden, heads=heads, vocabulary=64, positions=positions, dropout=0.0)
    return config.build()[1]


def seconds_of(run: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Time of a call, the mean of several in a row; the device has ended them all."""
    run()
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - begin) / repeats


def flops_of(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> float:
    """Operations of a forward and a backward, counted on the meta device, where attention has no kernels."""
    with torch.device("meta"):
        layer = make().to(torch.bfloat16)
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).backward(torch.empty_like(x))
    return float(counter.get_total_flops())


def block(
    report: Report, make: Callable[[], nn.Module], shape: tuple[int, ...], *, compiled: bool
) -> tuple[str, str, dict[str, Any]]:
    """Forward, whole backward, and input gradient and weight gradients of a block in bf16."""
    torch.manual_seed(0)
    layer = make().to(report.device, torch.bfloat16)
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight)
    x = torch.randn(shape, device=report.device, dtype=torch.bfloat16, requires_grad=True)
    above = torch.randn_like(x)
    flops = flops_of(make, shape)
    called = torch.compile(layer) if compiled else layer
    weights = list(layer.parameters())
    split_planner = SplitBackwardPlanner(0, lambda: weights, direct=report.pretend)

    def forward() -> None:
        with torch.no_grad():
            called(x)

    def whole() -> None:
        first, _ = split_backward.whole([called], x, above)
        first()

    def halves() -> None:
        first, second = split_backward.ours(split_planner)([called], x, above)
        first()
        second()

    repeats = 2 if report.pretend else 10
    both, split = seconds_of(whole, report.device, repeats), seconds_of(halves, report.device, repeats)
    ahead = seconds_of(forward, report.device, repeats)
    values = {
        "forward_ms": ahead * 1e3,
        "forward_backward_ms": both * 1e3,
        "split_over_whole": (split - ahead) / (both - ahead),
    }
    if not report.pretend:
        peak = peak_of(torch.cuda.get_device_name(0))
        if peak:
            values["mfu"] = flops / both / peak
    return "measured", "bf16", {key: round(value, 4) for key, value in values.items()}


def stages(report: Report, subject: Subject) -> None:
    """One worker with all stages: predicted and measured step, beside torch's 1F1B and ZB-V."""
    peak = None if report.pretend else peak_of(torch.cuda.get_device_name(0))
    steps = 3 if report.pretend else 10
    try:
        found = speed(subject, 1, steps, peak, on_gpu=not report.pretend, together=True)
    except Exception as error:
        report.add(subject.name, "failed", f"{type(error).__name__}: {error}")
        return
    for row in found:
        values = {"step_ms": row.seconds * 1e3, "mfu": row.mfu or 0.0}
        if row.predicted_seconds:
            values["predicted_ms"] = row.predicted_seconds * 1e3
        if row.predicted_bytes and any(row.peak_bytes) and not report.pretend:
            values["memory_error"] = max(row.predicted_bytes) / max(row.peak_bytes) - 1
        verdict = "measured" if not row.failed else "failed"
        if row.failed and row.name.startswith("torch "):  # torch's own: before 2.13 it sends to its own rank
            verdict = "not available"
        report.add(f"{subject.name}: {row.name}", verdict, row.failed, **values)


def rows(report: Report) -> None:
    """Host costs first, then kernels, then whole stages, and what is compiled last."""
    small = report.pretend
    engine_cost.DEVICE = torch.device("cpu") if small else torch.device("cuda", 0)
    report.case("a bare loop", bare)
    for name in report.cases(SCHEDULES):
        report.case(name, partial(host, name))
    gpt = partial(gpt_block, 64 if small else 1024, 4 if small else 16, 32 if small else 1024)
    llama = partial(LlamaBlock, *((64, 4, 2, 96) if small else (4096, 32, 8, 14336)))
    shapes = ((2, 32, 64), (1, 32, 64)) if small else ((8, 1024, 1024), (1, 4096, 4096))
    blocks = (("GPT-2 block", gpt, shapes[0]), ("Llama 3 8B layer", llama, shapes[1]))
    for title, make, shape in blocks:
        report.case(title, partial(block, report, make, shape, compiled=False))
    tiny = {"heads": 2, "positions": 16, "dropout": 0.0, "vocabulary": 257}
    subjects = [Subject("launch-bound", GPTConfig(layers=6, hidden=32, **tiny), 2, 8, low=False)]
    if not small:
        large = GPTConfig(layers=12, hidden=1024, heads=16, positions=512, vocabulary=8192, dropout=0.0)
        subjects.append(Subject("compute-bound", large, 8, 8, low=True))
    for subject in subjects:
        if report.left() > SECONDS_OF_A_SUBJECT:
            stages(report, subject)
        else:
            report.add(subject.name, "not available", "no time was left")
    for title, make, shape in () if small else blocks:  # a compiler may not be there in a rehearsal
        if report.left() > SECONDS_OF_A_SUBJECT:
            report.case(f"{title}, compiled", partial(block, report, make, shape, compiled=True))
