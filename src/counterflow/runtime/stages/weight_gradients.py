"""Weight gradients that a split backward has left, and how they are accumulated.

Autograd is entered where the backward stopped, for the weights alone. For a matrix product, as of
``nn.Linear``, that is not needed: its node has saved the rows x that it multiplied, and with the gradient dy
of its output the weight's gradient is dyᵀ x and the bias's the sum of the rows of dy. One call adds it into
the gradient that exists, where autograd makes a new one and adds that.

Invariant: the sums are those of autograd, up to the rounding of one addition per element and micro-batch. A
weight that autograd would treat in another way (hooks, subclasses, a gradient of another type) is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from counterflow.common.tensors.graphs import product_rows
from counterflow.common.tensors.torch_private import has_hooks, hooks_of, run_backward

_PLAIN = frozenset((Tensor, nn.Parameter))


class PendingGradients:
    """Weight gradients that are left.

    Attributes:
        gradients: tensors that they are made of.
    """

    __slots__ = ()
    gradients: Sequence[Any]

    def accumulate(self, *, direct: bool) -> None:
        """Add the gradients to those of the weights; without gradient mode.

        Args:
            direct: as of the function `accumulate`.
        """
        raise NotImplementedError


class PendingWeightGradients(PendingGradients):
    """Backward of autograd that is left for weight gradients.

    Args:
        edges: edges where it begins.
        gradients: gradients of ``edges``; empty: the edge is of a loss.
        weights: weights whose gradients it makes; None: all.
    """

    __slots__ = ("edges", "gradients", "weights")

    def __init__(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        weights: Sequence[Tensor] | None,
    ) -> None:
        self.edges, self.gradients, self.weights = edges, gradients, weights

    @override
    def accumulate(self, *, direct: bool) -> None:
        accumulate(self.edges, self.gradients, into=self.weights, direct=direct)


class PendingProduct(PendingWeightGradients):
    """Matrix product of rows and a transposed weight whose weight gradients are left.

    Its node is the only edge's. ``weights`` are the weight, of shape (outputs, inputs), and a bias of shape
    (outputs,) or none.
    """

    __slots__ = ()

    @override
    def accumulate(self, *, direct: bool) -> None:
        (gradient,), leaves = self.gradients, self.weights or ()
        totals = [total for leaf in leaves if (total := _plain_total(leaf, gradient)) is not None]
        fit = len(totals) == len(leaves) and all(b.shape == gradient.shape[1:] for b in leaves[1:])
        rows = product_rows(self.edges[0].node) if fit else None
        if rows is None:
            super().accumulate(direct=direct)
            return
        if gradient.requires_grad:  # a message's memory may have been an output's
            gradient = gradient.detach()
        totals[0].addmm_(gradient.t(), rows.detach())
        for bias in totals[1:]:
            bias.add_(gradient.sum(0))


def _plain_total(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Return the gradient that a weight has, if autograd would add to it, and do no more."""
    total = weight.grad
    plain = (
        type(total) is Tensor
        and type(weight) in _PLAIN
        and type(gradient) is Tensor
        and weight.dtype is gradient.dtype is total.dtype
        and not total.requires_grad
        and not has_hooks(weight)
    )
    return total if plain else None


def accumulate(
    edges: Sequence[Any],
    gradients: Sequence[Tensor],
    *,
    into: Sequence[Tensor] | None,
    direct: bool,
) -> None:
    """Run a backward that accumulates the gradients of some leaves, or of all.

    Args:
        edges: edges where it begins.
        gradients: gradients of ``edges``; empty: the edge is of a loss.
        into: the leaves; None: all.
        direct: True to skip ``torch.autograd.backward``'s checks, for gradients that have the outputs'
            shapes: the checks take as long in Python as all else that an op costs here, and the engine has
            its own. For the CPU only, where the graph runs in this thread and no context has to be carried
            into another.
    """
    if not direct or not gradients:
        torch.autograd.backward(edges, gradients or None, inputs=into)
    else:
        run_backward(
            tuple(edges), tuple(gradients), False, False, tuple(into or ()), allow_unreachable=True,
            accumulate_grad=True,
        )  # fmt: skip


def add_gradient(weight: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient to that of a weight, and call the hooks that follow."""
    if gradient is None:
        return
    if weight.grad is None:
        # It may be another tensor's memory.
        weight.grad = gradient.to(weight.grad_dtype or gradient.dtype, copy=True)
    else:
        weight.grad.add_(gradient)
    for hook in hooks_of(weight)[1]:
        hook(weight)
