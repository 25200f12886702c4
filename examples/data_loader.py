"""Data that only the first and the last stage read: workers between them pass None to ``step``.

python examples/data_loader.py
torchrun --standalone --nproc-per-node 4 examples/data_loader.py
"""

import os
from functools import partial
from itertools import repeat

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import counterflow as cf


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take time to read; it counts how many were."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


def work() -> tuple[list[float], int]:
    """The losses of two epochs, and the number of samples that this worker read."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
    schedule = cf.schemes.dapple(workers=4, micro_batches=4)
    pipeline = cf.Pipeline(layers, nn.MSELoss(), schedule, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    samples = Samples()
    order = torch.Generator().manual_seed(1)  # the same order on all workers
    loader = DataLoader(samples, batch_size=32, shuffle=True, drop_last=True, generator=order)
    losses = []
    for _ in range(2):
        reads = pipeline.reads_inputs or pipeline.reads_targets
        batches = loader if reads else repeat((None, None), len(loader))
        losses += [pipeline.step(*batch).loss for batch in batches]
    return losses, samples.reads


if __name__ == "__main__":
    losses, reads = zip(*cf.launch(work, workers=4), strict=True)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, once
        print(f"loss {losses[0][0]:.3f} -> {losses[0][-1]:.3f}; samples read by each worker: {reads}")
