"""Divided stages of layers that were found by a recording: the user's model has their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import counterflow as cf
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.runtime.mesh.parallel import StageModule

D = torch.float64
SGD = partial(torch.optim.SGD, lr=0.1)


class Gated(nn.Module):
    """A block with two weights of its own, of which the forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=D)
        self.gate = nn.Parameter(torch.ones(4, dtype=D))
        self.unused = nn.Parameter(torch.ones(4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.gate * self.linear(x).tanh()
        return x + gated


class Scaled(nn.Module):
    """Blocks with a weight between them, used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((4,), 0.9, dtype=D))
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.scale * block(x)
        return x


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = nn.functional.mse_loss(output, target)
    return loss


def sharded(stage: StageModule, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(stage, mesh=mesh["shard"])


class Features(nn.Module):
    """A block whose features ``cf.TensorParallel`` divides."""

    tensor_parallel_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=D), nn.Linear(8, 4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return x + y


class Routed(nn.Module):
    """A block whose experts ``cf.ExpertParallel`` divides."""

    expert_parameters = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4, dtype=D)
        self.weight = nn.Parameter(torch.randn(4, 4, 4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        choices = scores.topk(2, -1).indices
        sent = cf.dispatch(x, choices, self.weight)
        outputs = cf.grouped_linear(sent.rows, self.weight, sent.counts)
        return x + cf.combine(sent, outputs, scores.gather(1, choices))


def model_of(*blocks: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for block in blocks))


def two() -> None:
    """Two positions: the user reads, freezes and changes the weights that the stages have."""
    with_shards, with_parts = (
        init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("replica", "worker", name))
        for name in ("shard", "part")
    )
    train(Scaled(), Scaled(), with_shards, sharded, _change)
    for kind, parallelize in (
        (Features, cf.TensorParallel("part")),
        (Routed, cf.ExpertParallel("part", fully_shard="part")),
    ):
        train(model_of(kind, kind), model_of(kind, kind), with_parts, parallelize, _halve_first)
    with pytest.raises(cf.ConfigError, match="found nothing to divide in the model"):
        train(Scaled(), Scaled(), with_parts, cf.TensorParallel("part"), _change)


def train(
    expected: nn.Module,
    model: nn.Module,
    mesh: DeviceMesh,
    parallelize: Any,
    change: Callable[[Any, int], None],
) -> None:
    """Compare steps of a model in stages with those of one process; the user changes both before each."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, 8, 4, dtype=D, generator=generator)
    options: dict[str, Any] = {"mesh": mesh, "parallelize": parallelize, "example": inputs[:4]}
    with cf.Pipeline(model, mean_loss, cf.schemes.dapple(1, 2), optimizer=SGD, **options) as pipeline:
        optimizer, data = SGD(expected.parameters()), pipeline.data
        for number in range(3):
            change(expected, number)
            change(model, number)
            loss = mean_loss(expected(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = pipeline.step(*(tensor.chunk(data.count)[data.number] for tensor in (inputs, targets)))
            assert step.loss == pytest.approx(loss.item(), rel=1e-12)
        divided = {name: weight for name, weight in model.named_parameters() if is_dtensor(weight)}
        assert divided
        # a DTensor of experts has those of a position alone
        for name, weight in divided.items() if not isinstance(parallelize, cf.ExpertParallel) else ():
            dtensor: Any = weight
            torch.testing.assert_close(dtensor.full_tensor().data, expected.get_parameter(name).data)
        torch.testing.assert_close(pipeline.model_state_dict(), dict(expected.state_dict()))


def _halve_first(model: nn.Module, number: int) -> None:
    if number:
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


def _change(model: Scaled, number: int) -> None:
    first, second = (block for block in model.blocks if isinstance(block, Gated))
    if number < 2:
        (first, second)[number].gate.requires_grad_(False)
    else:
        with torch.no_grad():
            for weight in (model.scale, second.gate, first.unused):
                weight.mul_(0.5)
