"""A stage's forward and backward as CUDA graphs: equal numbers, and what the host saves.

A rehearsal captures on the pretended device, whose graphs replay operators at fixed addresses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.runtime.stages.named_layer import NamedLayer
from counterflow.runtime.stages.precision import Precision
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.stages.recomputed_graphs import RecomputedStageGraphs
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.stage_graphs import CapturedLayers, StageGraphs
from counterflow.testing.strict_nccl.device import Device
from counterflow.testing.strict_nccl.operator_modes import computing
from counterflow.verification.diagnosis.comparison import difference
from one_gpu import Report
from one_gpu.host import gpt_block

ROWS = SampleRows(0, 4, 0, 4)
MOST_ERROR = 1e-5
UNITS = 3


@contextmanager
def device_of(report: Report) -> Iterator[torch.device]:
    """The GPU, or a pretended device."""
    if report.device == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    pretended = Device(0, lambda _launches, _why: None)
    with computing(pretended.stream, pretended):
        yield pretended.handle


def stage_of(device: torch.device, dropout: float) -> CapturedLayers:
    """Two blocks of a GPT, with a dropout between them that draws from its keyed stream."""
    torch.manual_seed(0)
    modules = [gpt_block(256, 4, 64), nn.Dropout(dropout), gpt_block(256, 4, 64)]
    layers = [NamedLayer(number, {}, module.to(device)) for number, module in enumerate(modules)]
    for weight in weights_of(layers):
        weight.grad = torch.zeros_like(weight)
    draws = frozenset({1} if dropout else ())
    return CapturedLayers("the stage", layers, draws, RandomStreams(0, device), Precision())


def weights_of(layers: Any) -> list[nn.Parameter]:
    """Weights of some layers."""
    return [weight for layer in layers for weight in layer.module.parameters()]


def plain(stage: CapturedLayers, x: Tensor, above: Tensor, step: int, rows: SampleRows) -> list[Tensor]:
    """Output, and gradients of the input and the weights, by autograd alone."""
    value = x.detach().requires_grad_()
    output = value
    for layer in stage.layers:
        with stage.streams.layer(layer.index, step, rows):
            output = layer.module(output)
    return [output.detach(), *torch.autograd.grad(output, [value, *weights_of(stage.layers)], above)]


def units_in_flight(
    report: Report, dropout: float, *, defers: bool = False, make: type[StageGraphs] = StageGraphs
) -> tuple[str, str, dict[str, Any]]:
    """Several units in flight whose backwards run in another order, over four updates of the weights.

    Args:
        report: the report.
        dropout: probability of a dropout between the blocks.
        defers: True to split backwards; then those of weights run after all those of inputs.
        make: makes the graphs of a unit.
    """
    error = 0.0
    with device_of(report) as device, torch.random.fork_rng(devices=[]):
        stage = stage_of(device, dropout)
        weights = weights_of(stage.layers)
        units: list[StageGraphs] = []
        for step in range(4):
            x = [torch.randn(4, 64, 256, device=device) for _ in range(UNITS)]
            above = [torch.randn(4, 64, 256, device=device) for _ in range(UNITS)]
            rows = [ROWS._replace(micro_batch=number) for number in range(UNITS)]
            leaves = [tensor.detach().requires_grad_() for tensor in x]
            units = units or [make(stage, None, [leaf]) for leaf in leaves]
            outputs = [units[n].forward([leaves[n]], step, rows[n])[0].detach() for n in range(UNITS)]
            for weight in weights:
                weight.grad.zero_()  # type: ignore[union-attr]
            order = (1, 0, 2)
            of_inputs = {
                n: units[n].backward([above[n]], direct=report.pretend, defers=defers)[0] for n in order
            }
            if defers:
                for number in order:
                    units[number].weight_gradients(direct=report.pretend)
            expected = [plain(stage, x[n], above[n], step, rows[n]) for n in range(UNITS)]
            for number, (output, of_input, *_) in enumerate(expected):
                error = max(error, difference([outputs[number], of_inputs[number]], [output, of_input]))
            sums = [sum(tensors) for tensors in zip(*(tensors[2:] for tensors in expected), strict=True)]
            error = max(error, difference([weight.grad for weight in weights], sums))
            with torch.no_grad():
                for weight in weights:
                    weight.sub_(weight.grad, alpha=0.01)  # type: ignore[arg-type]
    values = {"error": error, "units": UNITS, "replays": 4 * UNITS}
    return "agrees" if error < MOST_ERROR else "differs", "the engine's graphs beside autograd", values


def host_time(report: Report) -> tuple[str, str, dict[str, Any]]:
    """Microseconds of the host for a forward and a backward, called and replayed."""
    if report.device != "cuda":
        return "not available", "no device whose host is timed", {}
    with device_of(report) as device:
        stage = stage_of(device, 0.0)
        x = torch.randn(4, 64, 256, device=device)
        above = torch.randn_like(x)
        leaf = x.detach().requires_grad_()
        unit = StageGraphs(stage, None, [leaf])

        def replayed() -> None:
            unit.forward([leaf], 0, ROWS)
            unit.backward([above], direct=False)

        values = {
            "eager_us": _host_microseconds(lambda: plain(stage, x, above, 0, ROWS)),
            "replayed_us": _host_microseconds(replayed),
        }
    return "measured", "a forward and a backward of two blocks", values


def callables(report: Report) -> tuple[str, str, dict[str, Any]]:
    """Forward and backward of two blocks by torch's own function, for comparison."""
    if report.device != "cuda":
        return "not available", "no device with torch's graphs", {}
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(gpt_block(256, 4, 64) for _ in range(2))).cuda()
    x = torch.randn(4, 64, 256, device="cuda", requires_grad=True)
    above = torch.randn_like(x)

    def gradients(called: Any) -> list[torch.Tensor]:
        output = called(x)
        return [output.detach().clone(), *torch.autograd.grad(output, [x, *blocks.parameters()], above)]

    expected = [tensor.clone() for tensor in gradients(blocks)]
    graphed = torch.cuda.make_graphed_callables(blocks, (x.detach().clone().requires_grad_(),))
    error = difference([tensor.clone() for tensor in gradients(graphed)], expected)
    values = {"error": error, "replayed_us": _host_microseconds(lambda: gradients(graphed))}
    return "agrees" if error < MOST_ERROR else "differs", "torch.cuda.make_graphed_callables", values


def _host_microseconds(run: Any, repeats: int = 20) -> float:
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()  # the backward runs in a thread of its own
    for _ in range(repeats):
        run()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def rows(report: Report) -> None:
    """Numbers first, then time."""
    report.case("units in flight, replayed", partial(units_in_flight, report, 0.0))
    report.case("the same with a dropout", partial(units_in_flight, report, 0.1))
    report.case("backwards in two ops", partial(units_in_flight, report, 0.1, defers=True))
    again = partial(units_in_flight, report, 0.1, make=RecomputedStageGraphs)
    report.case("layers that are computed again", again)
    report.case("host time of two blocks", partial(host_time, report))
    report.case("torch's own captured blocks", partial(callables, report))
