"""Stages that FSDP shards, whose gradients are summed once a step, compared with one process: ``four``."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import counterflow as cf
from counterflow.runtime.mesh.parallel import StageModule
from counterflow.schedule.ir import Schedule

CASES = runpy.run_path(str(Path(__file__).with_name("cases.py")))
Block, adamw, mean_loss, samples = (CASES[name] for name in ("Block", "adamw", "mean_loss", "samples"))
CLIP = 0.5
STEPS = 2

Layers = Callable[[int], list[nn.Module]]


class Derived(nn.Module):
    """The gradient of its weight goes through what is computed of the whole weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight * self.weight.norm())


class Adding(nn.Module):
    """What it adds to the loss is made of its weight, before its output is there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Derived()

    def forward(self, x: Tensor) -> Tensor:
        cf.add_loss(0.3 * torch.tanh(x @ self.inner.weight).square().mean(), "added")
        made: Tensor = self.inner(x)
        return made


class Saving(nn.Module):
    """What it saves for a skip connection is made aside, after its output."""

    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.inner, self.aside = Derived(), nn.Sequential(Derived(), skip.saver())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        self.aside(x)
        return made


class Loading(nn.Module):
    """Its weight multiplies what comes by a skip connection, too."""

    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.load, self.inner = skip.loader(), Derived()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x) + self.inner(torch.as_tensor(self.load()).tanh())
        return made


def layers(stages: int) -> list[nn.Module]:
    """Two a stage."""
    torch.manual_seed(3)
    count = 2 * stages
    return [Derived() if number in (1, count - 2) else Block() for number in range(count)]


def adding(stages: int) -> list[nn.Module]:
    torch.manual_seed(4)
    count = 2 * stages
    return [Adding() if number in (1, count - 2) else Block() for number in range(count)]


def skipping(_: int) -> list[nn.Module]:
    torch.manual_seed(5)
    skips = [cf.Skip("across"), cf.Skip("within")]
    saving = [Saving(skip) for skip in skips]
    loading = [Loading(skip) for skip in skips]
    return [saving[0], Block(), Block(), Block(), saving[1], loading[0], Block(), loading[1]]


def sharded(stage: StageModule, mesh: DeviceMesh, *, each: bool = False, **policy: Any) -> None:
    """The first layer of a stage by itself, the rest with the stage."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    fully_shard(next(iter(stage)), mesh=mesh["shard"], **policy)
    fully_shard(stage, mesh=mesh["shard"], **policy)
    stage.sums_each_backward = each


def layers_sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    """Each layer by itself; those of stage 1 stay whole in a step."""
    from torch.distributed.fsdp import fully_shard

    for layer in stage:
        fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=stage.number != 1)
        if stage.number == 1:
            layer.set_reshard_after_backward(False)  # type: ignore[operator]


class Counted:
    """Sums as FSDP does, and counts."""

    sums = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
        Counted.sums += 1
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(output_tensor, input_tensor, op, group)


def count_sums(pipeline: cf.Pipeline) -> int:
    """Count from here on; gives the groups of parameters that FSDP gathers and sums together."""
    from torch.distributed.fsdp import FSDPModule

    stages = [stage.module for stage in pipeline.stages.values() if stage.module is not None]
    groups = [module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.set_custom_reduce_scatter(Counted())  # type: ignore[arg-type]
    Counted.sums = 0
    return len(groups)


@cache
def one_process(made: Layers, stages: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, norm) of each step, and the weights after them."""
    model = nn.Sequential(*made(stages))
    optimizer = adamw(model.parameters())
    found = []
    inputs, targets = samples(16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with cf.added_losses() as added:
            loss = mean_loss(model(inputs), targets)
        loss = sum(added.values(), loss)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, model.state_dict()


def piped(
    schedule: Schedule, parallelize: Any, made: list[nn.Module], loss: Any, **options: Any
) -> cf.Pipeline:
    mesh = CASES["mesh_of"]((1, 2, 2), ("replica", "worker", "shard"))
    return cf.Pipeline(made, loss, schedule, mesh=mesh, parallelize=parallelize, **options)


def check(
    schedule: Schedule,
    parallelize: Any,
    *,
    sums: int = 1,
    accumulated: int = 1,
    made: Layers = layers,
    **options: Any,
) -> None:
    """Losses, norms and weights are those of one process, and each group is summed ``sums`` times a step."""
    steps, weights = one_process(made, schedule.stages)
    options |= {"optimizer": adamw, "clip_norm": CLIP}
    with piped(schedule, parallelize, made(schedule.stages), mean_loss, **options) as pipeline:
        groups = count_sums(pipeline)
        mine = [tensor.chunk(2)[pipeline.replica] for tensor in samples(16)]
        for expected in steps:
            losses = []
            for part in range(accumulated):
                given = [tensor.chunk(accumulated)[part] for tensor in mine]
                step = pipeline.step(*given, update=part == accumulated - 1)
                losses.append(step.loss)
            found = sum(losses) / accumulated, step.grad_norm
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert Counted.sums == sums * STEPS * accumulated * groups, schedule.scheme
        for name, tensor in pipeline.model_state_dict().items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-10)


def low_loss(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = mean_loss(output.float(), target)
    return loss


def check_policy(schedule: Schedule, **policy: Any) -> None:
    """Gradients are added up in float32 whatever computes them, and rounded once, as a policy says."""
    compute, wire = policy.get("param_dtype", torch.float32), policy.get("reduce_dtype", torch.float32)
    inputs, targets = (tensor.float() for tensor in samples(32))
    expected: dict[str, Tensor] = {}
    for rows in (slice(0, 16), slice(16, 32)):
        model = nn.Sequential(*layers(schedule.stages)).float().to(compute)
        for its in model.parameters():
            its.grad_dtype = torch.float32  # what is used twice is added up in it, too
        for x, y in zip(inputs[rows].chunk(8), targets[rows].chunk(8), strict=True):
            low_loss(model(x.to(compute)), y).backward()
        added = {name: its.grad for name, its in model.named_parameters() if its.grad is not None}
        for name, gradient in added.items():
            expected[name] = expected.get(name, 0) + gradient.to(wire)
    sgd = partial(torch.optim.SGD, lr=0.1)
    low = [layer.float() for layer in layers(schedule.stages)]
    with piped(schedule, partial(sharded, **policy), low, low_loss, optimizer=sgd) as pipeline:
        pipeline.keeps_gradients = True
        pipeline.step(*(tensor.chunk(2)[pipeline.replica] for tensor in (inputs, targets)))
        assert pipeline.gradients
        for name, given in pipeline.gradients.items():
            made = cast("Any", given).full_tensor()
            error = (made - expected[name].float() / 16).norm() / made.norm()
            assert error < 1e-5, (name, error)


def four() -> None:
    """What four processes run: two workers by two positions."""
    schemes, low = cf.schemes, torch.bfloat16
    check(schemes.dapple(2, 4), sharded)
    check(schemes.dapple(2, 4), partial(sharded, each=True), sums=4)
    check(schemes.gpipe(2, 4), layers_sharded, recompute="stage")
    check(schemes.interleaved(2, 4), sharded, barrier=False)
    check(schemes.chimera(2, 4), layers_sharded, sync="end")
    check(schemes.zb_h1(2, 4), sharded, accumulated=2)
    check(schemes.zb_v(2, 4), layers_sharded, recompute="stage")
    check(schemes.dualpipe(2, 4), sharded, recompute="layer")
    check(schemes.dapple(2, 4), layers_sharded, made=adding)
    check(schemes.zb_h1(2, 4), sharded, made=adding)
    check(schemes.dapple(2, 4), sharded, made=skipping)
    check(schemes.zb_v(2, 4), layers_sharded, made=skipping)
    check_policy(schemes.zb_h1(2, 8), param_dtype=low, reduce_dtype=torch.float32)
    check_policy(schemes.dapple(2, 8), reduce_dtype=low)
    with pytest.raises(cf.CounterflowError, match="adds to the loss, and fully_shard"):
        check(schemes.dapple(2, 4), partial(sharded, each=True), made=adding)
