"""What tests run as real processes: a step that fails, and under torchrun: jobs.py FOLDER.

Every worker leaves a file ``pid-<its pid>`` in FOLDER, so that the test sees whether it is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import counterflow as cf
from counterflow.runtime.workers.world import current_transport


class Trouble(nn.Linear):
    """In its third forward it does what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind = kind
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 3:
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "sleep":
                time.sleep(600)
            if self.kind == "raise":
                raise ValueError("three is too many")
        return super().forward(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).flatten(1).mean(dim=1).mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def step(kind: str, folder: str) -> None:
    """Worker 2 of a chimera has the translate_error; three steps."""
    (Path(folder) / f"pid-{os.getpid()}").touch()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[2] = Trouble(kind)
    schedule = cf.schemes.dapple(stages=4, micro_batches=4)
    pipeline = cf.Pipeline(layers, loss, schedule, optimizer=sgd, timeout_seconds=3)
    for _ in range(3):
        pipeline.step(torch.ones(8, 4), torch.zeros(8, 4))


def mesh(folder: str) -> None:
    """Replicas of two workers, placed by a DeviceMesh across the ranks' order."""
    (Path(folder) / f"pid-{os.getpid()}").touch()
    if not torch.distributed.is_initialized():  # under torchrun
        torch.distributed.init_process_group("gloo")
    ranks = [[0, 2], [1, 3]] if torch.distributed.get_world_size() == 4 else [[1, 0]]
    device_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replica", "worker"))
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    schedule = cf.schemes.chimera(stages=2, micro_batches=2)
    pipeline = cf.Pipeline(layers, loss, schedule, optimizer=sgd, mesh=device_mesh)
    rank = torch.distributed.get_rank()
    assert ranks[pipeline.replica][pipeline.worker] == rank
    inputs = torch.arange(32.0).view(8, 4) / 32
    mine = inputs.chunk(len(ranks))[pipeline.replica]
    found = pipeline.step(mine, -mine)
    state = pipeline.model_state_dict()
    model = nn.Sequential(*[nn.Linear(4, 4), nn.Linear(4, 4)])
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()  # type: ignore[operator]
    optimizer = sgd(list(model.parameters()))
    expected = loss(model(inputs), -inputs)
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(torch.tensor(found.loss), expected.detach())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor)
    if rank == 0:
        print("the mesh trains as one process does")


def rank_squared(factor: int) -> int:
    """A result of each worker."""
    return factor * current_transport().rank * current_transport().rank


if __name__ == "__main__":
    mesh(sys.argv[1])
    print("all results:", cf.launch(rank_squared, 3, workers=2))
