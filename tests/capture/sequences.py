"""Runs of layers on slices of a sequence, without stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.carry import NOTHING
from counterflow.runtime.stages.carrying import carries_in


def of_call(inputs: Any) -> dict[str, Any]:
    """Inputs by name, of which a tensor is the first one."""
    return dict(inputs) if isinstance(inputs, Mapping) else {"ids": inputs}


def in_slices(layers: Sequence[nn.Module], inputs: Any, lengths: Sequence[int]) -> list[Any]:
    """Outputs of slices, each of which begins with the states that the one before left.

    Args:
        layers: layers with carries.
        inputs: tensors of the whole sequence, with the positions in their second dimension.
        lengths: positions of each slice.
    """
    states = [[NOTHING] * len(carries_in(layer)) for layer in layers]
    outputs, start = [], 0
    for layer in layers:
        for carry in carries_in(layer):
            carry.expect_slices(expected=True)
    for length in lengths:
        value = pytree.tree_map_only(Tensor, lambda tensor: tensor[:, start : start + length], inputs)  # noqa: B023
        for number, layer in enumerate(layers):
            carries = carries_in(layer)
            for carry, state in zip(carries, states[number], strict=True):
                carry.begin(state)
            value = layer(value)
            states[number] = [carry.end() for carry in carries]
        outputs.append(value)
        start += length
    return outputs


def compare(model: nn.Module, expected: Tensor, got: Tensor, *, tolerance: float) -> None:
    """Compare outputs, and the gradients of the model's weights that they give."""
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    direction = torch.rand(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected.dtype)
    gradients = [
        torch.autograd.grad((output * direction).sum(), weights, allow_unused=True)
        for output in (expected, got)
    ]
    for gradient, of_slices in zip(*gradients, strict=True):
        assert (gradient is None) == (of_slices is None)
        if gradient is not None:
            limit = tolerance * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(of_slices, gradient, rtol=0, atol=limit)
