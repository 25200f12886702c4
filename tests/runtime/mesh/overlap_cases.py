"""All-to-alls of experts beside the compute of other micro-batches: run by four processes.

Numbers with overlap are those without it, to the last bit.
"""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import counterflow as cf
from counterflow.api.turns import Turns, has_turns
from counterflow.runtime.mesh.parallel import StageModule
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.schedule.ir import Schedule

mesh_of = runpy.run_path(str(Path(__file__).with_name("cases.py")))["mesh_of"]
WIDTH, HIDDEN, EXPERTS, SEQUENCE = 4, 6, 4, 3


class Experts(nn.Module):
    """Experts between random draws, with a loss, hooks, a counter and, on request, a checkpoint."""

    expert_parameters = ("up", "down")

    def __init__(self, *, checkpointed: bool, balanced: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)
        self.balance = cf.TokenBalance(EXPERTS, rate=0.05) if balanced else None
        self.checkpointed = checkpointed
        self.seen: list[tuple[str, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed and self.training:
            again: Tensor = checkpoint(self.experts, x, use_reentrant=False)
            return again
        return self.experts(x)

    def experts(self, x: Tensor) -> Tensor:
        tokens = functional.dropout(functional.layer_norm(x, (WIDTH,)), 0.2, self.training).flatten(0, -2)
        if tokens.requires_grad:
            tokens.register_hook(lambda gradient: self.note("backward", gradient))
        scores = self.router(tokens).sigmoid()
        choices = scores.topk(2).indices if self.balance is None else self.balance(scores, 2)
        weights = scores.gather(1, choices)
        sent = cf.dispatch(tokens, choices, self.up)
        hidden = functional.dropout(cf.grouped_linear(sent.rows, self.up, sent.counts), 0.2, self.training)
        outputs = cf.grouped_linear(functional.gelu(hidden), self.down, sent.counts)
        added = functional.dropout(cf.combine(sent, outputs, weights), 0.2, self.training)
        cf.add_loss(0.01 * scores.square().sum() / max(1, scores.numel()), "router")
        self.note("forward", added)
        output: Tensor = x + added.view_as(x)
        return output

    def note(self, what: str, tensor: Tensor) -> None:
        if torch.is_grad_enabled() or what == "backward":
            self.seen.append((what, hash(tuple(tensor.detach().flatten().tolist()))))


def layers(*, checkpointed: bool = False, balanced: bool = True) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Experts(checkpointed=checkpointed, balanced=balanced) for _ in range(4)]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).mean(dim=1).mean()


def fully_sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    cf.ExpertParallel("ep", fully_shard="ep")(stage, mesh)


def steps(schedule: Schedule, *, count: int = 14, overlap: bool, **options: Any) -> tuple[Any, int]:
    """Losses, norms, metrics and states of three steps, what layers saw, and the number of turns."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(count, SEQUENCE, WIDTH, generator=generator) for _ in range(2))
    barrier = options.get("barrier", True)
    made = layers(checkpointed=options.pop("checkpointed", False), balanced=barrier)
    turns = 0
    plain = Turns.switch

    def switch(self: Turns) -> None:
        nonlocal turns
        turns += 1
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "switch", switch)
        pipeline = cf.Pipeline(
            made,
            mean_loss,
            schedule,
            optimizer=partial(torch.optim.AdamW, lr=0.05),
            mesh=mesh_of((1, 2, 2), ("replica", "worker", "ep")),
            clip_norm=0.1,
            overlap_experts=overlap,
            **options,
        )
        mine = [tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in (inputs, targets)]
        numbers: list[Any] = []
        for _ in range(3):
            step = pipeline.step(*mine)
            evaluated = pipeline.evaluate(*mine).loss if barrier else None
            numbers.append((step.loss, step.grad_norm, dict(step.metrics), evaluated))
        numbers += [(step.loss, step.grad_norm) for step in pipeline.flush()]
        state = pipeline.state_dict()
        seen = [layer.seen for layer in made if isinstance(layer, Experts)]
        pipeline.close()
    return (repr(numbers), state, seen), turns


def check(schedule: Schedule, *, pairs: bool = True, **options: Any) -> None:
    """A run with overlap equals one without, and has turns where the second step has pairs."""
    (numbers, state, seen), none = steps(schedule, overlap=False, **options)
    (overlapped, its_state, its_seen), turns = steps(schedule, overlap=True, **options)
    assert none == 0
    assert bool(turns) is pairs
    assert overlapped == numbers
    torch.testing.assert_close(its_state["model"], state["model"], rtol=0, atol=0)
    for name, saved in state["optimizer"].items():
        torch.testing.assert_close(its_state["optimizer"][name]["state"], saved["state"], rtol=0, atol=0)
    assert any(seen)
    assert its_seen == seen


def without_generators() -> None:
    """Draws continue those of the other op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomStreams, "restore", lambda *_: None)
        check(cf.schemes.dualpipe_v(2, 6), parallelize=cf.ExpertParallel("ep"), recompute="layer")


class Failing(nn.Module):
    """Fails in its first forward or backward in a pair."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if self.what == "backward" and output.requires_grad:
            output.register_hook(fail_in_pair)
        if self.what == "forward":
            fail_in_pair(output)
        return output


def fail_in_pair(tensor: Tensor) -> None:
    del tensor
    if has_turns():
        raise ArithmeticError("no experts today")


def fail(what: str) -> None:
    """Fail in the pairs of stage 1."""
    torch.manual_seed(3)
    pipeline = cf.Pipeline(
        [Experts(checkpointed=False), Failing(what), *(Experts(checkpointed=False) for _ in range(2))],
        mean_loss,
        cf.schemes.dualpipe_v(2, 6),
        optimizer=partial(torch.optim.AdamW, lr=0.05),
        mesh=mesh_of((1, 2, 2), ("replica", "worker", "ep")),
        parallelize=cf.ExpertParallel("ep"),
        overlap_experts=True,
    )
    inputs = torch.randn(6, SEQUENCE, WIDTH)
    for _ in range(2):
        pipeline.step(inputs, inputs)


def fail_forward() -> None:
    fail("forward")


def fail_backward() -> None:
    fail("backward")


def four() -> None:
    schemes, experts = cf.schemes, cf.ExpertParallel("ep")
    dualpipe_v, dualpipe, interleaved = (
        schemes.dualpipe_v(2, 6),
        schemes.dualpipe(2, 6),
        schemes.interleaved(2, 6, 2),
    )
    for recompute in ("none", "layer", "stage"):
        check(dualpipe_v, parallelize=experts, recompute=recompute)
        check(dualpipe, parallelize=fully_sharded, recompute=recompute)
    check(interleaved, parallelize=experts)
    check(dualpipe_v, parallelize=fully_sharded, checkpointed=True)
    check(dualpipe, parallelize=experts, barrier=False)
    check(dualpipe_v, parallelize=experts, count=9)  # positions have other numbers of empty micro-batches
    refuse()


def refuse() -> None:
    """Errors before a step, and at one."""
    mesh = mesh_of((1, 2, 2), ("replica", "worker", "ep"))

    def pipeline(schedule: Schedule, **options: Any) -> cf.Pipeline:
        return cf.Pipeline(
            layers(), mean_loss, schedule, optimizer=torch.optim.AdamW, mesh=mesh,
            parallelize=cf.ExpertParallel("ep"), overlap_experts=True, **options,
        )  # fmt: skip

    schemes = cf.schemes
    with pytest.raises(cf.ConfigError, match=r"overlap_experts: zb-v.* has no forward next to a backward"):
        pipeline(schemes.zb_v(2, 6))
    with pytest.raises(cf.ConfigError, match="overlap_experts: pipedream is asynchronous"):
        pipeline(schemes.pipedream(2))
    with pytest.raises(cf.ConfigError, match="overlap_experts: autocast has one cache"):
        pipeline(schemes.dualpipe_v(2, 6), autocast="bfloat16")
    with pytest.raises(cf.ConfigError, match="overlap_experts: a compiled stage cannot be interrupted"):
        pipeline(schemes.dualpipe_v(2, 6), compile=True)
    inputs = torch.randn(6, SEQUENCE, WIDTH)
    with torch.device("cpu"), pytest.raises(cf.ConfigError, match="DeviceContext is on around the step"):
        pipeline(schemes.dualpipe_v(2, 6)).step(inputs, inputs)
