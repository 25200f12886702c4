"""Expert parallelism over a dimension of the mesh, compared with one process: run by four processes."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import counterflow as cf
from counterflow.runtime.mesh.parallel import StageModule
from counterflow.runtime.mesh.parallel_dims import ParallelDims, WeightDims
from counterflow.schedule.ir import Schedule

CASES = runpy.run_path(str(Path(__file__).with_name("cases.py")))
loss_sum, mean_loss, mesh_of, page = (CASES[n] for n in ("loss_sum", "mean_loss", "mesh_of", "page"))
D = torch.float64
WIDTH, HIDDEN, EXPERTS, SEQUENCE = 4, 6, 4, 5


class Moe(nn.Module):
    """A residual layer of four experts, of which two run for each token, and a shared one."""

    expert_parameters = ("up", "down")

    def __init__(self, *, balance: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=D)
        self.router = nn.Linear(width, EXPERTS, bias=False, dtype=D)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, HIDDEN, dtype=D) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, width, dtype=D) / 2)
        self.shared = nn.Linear(width, width, dtype=D)
        self.balance = cf.TokenBalance(EXPERTS, rate=0.05) if balance else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        scores = self.router(tokens).sigmoid()
        choices = scores.topk(2).indices if self.balance is None else self.balance(scores, 2)
        weights = scores.gather(1, choices)
        sent = cf.dispatch(tokens, choices, self.up)
        hidden = functional.gelu(cf.grouped_linear(sent.rows, self.up, sent.counts))
        outputs = cf.grouped_linear(hidden, self.down, sent.counts)
        added = cf.combine(sent, outputs, weights / weights.sum(-1, keepdim=True)) + self.shared(tokens)
        output: Tensor = x + added.view_as(x)
        return output


def layers(*, balance: bool = False) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Moe(balance=balance) for _ in range(4)]


def batch(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, SEQUENCE, WIDTH, dtype=D, generator=generator)
    return inputs, torch.randn(count, SEQUENCE, WIDTH, dtype=D, generator=generator)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def one_process(
    model: nn.Module, steps: int, count: int, loss: Any
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, norm) of each step and the state after them, in plain torch."""
    inputs, targets = batch(count)
    optimizer, steps_seen = adamw(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        result = loss(model(inputs), targets)
        value = result.sum / result.weight if isinstance(result, cf.LossSum) else result
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        for module in model.modules():
            if isinstance(module, cf.TokenBalance):
                module.update()
        steps_seen.append((value.item(), norm.item()))
    return steps_seen, model.state_dict()


def fully_sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    cf.ExpertParallel("ep", fully_shard="ep")(stage, mesh)


def check(
    schedule: Schedule,
    parallelize: Any,
    *,
    dims: dict[str, int] | None = None,
    replicas: int = 1,
    count: int = 12,
    steps: int = 3,
    loss: Any = mean_loss,
    balance: bool = False,
    **options: Any,
) -> None:
    """A pipeline over (replica, worker, ep) has the losses, norms and weights of one process."""
    dims = {"ep": 2} if dims is None else dims
    mesh = mesh_of((replicas, schedule.workers, *dims.values()), ("replica", "worker", *dims))
    expected, state = one_process(nn.Sequential(*layers(balance=balance)), steps, count, loss)
    inputs, targets = batch(count)
    pipeline = cf.Pipeline(
        layers(balance=balance), loss, schedule, optimizer=adamw, mesh=mesh, parallelize=parallelize,
        clip_norm=0.1, digest_every=1, **options,
    )  # fmt: skip
    mine = [tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in (inputs, targets)]
    for number in range(steps):
        evaluated = pipeline.evaluate(*mine).loss
        step = pipeline.step(*mine)
        assert step.grad_norm > 0.1, "clipping is active"
        torch.testing.assert_close((step.loss, step.grad_norm), expected[number], rtol=1e-12, atol=1e-12)
        assert abs(evaluated - step.loss) < 1e-12
    actual = pipeline.model_state_dict()
    torch.testing.assert_close(actual, state, rtol=1e-12, atol=1e-12)
    pipeline.close()


def resume() -> None:
    """Two stages with experts, four without, one with, two again: states are equal to the last bit."""
    schemes = cf.schemes
    loads: list[dict[str, Any]] = []
    stage_by_expert = mesh_of((1, 2, 2), ("replica", "worker", "ep"))
    expert_alone = mesh_of((2, 1, 2), ("replica", "worker", "ep"))
    plans: list[tuple[Schedule, dict[str, Any]]] = [
        (schemes.dapple(2, 3), {"mesh": stage_by_expert, "parallelize": fully_sharded}),
        (schemes.zb_h1(4, 4), {}),
        (schemes.gpipe(1, 3), {"mesh": expert_alone, "parallelize": cf.ExpertParallel("ep")}),
        (schemes.dapple(2, 3), {"mesh": stage_by_expert, "parallelize": cf.ExpertParallel("ep")}),
    ]
    expected, state = one_process(nn.Sequential(*layers(balance=True)), len(plans), 12, mean_loss)
    inputs, targets = batch()
    folder = ""
    for number, (schedule, options) in enumerate(plans):
        with cf.Pipeline(
            layers(balance=True), mean_loss, schedule, optimizer=adamw, clip_norm=0.1, **options
        ) as pipeline:
            if folder:
                assert cf.load_checkpoint(pipeline, folder) == number
                loaded = pipeline.state_dict()
                torch.testing.assert_close(loaded["model"], loads[-1]["model"], rtol=0, atol=0)
                for name, saved in loads[-1]["optimizer"].items():
                    assert torch.equal(
                        loaded["optimizer"][name]["state"]["exp_avg"], saved["state"]["exp_avg"]
                    )
            mine = [tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in (inputs, targets)]
            step = pipeline.step(*mine)
            actual = step.loss, step.grad_norm
            torch.testing.assert_close(actual, expected[number], rtol=1e-11, atol=1e-11)
            loads.append(pipeline.state_dict())
            on_first = pipeline.transport.rank == 0
            folder = str(pipeline.transport.gather_objects(tempfile.mkdtemp() if on_first else "")[0])
            cf.save_checkpoint(pipeline, folder)
            pipeline.transport.gather_objects(None)
    torch.testing.assert_close(loads[-1]["model"], state, rtol=1e-10, atol=1e-10)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
        shutil.rmtree(folder)


def wrong_ways() -> None:
    """The comparison with one process finds sums and norms that are wrong for experts."""
    sum_dims, counts = ParallelDims.sum_dims, ParallelDims.counts_in_norm
    experts = cf.ExpertParallel("ep")
    patches: list[tuple[type, str, Any, Any]] = [
        (ParallelDims, "sum_dims", lambda dims, *_: frozenset(dims.samples), experts),  # experts are mixed
        (
            *(ParallelDims, "counts_in_norm"),  # the norm is a position's own
            lambda dims, rank, holders, _weight: counts(dims, rank, holders, WeightDims()),
            experts,
        ),
        # fully_shard takes means, so that gradients of experts are twice those of other weights
        (FSDPModule, "set_gradient_divide_factor", lambda *_: None, fully_sharded),
    ]
    for owner, name, wrong, parallelize in patches:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrong)
            with pytest.raises((AssertionError, cf.CounterflowError)):
                check(cf.schemes.dapple(2, 3), parallelize, steps=2)
    assert ParallelDims.sum_dims is sum_dims


def same_tokens() -> None:
    """Positions with the same tokens send a share each: 20 tokens, 5, which two cannot halve, and 1."""
    schemes = cf.schemes
    experts = cf.ExpertParallel("ep", tensor_dims="ep")
    check(schemes.dapple(2, 3), experts, loss=loss_sum)
    check(schemes.zb_h1(2, 3), experts, count=3, balance=True)
    check(schemes.chimera(2, 2), experts, recompute="stage", balance=True)
    check(schemes.interleaved(2, 4, 2), experts, recompute="layer", count=6)
    dims = {"shard": 2, "tp": 2}
    for names in ("tp", ("shard", "tp")):
        sharded = cf.ExpertParallel(names, tensor_dims="tp", fully_shard="shard")
        check(schemes.dapple(1, 3), sharded, dims=dims, balance=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SEQUENCE", 1)
        check(schemes.dapple(2, 3), experts, count=3)
    states = []
    for parallelize in (experts, lambda *_: None):
        mesh = mesh_of((1, 2, 2), ("replica", "worker", "ep"))
        with cf.Pipeline(
            layers(), mean_loss, schemes.wpipe(2, 2), optimizer=adamw, mesh=mesh, parallelize=parallelize
        ) as pipeline:
            for _ in range(6):
                pipeline.step(*batch())
            pipeline.flush()
            states.append(pipeline.model_state_dict())
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)
    mesh = mesh_of((1, 1, 2, 2), ("replica", "worker", "shard", "tp"))
    both = cf.ExpertParallel(("shard", "tp"), tensor_dims=("shard", "tp"), fully_shard="shard")
    with pytest.raises(cf.ConfigError, match="along dimension 'shard' of the mesh are said to have the same"):
        cf.Pipeline(layers(), mean_loss, schemes.dapple(1, 3), optimizer=adamw, mesh=mesh, parallelize=both)
    with pytest.raises(cf.ConfigError, match="tensor_dims: tp is none of ep"):
        cf.ExpertParallel("ep", tensor_dims="tp")


def refuse() -> None:
    """Errors before a step."""
    mesh = mesh_of((1, 2, 2), ("replica", "worker", "ep"))

    def pipeline(made: list[nn.Module], schedule: Schedule, parallelize: Any, **options: Any) -> None:
        cf.Pipeline(made, mean_loss, schedule, optimizer=adamw, mesh=mesh, parallelize=parallelize, **options)

    dapple, experts = cf.schemes.dapple(2, 3), cf.ExpertParallel("ep")
    with pytest.raises(cf.ConfigError, match=r"no dimension 'expert' after \(replica, worker\), but ep"):
        pipeline(layers(), dapple, cf.ExpertParallel("expert"))
    with pytest.raises(cf.ConfigError, match="found no experts in the model"):
        pipeline([nn.Linear(WIDTH, WIDTH, dtype=D) for _ in range(2)], dapple, experts)
    odd = layers()
    for layer in odd:
        layer.up = nn.Parameter(torch.randn(3, WIDTH, HIDDEN, dtype=D))
        layer.down = nn.Parameter(torch.randn(3, HIDDEN, WIDTH, dtype=D))
    with pytest.raises(cf.ConfigError, match="3 experts of Moe cannot be divided among 2 positions"):
        pipeline(odd, dapple, experts)
    tied = layers()
    tied[1].up, tied[3].up = tied[0].up, tied[2].up
    with pytest.raises(cf.ConfigError, match=r"\d\.up and \d\.up of stage \d are one weight, and"):
        pipeline(tied, dapple, experts, cuts=[2])
    with pytest.raises(cf.ConfigError, match="keeps several versions of its weights"):
        pipeline(layers(), cf.schemes.wpipe(2, 2), experts)
    with pytest.raises(cf.ConfigError, match="a TokenBalance moves its bias once an update"):
        pipeline(layers(balance=True), dapple, experts, barrier=False)


def four() -> None:
    """Two stages by two positions, and other meshes of four."""
    schemes, experts = cf.schemes, cf.ExpertParallel("ep")
    check(schemes.dapple(2, 3), experts)
    check(schemes.dapple(2, 3), fully_sharded, recompute="layer")
    check(schemes.zb_h1(2, 3), fully_sharded, loss=loss_sum)
    check(schemes.chimera(2, 2), experts, recompute="stage", balance=True)
    check(schemes.interleaved(2, 4, 2), fully_sharded, balance=True, recompute="layer")
    check(schemes.dapple(2, 4), experts, count=6, balance=True)  # a position has an empty micro-batch
    check(schemes.chimera(2, 4), fully_sharded, count=10, loss=loss_sum)
    check(schemes.dapple(1, 3), experts, replicas=2)
    both = {"shard": 2, "ep": 2}
    check(schemes.dapple(1, 3), cf.ExpertParallel("ep", fully_shard=("shard", "ep")), dims=both)
    check(schemes.dapple(1, 3), cf.ExpertParallel("ep", fully_shard="shard"), dims=both, count=8)
    same_tokens()
    resume()
    wrong_ways()
    refuse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(torch.distributed.get_rank()))
        four_processes = page("experts.md", 10)
    assert len(four_processes) == 3
