"""A model of one's own on four workers, with a checkpoint that the next start goes on from.

python examples/own_model.py
torchrun --standalone --nproc-per-node 4 examples/own_model.py
"""

import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

import counterflow as cf

CHECKPOINTS = Path("own-model")
STEPS = 30


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inside = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(self.norm(x))


class Model(nn.Module):
    """Any module will do that can list its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(6))
        self.head = nn.Linear(32, 10)

    def layers(self) -> list[nn.Module]:
        return [self.first, *self.blocks, self.head]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mini-batch number ``step``: the same on all workers of a replica."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(64, 16, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def work() -> list[float]:
    """What each worker does; gives the losses."""
    with torch.device("meta"):
        model = Model()  # each worker makes the weights of its own stages
    pipeline = cf.Pipeline(
        model,
        nn.CrossEntropyLoss(),
        cf.schemes.chimera(stages=4, micro_batches=4),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        list_layers=Model.layers,
        clip_norm=1.0,
    )
    first = cf.load_checkpoint(pipeline, CHECKPOINTS) if any(CHECKPOINTS.glob("step-*")) else 0
    losses = [pipeline.step(*batch(step)).loss for step in range(first, STEPS)]
    cf.save_checkpoint(pipeline, CHECKPOINTS)
    return losses


if __name__ == "__main__":
    losses = cf.launch(work, workers=4)[0]  # under torchrun this calls work() in each of its processes
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else f"all {STEPS} steps are made")
