"""A stage's forward and backward as CUDA graphs: equal numbers, and what the host saves."""

from __future__ import annotations

import time
from typing import Any

import torch

from counterflow.verification.diagnosis.comparison import difference
from one_gpu import Report
from one_gpu.host import gpt_block


def captured(report: Report) -> tuple[str, str, dict[str, Any]]:
    """Forward and backward of two blocks, called and replayed."""
    if report.device != "cuda":
        return "not available", "no device with graphs", {}
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(gpt_block(256, 4, 64) for _ in range(2))).cuda()
    x = torch.randn(4, 64, 256, device="cuda", requires_grad=True)
    above = torch.randn_like(x)

    def gradients(called: Any) -> list[torch.Tensor]:
        output = called(x)
        return [output.detach().clone(), *torch.autograd.grad(output, [x, *blocks.parameters()], above)]

    expected = [tensor.clone() for tensor in gradients(blocks)]
    eager = _host_microseconds(lambda: gradients(blocks))
    graphed = torch.cuda.make_graphed_callables(blocks, (x.detach().clone().requires_grad_(),))
    found = [tensor.clone() for tensor in gradients(graphed)]
    error = difference(found, expected)
    replayed = _host_microseconds(lambda: gradients(graphed))
    values = {"error": error, "eager_us": eager, "replayed_us": replayed}
    return "agrees" if error < 1e-5 else "differs", "torch.cuda.make_graphed_callables", values


def _host_microseconds(run: Any, repeats: int = 20) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()  # the backward runs in a thread of its own
    for _ in range(repeats):
        run()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def rows(report: Report) -> None:
    """The one case; the engine has no captured stages yet."""
    report.case("two blocks of a GPT", lambda: captured(report))
