"""Stages that FSDP shards, of whose weights positions use some each, compared with one process: ``four``."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import counterflow as cf
from counterflow.runtime.mesh.parallel import StageModule
from counterflow.schedule.ir import Schedule

CASES = runpy.run_path(str(Path(__file__).with_name("cases.py")))
adamw, mean_loss, mesh_of = (CASES[name] for name in ("adamw", "mean_loss", "mesh_of"))
D = torch.float64
WIDTH = 4


class Branch(nn.Module):
    """Samples go to one of two modules by the sign of their first feature, or to a third, which none uses."""

    def __init__(self, *, equal: bool = False) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH, dtype=D)
        wide = (nn.Linear(WIDTH, 3 * WIDTH, dtype=D), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH, dtype=D))
        self.high: nn.Module = nn.Linear(WIDTH, WIDTH, dtype=D) if equal else nn.Sequential(*wide)
        self.never = nn.Linear(WIDTH, 1, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        output = x.clone()
        for module, chosen in ((self.low, x[:, 0] < 0), (self.high, x[:, 0] > 0)):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, module(x[rows]))
        return torch.cat([x[:, :1], output[:, 1:]], dim=1)


class Sometimes(nn.Module):
    """A layer that uses its weights for samples with a first feature above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 0
        return torch.where(chosen, x + self.inner(x), x) if chosen.any() else x * 1


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    return [Sometimes(), Branch(), Branch(), nn.Linear(WIDTH, WIDTH, dtype=D)]


def equal_layers() -> list[nn.Module]:
    """Layers of which torch would mix up the modules without an error."""
    torch.manual_seed(2)
    return [Branch(equal=True), nn.Linear(WIDTH, WIDTH, dtype=D)]


def batches(*signs: float) -> list[tuple[Tensor, Tensor]]:
    """Batches of 16 samples: first features of the first half have the sign, those of the others its inverse.

    Zero: alternating signs.
    """
    generator, made = torch.Generator().manual_seed(1), []
    for sign in signs:
        x, y = (torch.randn(16, WIDTH, dtype=D, generator=generator) for _ in range(2))
        halves = torch.tensor([sign] * 8 + [-sign] * 8 if sign else [1.0, -1.0] * 8, dtype=D)
        x[:, 0] = (x[:, 0].abs() + 0.1) * halves
        made.append((x, y))
    return made


def sharded(stage: StageModule, mesh: DeviceMesh, *, layerwise: bool = True, each: bool = False) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in stage if layerwise else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh)
    stage.sums_each_backward = each


def within(stage: StageModule, mesh: DeviceMesh) -> None:
    """Shard modules that layers call for some samples only."""
    from torch.distributed.fsdp import fully_shard

    for layer in stage:
        for module in (layer.low, layer.high) if isinstance(layer, Branch) else ():
            fully_shard(module, mesh=mesh)
    fully_shard(stage, mesh=mesh)


def check(
    schedule: Schedule,
    parallelize: Any,
    signs: tuple[float, ...],
    *,
    sizes: tuple[int, ...] = (2,),
    accumulated: int = 1,
    made: Callable[[], list[nn.Module]] = layers,
    **options: Any,
) -> None:
    """Losses, norms and weights of each step are those of one process."""
    model = nn.Sequential(*made())
    optimizer = adamw(model.parameters())
    names = ("replicate", "shard")[-len(sizes) :]
    mesh = mesh_of((1, schedule.workers, *sizes), ("replica", "worker", *names))
    options |= {"optimizer": adamw, "clip_norm": 0.5, "mesh": mesh, "parallelize": parallelize}
    with cf.Pipeline(made(), mean_loss, schedule, **options) as pipeline:
        for inputs, targets in batches(*signs):
            optimizer.zero_grad()
            loss = mean_loss(model(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            samples = [
                tensor.chunk(pipeline.data.count)[pipeline.data.number] for tensor in (inputs, targets)
            ]
            losses = []
            for part in range(accumulated):
                shares = [tensor.chunk(accumulated)[part] for tensor in samples]
                step = pipeline.step(*shares, update=part == accumulated - 1)
                losses.append(step.loss)
            results = sum(losses) / accumulated, step.grad_norm
            torch.testing.assert_close(results, (loss.item(), norm.item()), rtol=1e-10, atol=1e-10)
        for name, tensor in pipeline.model_state_dict().items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-10)


def four() -> None:
    """What four processes run: two workers by two positions, or one by two by two."""
    schemes = cf.schemes
    check(schemes.dapple(2, 2), sharded, (1, -1, 0, 1))
    check(schemes.dapple(2, 2), partial(sharded, layerwise=False), (1, -1, 0))
    check(schemes.zb_h1(2, 2), sharded, (-1, 1), accumulated=2)
    check(schemes.dapple(2, 2), sharded, (1, 1), recompute="stage", barrier=False)
    check(schemes.dapple(1, 1), sharded, (1, 0, -1), sizes=(2, 2))  # replicas of the shards differ
    check(schemes.dapple(2, 2), within, (0, 0))
    check(schemes.dapple(2, 2), partial(sharded, each=True), (0, 0))
    check(schemes.dapple(1, 1), partial(sharded, each=True), (0, 0), sizes=(2, 2))


def within_at_once() -> None:
    check(cf.schemes.dapple(1, 2), within, (1,))


def within_later() -> None:
    check(cf.schemes.dapple(1, 2), within, (0, 1), made=equal_layers)


def each_backward() -> None:
    check(cf.schemes.dapple(1, 2), partial(sharded, each=True), (1,))


def each_backward_of_replicas() -> None:
    check(cf.schemes.dapple(1, 1), partial(sharded, each=True), (1,), sizes=(2, 2))


def each_backward_later() -> None:
    check(cf.schemes.dapple(1, 2), partial(sharded, each=True), (0, 1), made=equal_layers)
