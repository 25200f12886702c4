"""Tensors in the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors in the states of an optimizer's weights, and those that belong to no weight."""
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, Mapping) else (state,)
        yield from (value for value in values if isinstance(value, Tensor))
