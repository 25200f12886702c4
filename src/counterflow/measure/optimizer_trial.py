"""Facts of an optimizer that it shows on small weights of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from counterflow.common.tensors.optimizer_state import state_tensors
from counterflow.runtime.parameters.optimizers import MakeOptimizer, Parameters

from .stages.allocations import allocated

_SHAPE = 64, 64
"""Shape of the weights that are updated."""


def trial_optimizer(
    make: MakeOptimizer,
    *,
    weights: int = 1,
    shape: tuple[int, ...] = (1, 1),
    device: torch.device | str = "cpu",
) -> Optimizer:
    """An optimizer of small weights, which have gradients.

    Args:
        make: makes optimizers of parameters.
        weights: number of weights.
        shape: shape of each.
        device: their device.
    """
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for _ in range(weights)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return make(Parameters([(f"weight{n}", parameter) for n, parameter in enumerate(parameters)]))


def optimizer_name(make: MakeOptimizer) -> str:
    """Class of an optimizer."""
    return type(trial_optimizer(make)).__name__


def states_per_byte(make: MakeOptimizer) -> float:
    """Bytes of an optimizer's states per byte of a weight."""
    optimizer = trial_optimizer(make, shape=_SHAPE)
    optimizer.step()
    weights: list[nn.Parameter] = [weight for group in optimizer.param_groups for weight in group["params"]]
    return sum(x.nbytes for x in state_tensors(optimizer) if x.dim()) / sum(
        weight.nbytes for weight in weights
    )


def updates_together(make: MakeOptimizer, device: torch.device) -> bool:
    """True if an optimizer updates weights at once, so their memory adds up."""

    def peak(weights: int) -> int:
        optimizer = trial_optimizer(make, weights=weights, shape=_SHAPE, device=device)
        optimizer.step()  # makes the states
        with allocated(device) as update:
            optimizer.step()
        return update.peak

    return 2 * peak(2) > 3 * peak(1)
