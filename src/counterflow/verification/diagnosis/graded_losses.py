"""Losses of some samples with the gradients of the outputs, and their comparison with losses of parts.

Invariant: a loss is compared as it enters a mini-batch, as a sum with its weight; nothing that the loss
function reads, nor the model's buffers or random state, is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.common.tensors.graphs import has_reentrant_checkpoint

from .tolerances import GRADIENTS, LOSSES, SMALL

LOW_PRECISION = torch.float16, torch.bfloat16

JOINED_BYTES = 1 << 27
"""Bytes of outputs and targets of which a diagnosis makes no more copies than it has to."""

Gradients = Sequence[Tensor | None]


class WeightedLoss(Protocol):
    """A loss as it enters a mini-batch's: times ``by``, with the weight ``weight`` times ``by``."""

    @property
    def loss(self) -> Tensor | float:
        """Loss as it was returned."""

    @property
    def by(self) -> float:
        """Factor of the loss, its gradient and its weight."""

    @property
    def weight(self) -> Tensor | float:
        """Weight, divided by ``by``."""

    def sums_with(self, parts: Sequence[Self]) -> bool:
        """Return whether losses of parts have the same normaliser, so that they can be summed."""


ComputeLoss = Callable[[Any, Any, float, bool], tuple[Tensor, WeightedLoss]]
"""Function of output, target, number of samples and whether a graph is needed to the loss and its entry; it
leaves random state and buffers as they were, and raises ConfigError if the loss draws random numbers."""


@dataclass(frozen=True, slots=True)
class LossProbe:
    """The loss of the last stage, as a diagnosis computes it.

    Attributes:
        compute: computes the loss of some samples.
        weights: leaf weights, to whose gradients a function may add by itself.
        gather: the whole of a gradient that is sharded.
        backward: context of a backward, in which a checkpoint may draw random numbers again.
    """

    compute: ComputeLoss
    weights: Callable[[], Iterable[Tensor]]
    gather: Callable[[Tensor], Tensor]
    backward: Callable[[], AbstractContextManager[object]] = nullcontext

    def grade(
        self, output: Any, target: Any, samples: float, leaves: Sequence[Tensor], graph: bool | None = None
    ) -> Graded:
        """Compute a loss of some samples, and the gradients of leaves.

        Args:
            output: computed from the leaves, in memory of its own.
            target: target in memory of its own.
            samples: number of samples, or positions.
            leaves: tensors whose gradients are computed.
            graph: whether the loss has a graph; None: if there are leaves.

        Raises:
            ConfigError: the loss draws random numbers, or is no loss.
        """
        loss, entry = self.compute(output, target, samples, bool(leaves) if graph is None else graph)
        gradients: Gradients = [None] * len(leaves)
        if leaves and loss.requires_grad:
            with _separate_gradients(self.weights()), self.backward(), torch.enable_grad():
                seed = torch.full_like(loss, entry.by)
                gradients = _gradients(loss, leaves, seed)
            gradients = [None if gradient is None else self.gather(gradient) for gradient in gradients]
        return Graded(entry, gradients, [gradient_tolerance(leaf, loss) for leaf in leaves])


class Graded(NamedTuple):
    """A loss and its gradients.

    Attributes:
        entry: the loss as it enters the mini-batch's.
        gradients: gradients of the leaves, of the loss as it enters; empty if none are computed.
        tolerances: relative differences of gradients that are rounding, by leaf.
        value_tolerance: the same of the loss; None: determined by its dtype.
    """

    entry: WeightedLoss
    gradients: Gradients
    tolerances: Sequence[float]
    value_tolerance: float | None = None

    @property
    def sum(self) -> float:
        """Loss as it is added to the mini-batch's."""
        return float(self.entry.loss) * self.entry.by

    @property
    def weight(self) -> float:
        """Weight of the loss in the mini-batch's."""
        return float(self.entry.weight) * self.entry.by


class LossComparison(NamedTuple):
    """Outcome of the comparison of a loss with those of its parts.

    Attributes:
        decided: whether it shows anything.
        finite: whether all numbers are finite, without which nothing is shown.
        value: expected loss, and the loss of its parts, if these differ.
        gradient: relative difference of the gradients, if these differ and the values do not.
    """

    decided: bool
    finite: bool = True
    value: tuple[float, float] | None = None
    gradient: float | None = None


UNDECIDED, FITS = LossComparison(decided=False), LossComparison(decided=True)
_NON_FINITE = LossComparison(decided=False, finite=False)


class Joined(NamedTuple):
    """Losses of the parts of some samples, and the gradients of the same leaves that they give together."""

    losses: Sequence[Graded]
    gradients: Gradients


def joined(parts: Sequence[Graded]) -> Joined:
    """Losses of parts whose gradients are of the same leaves."""
    return Joined(parts, [_total(gradients) for gradients in zip(*(p.gradients for p in parts), strict=True)])


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return sum(present[1:], present[0]) if present else None


def leaves_of(output: Any) -> list[Tensor]:
    """The tensors of an output that have gradients."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def as_leaves(output: Any, *, always: bool = False) -> Any:
    """An output whose tensors are leaves, with a gradient where training needs one, or ``always``."""
    graph = torch.is_grad_enabled() and not always  # a forward that is recomputed has no graph

    def leaf(tensor: Tensor) -> Tensor:
        real = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(real and (tensor.requires_grad or not graph))

    return pytree.tree_map_only(Tensor, leaf, output)


def copied(tensor: Tensor) -> Tensor:
    """A leaf of its own with the same content."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _gradients(loss: Tensor, leaves: Sequence[Tensor], seed: Tensor) -> Gradients:
    if not has_reentrant_checkpoint([loss]):
        return torch.autograd.grad(loss, leaves, seed, allow_unused=True)
    torch.autograd.backward(loss, seed)
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:  # parts of the samples run with the same leaves
        leaf.grad = None
    return gradients


@contextmanager
def _separate_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    weights = [weight for weight in parameters if weight.is_leaf]  # a cast one has no gradient
    gradients = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None  # a function may add to it by itself
        yield
    finally:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def compare_losses(total: Graded, parts: Joined) -> LossComparison:
    """Compare a loss with those of the parts of its samples, each weighted as in the mini-batch."""
    graded = [total, *parts.losses]
    if not total.entry.sums_with([part.entry for part in parts.losses]):
        return UNDECIDED  # normalisers of micro-batches are compared when all are known
    sums, weights = [loss.sum for loss in graded], [loss.weight for loss in graded]
    part_weights = sum(weights[1:])
    if not (min(weights) >= 0 and weights[0] > 0 and part_weights > 0 and math.isfinite(sums[0])):
        return UNDECIDED  # the step reports a loss that is not finite
    expected, got = sums[0] / weights[0], sum(sums[1:]) / part_weights
    largest = max(abs(s / w) for s, w in zip(sums, weights, strict=True) if w)
    norms = [
        _norms(of_whole, of_parts, weights[0], part_weights)
        for of_whole, of_parts in zip(total.gradients, parts.gradients, strict=True)
    ]
    if not math.isfinite(sum(sums)) or not math.isfinite(sum(map(sum, norms))):
        return _NON_FINITE
    limit = total.value_tolerance
    if limit is None:
        limit = LOSSES.of(cast("Tensor", total.entry.loss).dtype)
    if abs(expected - got) > limit * largest:
        return LossComparison(decided=True, value=(expected, got))
    most = max((norm for norm, _ in norms), default=0.0)
    for limit, (norm, difference) in zip(total.tolerances, norms, strict=True):
        if difference > limit * (norm + SMALL * most):
            return LossComparison(decided=True, gradient=difference / norm if norm else 1.0)
    return FITS if largest or most else UNDECIDED


def _norms(
    of_whole: Tensor | None, of_parts: Tensor | None, weight: float, part_weights: float
) -> tuple[float, float]:
    """The larger norm of two gradients, each divided by its weight, and the norm of their difference."""
    pair = [
        gradient.detach() / by
        for gradient, by in ((of_whole, weight), (of_parts, part_weights))
        if gradient is not None
    ]
    norms = [_norm(gradient) for gradient in pair]
    if len(pair) < 2:
        return max(norms, default=0.0), max(norms, default=0.0)
    return max(norms), _norm(pair[0] - pair[1])


def _norm(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def gradient_tolerance(leaf: Tensor, loss: Tensor) -> float:
    """Relative difference of a leaf's gradients that is rounding."""
    device = leaf.device.type
    dtypes = {(leaf.real if leaf.is_complex() else leaf).dtype, loss.dtype}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    limit = GRADIENTS.of(*dtypes)
    return limit if device == "cpu" else 2 * limit  # products of float32 may have fewer bits there


def in_float32(tree: Any) -> Any | None:
    """A tree with float32 in place of lower precision; None if it has none, or is large."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    low = [leaf for leaf in leaves if leaf.dtype in LOW_PRECISION]
    if not low or sum(leaf.nbytes for leaf in low) > JOINED_BYTES:
        return None

    def lift(tensor: Tensor) -> Tensor:
        if tensor.dtype not in LOW_PRECISION:
            return tensor
        lifted = tensor.float()
        of: SliceOf | None = getattr(tensor, SLICE, None)
        if of is not None:
            setattr(lifted, SLICE, of._replace(target=of.target.float()))
        return lifted

    return pytree.tree_map_only(Tensor, lift, tree)
