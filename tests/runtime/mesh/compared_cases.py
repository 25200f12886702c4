"""Forwards of which positions have a part, compared with those of whole weights: run by two processes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.api.experts import Dispatched, local_experts

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    """Experts that are given dispatched tokens."""

    expert_parameters: Any = ("up",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, sent: Dispatched) -> Tensor:
        return cf.grouped_linear(sent.rows, self.up, sent.counts)


class Counted(Experts):
    """Experts that are given rows and their counts."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        return cf.grouped_linear(rows, self.up, counts)


class Scaled(Counted):
    """Experts with a buffer of a factor for each, which is not divided."""

    factors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.arange(1.0, EXPERTS + 1))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        factors = self.factors[: len(counts)].repeat_interleave(counts)
        return super().forward(rows, counts) * factors[:, None]


class Routed(nn.Module):
    """A router before experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, choices = self.router(tokens).softmax(-1).topk(2)
        sent = cf.dispatch(tokens, choices, self.experts.up)
        called = (sent.rows, sent.counts) if isinstance(self.experts, Counted) else (sent,)
        added: Tensor = x + cf.combine(sent, self.experts(*called), weights).view_as(x)
        return added


class Biased(Experts):
    """A router and experts with a bias, which expert_parameters may leave out; the first update moves it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.router, self.bias = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.zeros(EXPERTS, WIDTH))
        self.expert_parameters = ("up", *names)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        scores = scores + torch.rand_like(scores)
        weights, choices = scores.softmax(-1).topk(2)
        choices = cf.limit_capacity(choices, self.up.shape[0], 6)
        sent = cf.dispatch(tokens, choices, self.up)
        bias = local_experts(self.bias)
        parts = sent.rows.split(sent.counts.tolist())
        outputs = torch.cat([part + bias[number] for number, part in enumerate(parts)])
        added: Tensor = x + cf.combine(sent, outputs, weights).view_as(x)
        return added


class Dropping(nn.Module):
    """Divided features, of which some are dropped in training; it counts its calls."""

    tensor_parallel_plan: ClassVar = {"inputs": "colwise", "outputs": "rowwise"}
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 1.0
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.counts = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counts[0] += 1
        hidden = functional.dropout(self.inputs(x), 0.5, self.training)
        added: Tensor = x + self.scale * self.outputs(hidden)
        return added


def run(layer: nn.Module, degrees: cf.MeshDegrees, steps: int = 3) -> None:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=2.0)
    made = [nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)]
    pipeline = cf.Pipeline(made, nn.MSELoss(), cf.schemes.gpipe(1, 2), optimizer=sgd, **degrees.options(1, 1))
    for _ in range(steps):
        x = torch.randn(4, 4, WIDTH).tensor_split(pipeline.data.count)[pipeline.data.number]
        pipeline.step(x, x)
        layer.scale = 2.0  # type: ignore[assignment]


def expert_bias() -> None:
    run(Biased(), cf.MeshDegrees(dp_shard=2, ep=2))


def expert_factors() -> None:
    run(Routed(Scaled()), cf.MeshDegrees(dp_shard=2, ep=2))


def right() -> list[str]:
    """Warnings of forwards that compute the same."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("counterflow").addHandler(handler)
    for layer in (Biased("bias"), Routed(Experts()), Routed(Counted())):
        run(layer, cf.MeshDegrees(dp_shard=2, ep=2))
    dropping = Dropping()
    run(dropping, cf.MeshDegrees(tp=2))
    assert (dropping.calls.item(), dropping.counts[0]) == (6, 6), (dropping.calls, dropping.counts)
    return warnings
