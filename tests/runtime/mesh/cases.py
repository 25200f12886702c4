"""Pipelines over meshes of more dimensions, compared with one process: ``four``, or ``eight``."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import counterflow as cf
from counterflow.common.parallel_degrees import Degrees
from counterflow.planning import Cluster, Configuration, Division, LayerProfile, Link, Model, Profile, predict
from counterflow.runtime.mesh.parallel import StageModule
from counterflow.schedule.ir import Schedule

D = torch.float64
DECAY = 0.5
WIDTH, SEQUENCE = 4, 6


class Block(nn.Module):
    """A normed residual layer with two linear ones in it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=D)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=D)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=D)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Parameter(torch.ones(3, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return x + added


@cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One for all pipelines of a shape: each makes groups of processes, which take long."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def layers(dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Block(dropout) for _ in range(4)]


def loss_sum(output: Tensor, target: Tensor) -> cf.LossSum:
    """The squares of what counts: targets above zero."""
    counts = (target > 0).to(D)
    return cf.LossSum(((output - target).square() * counts).sum(), counts.sum())


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).mean(dim=1).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def tensor_parallel(stage: StageModule, mesh: DeviceMesh) -> None:
    """Every second block over its features, the others over the sequence as well."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for name, layer in stage.named_children():
        if int(name) % 2 == 0:
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        else:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            whole = PrepareModuleInputOutput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(1),
                use_local_input=False,
                output_layouts=Shard(1),
                desired_output_layouts=Replicate(),
            )
            parallelize_module(layer, mesh["tp"], whole)
        parallelize_module(layer, mesh["tp"], plan)


def sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    """The first block of a stage by itself, the rest with the stage."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(next(iter(stage)), mesh=mesh["shard"])
    fully_shard(stage, mesh=mesh["shard"])


def layers_sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    """All blocks but the last one of the model, always gathered anew."""
    from torch.distributed.fsdp import fully_shard

    for name, layer in stage.named_children():
        if name != "3":
            fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=True)


def both(stage: StageModule, mesh: DeviceMesh) -> None:
    tensor_parallel(stage, mesh)
    sharded(stage, mesh)


def one_process(
    inputs: Tensor, targets: Tensor, steps: int, clip_norm: float, loss: Callable[..., Any]
) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """(loss, norm) of each step, the weights after them, and their average."""
    model = nn.Sequential(*layers())
    optimizer = adamw(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        given = loss(model(inputs), targets)
        value = given.sum / given.weight if isinstance(given, cf.LossSum) else given
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        average.update_parameters(model)
        found.append((value.item(), norm.item()))
    return found, model.state_dict(), average.module.state_dict()


def samples(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, SEQUENCE, WIDTH, dtype=D, generator=generator)
    return inputs, torch.randn(count, SEQUENCE, WIDTH, dtype=D, generator=generator)


def check(
    schedule: Schedule,
    dims: dict[str, int],
    parallelize: Any,
    *,
    replicas: int = 1,
    steps: int = 2,
    clip_norm: float = 0.5,
    loss: Callable[..., Any] = mean_loss,
    count: int = 12,
    saves: bool = False,
    **options: Any,
) -> None:
    """A pipeline over (replica, worker, *dims) gives what one process gives, from a checkpoint on as well."""
    names = ("replica", "worker", *dims)
    mesh = mesh_of((replicas, schedule.workers, *dims.values()), names)
    inputs, targets = samples(count)
    expected, weights, averages = one_process(inputs, targets, steps, clip_norm, loss)

    def make() -> cf.Pipeline:
        return cf.Pipeline(
            layers(), loss, schedule, optimizer=adamw, mesh=mesh, parallelize=parallelize,
            clip_norm=clip_norm, digest_every=1, **options,
        )  # fmt: skip

    pipeline = make()
    pipeline.ema(DECAY)
    mine = [tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in (inputs, targets)]
    for number in range(steps):
        if saves and number == steps - 1:  # another pipeline goes on from a checkpoint
            pipeline = gone_on(pipeline, make, number)
        evaluated = pipeline.evaluate(*mine).loss
        found = pipeline.step(*mine)
        torch.testing.assert_close((found.loss, found.grad_norm), expected[number], rtol=1e-10, atol=1e-10)
        assert abs(evaluated - found.loss) < 1e-10
    state = pipeline.model_state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10)
    averaged = pipeline.model_state_dict(ema=True)
    for name, tensor in averages.items():
        torch.testing.assert_close(averaged[name], tensor, rtol=1e-10, atol=1e-10)
    for name, tensor in pipeline.model_state_dict().items():
        assert torch.equal(tensor, state[name])
    pipeline.close()


def gone_on(pipeline: cf.Pipeline, make: Callable[[], cf.Pipeline], step: int) -> cf.Pipeline:
    """Another pipeline with its checkpoint, and with its state to the last bit."""
    state = pipeline.state_dict()
    folder = pipeline.transport.gather_objects(tempfile.mkdtemp() if pipeline.transport.rank == 0 else "")[0]
    cf.save_checkpoint(pipeline, str(folder))
    pipeline.close()
    other = make()
    other.ema(DECAY)
    assert cf.load_checkpoint(other, str(folder)) == step
    loaded = other.state_dict()
    torch.testing.assert_close(loaded["model"], state["model"], rtol=0, atol=0)
    torch.testing.assert_close(loaded["ema"], state["ema"], rtol=0, atol=0)
    for name, kept in state["optimizer"].items():
        found = loaded["optimizer"][name]
        torch.testing.assert_close(found["state"], kept["state"], rtol=0, atol=0)
        assert found["options"] == kept["options"]
    if other.transport.rank == 0:
        shutil.rmtree(str(folder))
    return other


def four() -> None:
    """What four processes run: two stages by two positions."""
    dapple, chimera = cf.schemes.dapple(2, 3), cf.schemes.chimera(2, 2)
    tp, shard = {"tp": 2}, {"shard": 2}
    check(dapple, tp, tensor_parallel)
    check(chimera, tp, tensor_parallel, loss=loss_sum, recompute="stage", sync="end", saves=True)
    check(cf.schemes.zb_h1(2, 3), tp, tensor_parallel)
    check(dapple, shard, sharded, recompute="layer", saves=True)
    check(chimera, shard, layers_sharded, loss=loss_sum, barrier=False, saves=True)
    check_without_flush(cf.schemes.wpipe(2, 2))
    losses = page()
    assert losses[-1] < 0.9 * losses[0]
    held_as_planned()
    low_precision(tp, tensor_parallel)
    low_precision(shard, sharded)
    check_refusals()
    refused(dapple, drifting, "after step 0 the copies of stage . on ranks .* hold the same weights of it")


def eight() -> None:
    """What eight processes run."""
    check(cf.schemes.chimera(4, 4), {"tp": 2}, tensor_parallel, recompute="layer")
    dapple = cf.schemes.dapple(2, 3)
    check(dapple, {"shard": 2, "tp": 2}, both, loss=loss_sum, saves=True)
    check(cf.schemes.zb_h1(2, 3), {"shard": 2, "tp": 2}, both)
    with pytest.raises(cf.ConfigError, match=r"2 samples for 3 micro-batches: .* each micro-batch needs one"):
        check(dapple, {"shard": 2, "tp": 2}, both, count=4)


def low_precision(dims: dict[str, int], parallelize: Any) -> None:
    """Gradients of sharded weights in bfloat16 are added up in float32 and shown in their own dtype."""
    model = nn.Sequential(*layers()).float()
    inputs, targets = (t.float() for t in samples(48))
    mean_loss(model(inputs), targets).backward()
    true = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    (name,) = dims
    mesh = mesh_of((1, 2, 2), ("replica", "worker", name))
    schedule, sgd = cf.schemes.dapple(2, 12), partial(torch.optim.SGD, lr=0.1)
    low = [layer.to(torch.bfloat16) for layer in layers()]
    options: dict[str, Any] = {"optimizer": sgd, "mesh": mesh, "parallelize": parallelize}
    with cf.Pipeline(low, lambda y, t: mean_loss(y.float(), t), schedule, **options) as pipeline:
        pipeline.keeps_gradients = True
        rows = (
            slice(0, 48)
            if pipeline.replicas == 1
            else slice(24 * pipeline.replica, 24 * pipeline.replica + 24)
        )
        pipeline.step(inputs[rows].bfloat16(), targets[rows])
        for its, gradient in pipeline.gradients.items():
            assert gradient.dtype is torch.bfloat16
            whole: Any = gradient
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            error = (whole.float() - true[its]).norm() / true[its].norm()
            assert error < 0.03, (its, error)


def held_as_planned() -> None:
    """What a position holds of weights and of Adam's state is what the planner counts."""
    from torch.distributed.tensor import DTensor

    mesh = mesh_of((1, 2, 2), ("replica", "worker", "tp"))
    dapple = Configuration.of("dapple", {"stages": 2, "micro_batches": 3}, 1, 1, degrees=Degrees(tp=2))
    # Of 87 numbers norm, down's bias and what is unused are whole: 72 are divided, 8 bytes each.
    division = Division(weights=72 / 87)
    layer = LayerProfile((1.0,), (1.0,), (1.0,), (0.0,), 8.0 * 87, 0.0, tensor_parallel=division)
    cluster = Cluster("c", 1, 4, 1e9, Link(0.0, 0.0), Link(0.0, 0.0))
    predicted = predict(Model("m", ("block",) * 4), Profile("p", "", "", {"block": layer}), cluster, dapple)
    with cf.Pipeline(
        layers(), mean_loss, cf.schemes.dapple(2, 3), optimizer=adamw, mesh=mesh, parallelize=tensor_parallel
    ) as pipeline:
        pipeline.step(*samples())

        def held(tensors: Any) -> int:
            return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

        (stage,) = pipeline.stages.values()
        unused = 2 * 3 * 8  # without gradients, and so without state
        states = [s for one in pipeline.optimizers.values() for s in one.state.values()]
        found = [held(stage.parameters()), held(s[key] for s in states for key in ("exp_avg", "exp_avg_sq"))]
        assert found == pytest.approx([2 * 8 * 51, 2 * (2 * 8 * 51 - unused)])
        for worker in predicted.memory:
            assert 2 * found[0] + found[1] + 2 * unused == pytest.approx(worker.weights)


def check_without_flush(schedule: Schedule, **options: Any) -> None:
    """Weight versions of shards: the numbers of two replicas that are given the same."""
    names = ("replica", "worker", "tp")
    plain = mesh_of((2, 2), names[:2])
    further = mesh_of((1, 2, 2), names)
    found = []
    for mesh, parallelize in ((plain, None), (further, tensor_parallel)):
        with cf.Pipeline(
            layers(), mean_loss, schedule, optimizer=adamw, mesh=mesh, parallelize=parallelize, **options
        ) as pipeline:
            pipeline.ema(DECAY)
            for _ in range(4):
                pipeline.step(*samples(8))
            told = [(step.loss, step.grad_norm) for step in pipeline.flush()]
            found.append((told, pipeline.model_state_dict(), pipeline.model_state_dict(ema=True)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def refused(schedule: Schedule, parallelize: Any, words: str, **options: Any) -> None:
    dims = options.pop("dims", {"tp": 2})
    names = ("replica", "worker", *dims)
    mesh = mesh_of((1, 2, *dims.values()), names)
    made, optimizer = options.pop("layers", layers)(), options.pop("optimizer", adamw)
    with pytest.raises(cf.CounterflowError, match=words):  # noqa: PT012 - of the pipeline, or of its first step
        pipeline = cf.Pipeline(
            made, mean_loss, schedule, optimizer=optimizer, mesh=mesh, parallelize=parallelize, **options
        )
        mine = [tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in samples(4)]
        pipeline.step(*mine)


def page(name: str = "more-dimensions.md", steps: int = 20) -> list[Any]:
    """Run the program of a page with 3 steps; return what it returns."""
    text = (Path(__file__).parents[3] / "docs" / name).read_text()
    program = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    (processes,) = re.findall(r"^torchrun --nproc-per-node (\d+) \w+.py$", text, re.MULTILINE)
    assert int(processes) == torch.distributed.get_world_size()
    scope: dict[str, Any] = {"__name__": "page"}
    assert f"range({steps})" in program
    exec(program.replace(f"range({steps})", "range(3)"), scope)
    result: list[Any] = scope["main"]()
    return result


def check_refusals() -> None:
    """Before anything starts, and on all workers."""
    dapple, wpipe, hanayo = cf.schemes.dapple(2, 3), cf.schemes.wpipe(2, 2), cf.schemes.hanayo(2, 2)
    refused(dapple, None, "say what its dimensions after .replica, worker. are for")
    refused(wpipe, sharded, "keeps several versions of its weights", dims={"shard": 2})
    refused(wpipe, tensor_parallel, "clips each stage by its own norm", clip_norm=1.0)
    foreach = partial(torch.optim.SGD, lr=0.1, foreach=True)
    refused(dapple, tensor_parallel, "has foreach=True, and its parameters are plain", optimizer=foreach)
    refused(dapple, replaced, "gave other modules for stage")
    refused(hanayo, sharded, "0.up.weight is a weight of stages 0 and 3", dims={"shard": 2}, layers=tied)
    refused(dapple, summing, "comes by a Skip is none", dims={"shard": 2}, layers=skipping)
    refused(cf.schemes.zb_h1(2, 3), summing, "makes gradients of weights after it", dims={"shard": 2})
    refused(dapple, sharded_in_part, "0.up.weight is sharded in several ways", dims={"shard": 2}, layers=tied)

    shard = {"shard": 2}
    summed = "is sharded along dimension 'shard' of the mesh, .* divide experts by cf.ExpertParallel"
    refused(dapple, experts, rf"0\.up\.weight {summed}", dims=shard)
    refused(dapple, over_replicas, "up.weight of shape .* is sharded over replicas or workers", dims=shard)
    before = "is a DTensor: it was sharded .* before the pipeline was made, .* in parallelize="
    refused(dapple, sharded, rf"of layer 0.* {before}", dims=shard, layers=sharded_before)
    refused(dapple, tensor_parallel, rf"weight of layer 0.up .Linear. {before}", layers=parallelized_before)
    refused(dapple, sharded, r"layer 0 .DistributedData.* synchronises replicas", dims=shard, layers=wrapped)


def experts(stage: StageModule, mesh: DeviceMesh) -> None:
    """Each position of the dimension that fully_shard uses has other rows of a weight."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    for layer in stage:
        up: Any = layer.get_submodule("up")
        up.weight = nn.Parameter(distribute_tensor(up.weight.data, mesh["shard"], [Shard(0)]))
        fully_shard(layer, mesh=mesh["shard"], ignored_params={up.weight})


def over_replicas(stage: StageModule, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    del mesh
    workers = mesh_of((1, 2, 2), ("replica", "worker", "shard"))["worker"]
    for layer in stage:
        up: Any = layer.get_submodule("up")
        up.weight = nn.Parameter(distribute_tensor(up.weight.data, workers, [Shard(0)]))


def sharded_before() -> list[nn.Module]:
    from torch.distributed.fsdp import fully_shard

    found = layers()
    for layer in found:
        fully_shard(layer, mesh=mesh_of((1, 2, 2), ("replica", "worker", "shard"))["shard"])
    return found


def parallelized_before() -> list[nn.Module]:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    found = layers()
    for layer in found:
        parallelize_module(
            layer, mesh_of((1, 2, 2), ("replica", "worker", "tp"))["tp"], {"up": ColwiseParallel()}
        )
    return found


def wrapped() -> list[nn.Module]:
    for layer in (found := layers()):
        layer.get_parameter("unused").requires_grad_(False)
    return [nn.parallel.DistributedDataParallel(layer) for layer in found]


def summing(stage: StageModule, mesh: DeviceMesh) -> None:
    stage.sums_each_backward = True
    sharded(stage, mesh)


def skipping() -> list[nn.Module]:
    skip = cf.Skip("entry")
    return [nn.Sequential(Block(), skip.saver()), Block(), Block(), Loading(skip)]


class Loading(nn.Module):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.load = skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.load())


def replaced(stage: StageModule, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(*stage)


def tied() -> list[nn.Module]:
    found = layers()
    found[3].up.weight = found[0].up.weight  # type: ignore[union-attr]
    return found


def sharded_in_part(stage: StageModule, mesh: DeviceMesh) -> None:
    if stage.number == 0:
        sharded(stage, mesh)


def drifting(stage: StageModule, mesh: DeviceMesh) -> None:
    """Each position has gradients of its own, and nothing says that they are to be summed."""
    for parameter in stage.parameters():
        parameter.register_hook(lambda gradient: gradient * (1 + mesh["tp"].get_local_rank()))
