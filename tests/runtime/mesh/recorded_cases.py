"""Sharded stages of layers that were found by a recording: the user's model has their weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import counterflow as cf
from counterflow.runtime.mesh.parallel import StageModule

D = torch.float64
SGD = partial(torch.optim.SGD, lr=0.5)


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


def places() -> None:
    """The user reads, freezes and changes the weights that the stages have."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, 8, 4, dtype=D, generator=generator)
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replica", "worker", "shard"))
    expected, model = Scaled(), Scaled()
    options: dict[str, Any] = {"mesh": mesh, "parallelize": sharded, "example": inputs[:4]}
    with cf.Pipeline(model, mean_loss, cf.schemes.dapple(1, 2), optimizer=SGD, **options) as pipeline:
        optimizer = SGD(expected.parameters())
        for number in range(3):
            for user in (expected, model):
                _change(user, number)
            loss = mean_loss(expected(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert abs(pipeline.step(inputs, targets).loss - loss.item()) < 1e-12
            for name, weight in model.named_parameters():
                sharded_weight: Any = weight
                torch.testing.assert_close(sharded_weight.full_tensor(), expected.get_parameter(name).data)
        state = pipeline.model_state_dict()
        torch.testing.assert_close(state, dict(expected.state_dict()))


def _change(model: Scaled, number: int) -> None:
    first, second = (block for block in model.blocks if isinstance(block, Gated))
    if number < 2:
        (first, second)[number].gate.requires_grad_(False)
    else:
        with torch.no_grad():
            for weight in (model.scale, second.gate, first.unused):
                weight.mul_(0.5)
