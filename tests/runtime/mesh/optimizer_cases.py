"""Optimisers of weights that are sharded: refused when the pipeline is made, or accepted."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import counterflow as cf
from counterflow.runtime.mesh.parallel import StageModule

CASES = runpy.run_path(str(Path(__file__).with_name("cases.py")))
Block, mean_loss, mesh_of = (CASES[name] for name in ("Block", "mean_loss", "mesh_of"))
D = torch.float64


class Normalised(torch.optim.Optimizer):
    """Descent by gradients of norm 1: of the whole gradient, as torch knows it.

    Args:
        parameters: of a stage.
        reads: True if the host reads the norm, of which it has a shard's.
    """

    def __init__(self, parameters: Any, *, reads: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.reads = reads

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm: Any = parameter.grad.norm()
                    parameter.sub_(group["lr"] * parameter.grad / (norm.item() if self.reads else norm))


class Experts(nn.Module):
    """Four experts, in one weight."""

    expert_parameters = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4, dtype=D)
        self.weight = nn.Parameter(torch.randn(4, 4, 4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, choices = self.router(rows).softmax(-1).topk(2)
        dispatched = cf.dispatch(rows, choices, self.weight)
        output = cf.grouped_linear(dispatched.rows, self.weight, dispatched.counts)
        return x + cf.combine(dispatched, output, weights).view_as(x)


def sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in stage:
        fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh)


def tensor_parallel(stage: StageModule, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in stage:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


experts = cf.ExpertParallel("shard")


def matrices(parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.05)
    return optimizer


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay by an attribute that the model sets."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[getattr(parameter, "decays", False)].append(parameter)
    return torch.optim.AdamW([{"params": p, "weight_decay": 0.1 * d} for d, p in groups.items() if p])


class Hybrid(Normalised):
    """Reads the norms of matrices alone."""

    def __init__(self, parameters: Any) -> None:
        vectors, others = [p for p in parameters if p.ndim < 2], [p for p in parameters if p.ndim >= 2]
        super().__init__([{"params": vectors, "plain": True}, {"params": others}], reads=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = 1.0 if group.get("plain") else parameter.grad.norm().item()
                    parameter.sub_(group["lr"] * parameter.grad / norm)


def layers(kind: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(1)
    found: list[nn.Module] = [kind(), kind()]
    for layer in found:
        for number, parameter in enumerate(layer.parameters()):
            parameter.decays = bool(number % 2)  # type: ignore[attr-defined]
    return found


def make(optimizer: Any, parallelize: Any) -> None:
    mesh = mesh_of((1, 1, 2), ("replica", "worker", "shard"))
    options = {"optimizer": optimizer, "mesh": mesh, "parallelize": parallelize}
    kind = Experts if parallelize is experts else Block
    with cf.Pipeline(layers(kind), mean_loss, cf.schemes.dapple(1, 1), **options) as pipeline:
        x = torch.randn(4, 3, 4, dtype=D, generator=torch.Generator().manual_seed(1))
        pipeline.step(*(tensor.chunk(pipeline.data.count)[pipeline.data.number] for tensor in (x, x)))


def refused() -> None:
    optim: Any = torch.optim
    otherwise = "updates a weight that is sharded .* otherwise than the whole weight"
    for optimizer, parallelize in (
        (optim.Adafactor, experts),
        (partial(Normalised, reads=True), sharded),
        (partial(Normalised, reads=True), tensor_parallel),
        (Hybrid, sharded),
    ):
        with pytest.raises(cf.ConfigError, match=otherwise):
            make(optimizer, parallelize)
    for optimizer, parallelize in (
        (optim.Adafactor, sharded),
        (optim.Adafactor, tensor_parallel),
        (optim.Rprop, sharded),
    ):
        with pytest.raises(cf.ConfigError, match="cannot update a weight that is sharded"):
            make(optimizer, parallelize)


def accepted() -> None:
    optim: Any = torch.optim
    plain = ["AdamW", "Adam", "SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Adagrad", "Adadelta"]
    for name in plain:
        make(partial(getattr(optim, name), lr=0.05), sharded)
    more = (
        partial(optim.AdamW, lr=0.05, foreach=True, amsgrad=True),
        partial(optim.AdamW, lr=0.05, fused=True),
        partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(optim.RMSprop, lr=0.05, centered=True, momentum=0.5),
        partial(Normalised, reads=False),
        matrices,
        grouped,
    )
    for optimizer in more:
        make(optimizer, sharded)
    for optimizer in (optim.AdamW, partial(optim.SGD, lr=0.1), matrices, grouped):
        make(optimizer, tensor_parallel)
        make(optimizer, experts)
