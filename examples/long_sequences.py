"""Sequences that do not fit: micro-batches in slices, with layers that leave a state to the next slice.

    python examples/long_sequences.py

Three layers look at earlier positions: attention by ``cf.attend``, an LSTM, and a layer of its own. Each has
a ``cf.Carry``. The model is trained in eight slices, and compared with one process; then its memory is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import counterflow as cf

VOCABULARY, HIDDEN, HEADS, TOKENS = 64, 32, 4, 512


class Attention(nn.Module):
    """Causal attention; keys and values of earlier slices come by the carry."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = cf.attend(self.carry, *heads)
        found: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return found


class Recurrent(nn.Module):
    """An LSTM; its state goes to the next slice."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        found, state = self.lstm(x, self.carry.take())
        self.carry.leave(state)
        summed: Tensor = x + found
        return summed


class MeanSoFar(nn.Module):
    """Adds to each position a map of the mean of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        total, count = self.carry.take((0, 0))
        sums = total + x.cumsum(1)
        counts = torch.arange(count + 1, count + 1 + x.shape[1], dtype=x.dtype, device=x.device)
        self.carry.leave((sums[:, -1:], count + x.shape[1]))
        found: Tensor = x + self.linear(sums / counts[:, None])
        return found


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    own = [Attention(), Recurrent(), Attention(), MeanSoFar()]
    return [nn.Embedding(VOCABULARY, HIDDEN), *own, nn.Linear(HIDDEN, VOCABULARY)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def saved(slices: int) -> int:
    """The bytes that the first worker saves for backward at most."""
    schedule = cf.schemes.dapple(stages=2, micro_batches=4, slices=slices)
    pipeline = cf.Pipeline(layers(), loss, schedule, optimizer=sgd, cuts=[3])
    pipeline.step(*batch())
    return pipeline.peak_saved_bytes


def main() -> None:
    schedule = cf.schemes.dapple(stages=2, micro_batches=4, slices=8)
    double = [layer.double() for layer in layers()]
    found = cf.verify(
        schedule, layers=double, loss_function=loss, batches=[[batch()]], optimizer=sgd, transport="local"
    )
    print(f"as one process: {found.ok}")
    whole, sliced = (max(cf.launch(saved, slices, workers=2, transport="local")) for slices in (1, 8))
    print(f"saved: {whole / 1e6:.2f} MB whole, {sliced / 1e6:.2f} MB in 8 slices")


if __name__ == "__main__":
    main()
