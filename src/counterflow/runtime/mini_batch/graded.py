"""Losses of some samples with the gradients of the outputs, and their comparison with the losses of parts.

Invariant: a loss is compared as it would enter a mini-batch, as a sum with its weight; nothing of what the
loss function is given, nor the model's buffers or random state, is changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf

from ..dtensors import whole as all_of
from ..messages.values import Unit
from .losses import LossFunction, UnitLoss, consistent, elements_in, union_of

if TYPE_CHECKING:
    from ..stages.stage import LocalStage

ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Losses that are apart by less, relative to the largest of them, differ by rounding."""

_GRADIENT_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-2}
"""The same of gradients, relative to their norm: a loss may compute in a lower precision than it gives."""

_LOW = torch.float16, torch.bfloat16

JOINED_BYTES = 1 << 27
"""Bytes of outputs and targets of which a check makes no more copies than it has to."""

_COARSE = 6e-2
"""Rounding of gradients in other dtypes, and under autocast."""

_SMALL = 1e-2
"""Part of the rounding, relative to the largest gradient, below which a tensor's gradient is noise."""

Gradients = Sequence[Tensor | None]


class Graded(NamedTuple):
    """A loss and its gradients.

    Attributes:
        entry: the loss as it enters the mini-batch's.
        gradients: those of the leaves, of the loss as it enters; empty if none are asked for.
        rounding: relative differences of gradients that are rounding, by leaf.
        of_value: the same of the loss; None: its dtype tells it.
    """

    entry: UnitLoss
    gradients: Gradients
    rounding: Sequence[float]
    of_value: float | None = None


class Comparison(NamedTuple):
    """What the comparison of a loss with those of its parts shows.

    Attributes:
        decided: whether it shows anything.
        finite: whether all numbers are finite, which they have to be if anything is to be shown.
        value: loss, and the loss that its parts make, if these differ.
        gradient: relative difference of the gradients, if these differ and the values do not.
    """

    decided: bool
    finite: bool = True
    value: tuple[float, float] | None = None
    gradient: float | None = None


UNDECIDED, FITS = Comparison(decided=False), Comparison(decided=True)
_NON_FINITE = Comparison(decided=False, finite=False)


def leaves_of(output: Any) -> list[Tensor]:
    """The tensors of an output that have gradients."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def as_leaves(output: Any, *, always: bool = False) -> Any:
    """An output whose tensors are leaves, with a gradient where training needs one, or ``always``."""
    graph = torch.is_grad_enabled() and not always  # a forward that runs again in the backward makes none

    def leaf(tensor: Tensor) -> Tensor:
        real = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(real and (tensor.requires_grad or not graph))

    return pytree.tree_map_only(Tensor, leaf, output)


def copied(tensor: Tensor) -> Tensor:
    """A leaf of its own with the same content."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def grade(  # noqa: PLR0917
    copy: LocalStage,
    function: LossFunction,
    output: Any,
    target: Any,
    samples: int,
    leaves: Sequence[Tensor],
    unit: Unit = Unit(0),  # noqa: B008
) -> Graded:
    """Compute a loss of some samples, and the gradients of leaves.

    Args:
        copy: the last stage.
        function: the loss function.
        output: made of the leaves, in memory of its own.
        target: in memory of its own.
        samples: number of samples.
        leaves: tensors whose gradients are asked for.
        unit: unit of the loss.

    Raises:
        ConfigError: the loss draws random numbers, or is no loss.
    """
    size = elements_in(output)
    read = copy.loss_apart(function, output, target, samples, graph=bool(leaves))
    entry = read.as_unit_loss(unit, samples, 1.0, size)
    gradients: Gradients = [None] * len(leaves)
    if leaves and read.loss.requires_grad:
        with _without_gradients(copy):
            seed = torch.full_like(read.loss, entry.by)
            gradients = torch.autograd.grad(read.loss, leaves, seed, allow_unused=True)
    return Graded(entry, gradients, [rounding_of(leaf, read.loss) for leaf in leaves])


@contextmanager
def _without_gradients(copy: LocalStage) -> Iterator[None]:
    """Context in which functions that add to weights' gradients themselves add to others."""
    weights = [weight for weight in copy.parameters() if weight.is_leaf]  # a cast one has no gradient
    gradients = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        yield
    finally:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def added(gradients: Sequence[Gradients]) -> Gradients:
    """The sums of several parts' gradients of the same leaves."""
    return [_sum_of([g for g in same if g is not None]) for same in zip(*gradients, strict=True)]


def _sum_of(gradients: Sequence[Tensor]) -> Tensor | None:
    return sum(gradients[1:], gradients[0]) if gradients else None


def compare(whole: Graded, parts: Sequence[UnitLoss], gradients: Gradients) -> Comparison:
    """Compare a loss with those of the parts of its samples, each weighted as in the mini-batch.

    Args:
        whole: loss of all samples.
        parts: losses of the parts.
        gradients: sums of the parts' gradients of the same leaves.
    """
    entries = [whole.entry, *parts]
    counts = [float(entry.counts) for entry in entries if entry.counts is not None]
    alike = not counts or max(counts) - min(counts) <= 1e-9 * abs(max(counts))
    if not alike or not consistent(union_of(entry.normaliser for entry in entries)):
        return UNDECIDED  # what micro-batches count is compared when all are made
    sums = [float(entry.loss) * entry.by for entry in entries]
    weights = [float(entry.weight) * entry.by for entry in entries]
    of_parts = sum(weights[1:])
    if not (min(weights) >= 0 and weights[0] > 0 and of_parts > 0 and math.isfinite(sums[0])):
        return UNDECIDED  # of a loss that is not finite the step says so
    loss, made = sums[0] / weights[0], sum(sums[1:]) / of_parts
    largest = max(abs(s / w) for s, w in zip(sums, weights, strict=True) if w)
    norms = [
        _norms(one, other, weights[0], of_parts)
        for one, other in zip(whole.gradients, gradients, strict=True)
    ]
    if not math.isfinite(sum(sums)) or not math.isfinite(sum(map(sum, norms))):
        return _NON_FINITE
    assert isinstance(whole.entry.loss, Tensor)
    rounding = ROUNDING.get(whole.entry.loss.dtype, 1e-3) if whole.of_value is None else whole.of_value
    if abs(loss - made) > rounding * largest:
        return Comparison(decided=True, value=(loss, made))
    most = max((norm for norm, _ in norms), default=0.0)
    for near, (norm, apart) in zip(whole.rounding, norms, strict=True):
        if apart > near * (norm + _SMALL * most):
            return Comparison(decided=True, gradient=apart / norm if norm else 1.0)
    return FITS if largest or most else UNDECIDED


def _norms(one: Tensor | None, other: Tensor | None, weight: float, of_parts: float) -> tuple[float, float]:
    """The larger norm of two gradients, each divided by its weight, and the norm of their difference."""
    pair = [
        all_of(gradient).detach() / by
        for gradient, by in ((one, weight), (other, of_parts))
        if gradient is not None
    ]
    norms = [_norm(each) for each in pair]
    if len(pair) < 2:
        return max(norms, default=0.0), max(norms, default=0.0)
    return max(norms), _norm(pair[0] - pair[1])


def _norm(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def rounding_of(leaf: Tensor, loss: Tensor) -> float:
    """Relative difference of a leaf's gradients that is rounding."""
    device = leaf.device.type
    dtypes = {(leaf.real if leaf.is_complex() else leaf).dtype, loss.dtype}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    if torch.float16 in dtypes:
        return math.inf  # gradients that are too small for it may be anything
    found = max(_GRADIENT_ROUNDING.get(dtype, _COARSE) for dtype in dtypes)
    return found if device == "cpu" else 2 * found  # products of float32 may have fewer bits there


def in_float32(tree: Any) -> Any | None:
    """A tree with float32 in place of lower precision; None if it has none, or is large."""
    low = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dtype in _LOW]
    if not low or sum(leaf.nbytes for leaf in low) > JOINED_BYTES:
        return None

    def lift(tensor: Tensor) -> Tensor:
        if tensor.dtype not in _LOW:
            return tensor
        found = tensor.float()
        of: SliceOf | None = getattr(tensor, SLICE, None)
        if of is not None:
            setattr(found, SLICE, of._replace(target=of.target.float()))
        return found

    return pytree.tree_map_only(Tensor, lift, tree)
