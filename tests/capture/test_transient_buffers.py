"""Buffers that are not in a model's state: in stages as in one process, and still not in the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf

from .kit import trained, trained_in_stages


class Masked(nn.Module):
    """A block with a table that its state does not contain, which it reads only or also changes."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(8, 8), writes
        self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean: Any = self.mean
        if self.writes:
            mean.mul_(0.5).add_(x.detach().mean(0))
        masked: Tensor = self.linear(x) @ self.mask
        return x + torch.tanh(masked) + mean  # type: ignore[no-any-return]


class Positions(nn.Module):
    """A model with a table that several layers read, one that none does, and a buffer in its state."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(), nn.Linear(8, 8)
        self.blocks.extend(kind() for _ in range(4))
        self.register_buffer("positions", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("unused", torch.ones(8), persistent=False)
        self.register_buffer("scale", torch.full((8,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * self.positions
        for block in self.blocks:
            x = block(x) + self.positions
        return self.head(x) * self.scale  # type: ignore[no-any-return]


SCHEME = "1f1b(workers=2, micro_batches=4)"


@pytest.mark.parametrize(
    ("writes", "scheme"),
    [
        (False, SCHEME),
        (False, "zb-v(workers=2, micro_batches=4)"),
        (False, "chimera(workers=2, micro_batches=4)"),
        (True, SCHEME),
        (True, "zb-v(workers=2, micro_batches=4)"),
    ],
)
def test_buffers_that_are_not_in_the_state(writes: bool, scheme: str) -> None:
    def make() -> nn.Module:
        return Positions(lambda: Masked(writes=writes))

    losses, state = trained_in_stages(make, scheme)
    expected_losses, expected = trained(make, 4)
    assert list(state) == list(expected)
    torch.testing.assert_close((losses, state), (expected_losses, expected), rtol=1e-11, atol=1e-13)


class ReadsAnother(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[0].mean  # type: ignore[operator]


def test_a_buffer_that_one_stage_changes_and_another_reads_is_refused() -> None:
    def make() -> nn.Module:
        return ReadsAnother(lambda: Masked(writes=True))

    with pytest.raises(cf.ConfigError, match=r"changes its buffer 'blocks_0\.mean' in a forward, and layer"):
        trained_in_stages(make, SCHEME)
