"""A stage whose ops are emulated: a forward and both halves of its backward are calls of one function.

What goes on from a half is a single number, so a half costs nothing but the call. The halves are two nodes of
autograd's graph, which a split backward runs apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operation = Callable[[], object]
"""What takes an op's time, for example a sleep."""


class Half(torch.autograd.Function):
    """Half of a backward: the gradient of an input or of the weight."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, operation: Operation) -> Tensor:
        ctx.operation, ctx.shape = operation, of.shape
        return of.new_zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.operation()
        return gradients[0].new_zeros(ctx.shape), None


class Output(torch.autograd.Function):
    """A forward."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, shape: torch.Size, operation: Operation) -> Tensor:
        operation()
        return product.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].new_ones(1, 1), None, None


def emulated_stage(value: Tensor, weight: Tensor, operation: Operation) -> Tensor:
    """The output of a stage, of the shape of ``value``; each of its three ops calls ``operation`` once.

    Args:
        value: the stage's input.
        weight: its parameter ``[n, 1]``.
        operation: what takes an op's time.
    """
    hidden: Tensor = Half.apply(value, operation)  # type: ignore[no-untyped-call]
    product: Tensor = Half.apply(weight, operation)  # type: ignore[no-untyped-call]
    output: Tensor = Output.apply(hidden @ product, value.shape, operation)  # type: ignore[no-untyped-call]
    return output
