"""Check that the losses of slices add up to the whole sequence's loss, in the first mini-batch of a kind.

A slice's loss is compared with the losses of its two halves, each weighted as in the mini-batch: their
weights, their sums, and the gradient of every element of the output. So the check finds a loss that shifts
its targets within the slice, or normalises by the slice.

The check cannot decide about a loss that draws random numbers or that the last layer computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.errors import ConfigError

from ..messages.values import Unit
from .loss_check import FirstOfKind
from .losses import LossFunction, elements_in
from .samples import Dims, cut, samples_in

if TYPE_CHECKING:
    from ..stages.stage import LocalStage

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Numbers that are apart by less, relative to the largest, differ by rounding; of other dtypes by 6 %."""


class _Graded(NamedTuple):
    """A loss as it enters the mini-batch's, what it weighs, and the gradients of the output's tensors."""

    sum: float
    weight: float
    gradients: list[Tensor]


class PositionChecks:
    """Checks of one pipeline's losses of slices.

    Args:
        output_dims: dimensions of the positions in the outputs.
        target_dims: dimensions of the positions in the targets.
    """

    def __init__(self, output_dims: Dims, target_dims: Dims) -> None:
        self._dims = output_dims, target_dims
        self._first = FirstOfKind()

    def of(self, kind: int) -> PositionCheck | None:
        """What looks at a mini-batch's loss; None: another one of the kind was looked at."""
        return PositionCheck(*self._dims) if self._first(kind) else None


class PositionCheck:
    """Check of one mini-batch on one worker; arguments as for ``PositionChecks``."""

    of_positions = True

    def __init__(self, output_dims: Dims, target_dims: Dims) -> None:
        self._output_dims, self._target_dims = output_dims, target_dims

    def begin(
        self, copy: LocalStage, function: LossFunction, output: Any, target: Any, positions: int
    ) -> None:
        """Begin the check before a slice's loss is computed.

        Raises:
            ConfigError: the losses of its halves do not add up to the slice's, or the check cannot decide.
        """
        if positions == 1:
            return
        if samples_in(output, self._output_dims, "outputs", uncut=True) != positions:
            raise ConfigError(
                f"the last layer gives outputs without the {positions} positions of a slice, where "
                f"target_sequence_dims={self._target_dims!r} says; say where they are, or take no slices"
            )
        half = positions // 2
        whole, one, other = (
            _graded(copy, function, *self._part(output, target, rows))
            for rows in (slice(0, positions), slice(0, half), slice(half, positions))
        )
        dim = self._output_dims
        gradients = [torch.cat(pair, dim) for pair in zip(one.gradients, other.gradients, strict=True)]
        pairs = list(zip(whole.gradients, gradients, strict=True))
        fits = _near(whole.weight, one.weight + other.weight, 1e-9) and all(_close(a, b) for a, b in pairs)
        rounding = 1e-6 if all(a.dtype is torch.float64 for a, _ in pairs) else 1e-2
        if not fits or not _near(whole.sum, one.sum + other.sum, rounding):
            raise ConfigError(
                f"the loss is no mean over positions: that of {positions} of a slice is not what their "
                "halves make, so the losses of slices do not make one process's. Let the function return a "
                "cf.LossSum: a sum, and what it is to be divided by; shift targets with cf.next_target, and "
                "divide by what counts in cf.whole_target"
            )

    @staticmethod
    def end() -> None:
        """Do nothing: each slice is checked on its own."""

    finish = end

    def _part(self, output: Any, target: Any, rows: slice) -> tuple[Any, Any, int]:
        """Some positions, in memory of their own."""
        found = pytree.tree_map_only(Tensor, _leaf, cut(output, rows, self._output_dims))
        its = pytree.tree_map_only(Tensor, torch.clone, cut(target, rows, self._target_dims))
        for own, given in zip(pytree.tree_leaves(its), pytree.tree_leaves(target), strict=False):
            of: SliceOf | None = getattr(given, SLICE, None)
            if of is not None:
                setattr(own, SLICE, of._replace(start=of.start + rows.start))
        return found, its, rows.stop - rows.start


def _graded(copy: LocalStage, function: LossFunction, output: Any, target: Any, positions: int) -> _Graded:
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    size = elements_in(output)
    found = copy.loss_apart(function, output, target, positions, graph=True)
    entry = found.as_unit_loss(Unit(0), positions, 1.0, size)
    with torch.enable_grad():
        made = torch.autograd.grad(found.loss * entry.by, leaves, allow_unused=True)
    gradients = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, made, strict=True)
    ]
    return _Graded(float(found.loss.detach()) * entry.by, float(entry.weight) * entry.by, gradients)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _near(one: float, other: float, rounding: float) -> bool:
    return not abs(one - other) > rounding * abs(one)  # also of what is not finite


def _close(one: Tensor, other: Tensor) -> bool:
    rounding = _ROUNDING.get(one.dtype, 6e-2)
    return not bool((one - other).abs().max() > rounding * one.abs().max())
