"""Check that a loss is a mean over samples, as assumed, in the first mini-batch of a kind.

A unit's loss is compared with the losses of its two halves on the same outputs, each weighted as in the
mini-batch. A unit relates to its halves as one process's mini-batch relates to its micro-batches. Units of
one sample are compared in pairs instead.

The check does not find what changes only the gradient. It cannot decide about a loss that draws random
numbers or that the last layer computes, or if outputs or targets cannot be cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError
from counterflow.loss_sum import SLICE, SliceOf

from ..messages.values import Unit
from .losses import Entry, LossFunction, consistent, counted, elements_in
from .samples import Dims, cut, joined, samples_in

if TYPE_CHECKING:
    from ..stages.stage import StageCopy

_LOG = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Losses that are apart by less, relative to the largest of them, differ by rounding."""
_WHOLE, _ONE, _OTHER = (Unit(number) for number in range(3))


_KINDS = 256
"""Maximum number of kinds of mini-batches in which the loss is checked."""


class FirstOfKind:
    """Says whether a mini-batch is the first of its kind; beyond ``_KINDS`` kinds, that it is not."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def __call__(self, kind: Hashable) -> bool:
        """Whether no mini-batch of this kind was asked for before."""
        if kind in self._seen or len(self._seen) == _KINDS:
            return False
        self._seen.add(kind)
        return True


class LossChecks:
    """Checks of one pipeline's losses.

    Args:
        output_dims: dimensions of the samples in the outputs.
        target_dims: dimensions of the samples in the targets.
    """

    def __init__(self, output_dims: Dims, target_dims: Dims) -> None:
        self._dims = output_dims, target_dims
        self._first = FirstOfKind()
        self._told = False

    def of(self, kind: int, *, evaluates: bool) -> LossCheck | None:
        """What looks at a mini-batch's loss; None: another one of the kind was looked at."""
        return LossCheck(*self._dims, self._undecided) if self._first((kind, evaluates)) else None

    def _undecided(self, why: str) -> None:
        """Warn, once, that a loss could not be looked at."""
        if not self._told:
            self._told = True
            _LOG.warning(
                "it could not be seen whether the loss is a mean over samples, as it is taken to be (%s)", why
            )


class LossCheck:
    """Check of one mini-batch's losses on one worker.

    Args:
        output_dims: dimensions of the samples in the outputs.
        target_dims: dimensions of the samples in the targets.
        undecided: called with the reason if the check cannot decide.
    """

    of_positions = False
    """Whether it is about the positions of a slice's sequence, and not about samples."""

    def __init__(self, output_dims: Dims, target_dims: Dims, undecided: Callable[[str], object]) -> None:
        self._output_dims, self._target_dims = output_dims, target_dims
        self._undecided = undecided
        self._samples = 0
        self._pair: tuple[Entry, Entry] | None = None
        """The losses of the halves of the unit at hand."""
        self._single: tuple[Any, Any] | None = None
        """Output and target of a unit of one sample."""
        self._first: tuple[Any, Any, Entry] | None = None
        """Output and target of an earlier unit of one sample, with its loss."""
        self._of: Callable[[Any, Any, int, Unit], Entry]
        self._over = False

    def begin(self, copy: StageCopy, function: LossFunction, output: Any, target: Any, samples: int) -> None:
        """Before a unit's loss is made, which may change what it is given."""
        self._samples, self._pair, self._single = samples, None, None
        if samples == 1 and hasattr(next(iter(pytree.tree_leaves(target)), None), SLICE):
            return  # two slices are not two samples of one kind

        def of(output: Any, target: Any, samples: int, unit: Unit) -> Entry:
            read = copy.means.read(copy.loss_apart(function, output, target), samples)
            return read.entered(unit, samples, 1.0, elements_in(output))

        self._of = of
        try:
            if samples_in(output, self._output_dims, "outputs") != samples:
                raise ConfigError("outputs have no dimension of samples where output_dims says")
            if samples == 1:
                self._single = self._part(output, target, slice(0, 1))
                return
            half = samples // 2
            one = of(*self._part(output, target, slice(0, half)), half, _ONE)
            other = of(*self._part(output, target, slice(half, samples)), samples - half, _OTHER)
            self._pair = one, other
        except Exception as error:
            self._tell("half of a micro-batch", error)

    def _tell(self, where: str, error: Exception) -> None:
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        self._over = True
        self._undecided(f"of {where}: {why}")

    def end(self, entry: Entry) -> bool:
        """Finish after the loss was computed: whether the check cannot decide, so later ones are not checked.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if self._pair is not None:
            self._compare(entry, *self._pair)
        elif self._single is not None:
            if self._first is None:
                self._first = *self._single, entry
            else:
                self._compare_singles(*self._first, *self._single, entry)
                self._first = None
        return self._over

    def _compare_singles(  # noqa: PLR0917
        self, output: Any, target: Any, first: Entry, other_output: Any, other_target: Any, other: Entry
    ) -> None:
        try:
            whole = self._of(
                joined([output, other_output], self._output_dims, "outputs", (1, 1)),
                joined([target, other_target], self._target_dims, "targets", (1, 1)),
                2,
                _WHOLE,
            )
        except Exception as error:
            self._tell("two micro-batches", error)
        else:
            self._compare(whole, first, other)

    def _part(self, output: Any, target: Any, rows: slice) -> tuple[Any, Any]:
        """Some samples, in memory of their own."""
        found, its = (
            pytree.tree_map_only(Tensor, _copied, cut(tree, rows, dims))
            for tree, dims in ((output, self._output_dims), (target, self._target_dims))
        )
        for own, given in zip(pytree.tree_leaves(its), pytree.tree_leaves(target), strict=False):
            of: SliceOf | None = getattr(given, SLICE, None)
            if of is not None:
                setattr(own, SLICE, of._replace(whole=cut(of.whole, rows, self._target_dims)))
        return found, its

    def _compare(self, whole: Entry, one: Entry, other: Entry) -> None:
        """Compare a unit's loss with those of its halves, if that can be.

        Raises:
            ConfigError: they do not make the same.
        """
        if not consistent(counted(entry.counted for entry in (whole, one, other))):
            return
        counts = [float(e.counts) for e in (whole, one, other) if e.counts is not None]
        if counts and max(counts) - min(counts) > 1e-9 * abs(max(counts)):
            return  # what counts in each micro-batch is compared when all are made
        assert isinstance(whole.loss, Tensor)
        rounding = _ROUNDING.get(whole.loss.dtype, 1e-3)
        sums, weights = ([f(e) for e in (whole, one, other)] for f in (_sum, _weight))
        if not (min(weights) >= 0 and weights[0] > 0 and weights[1] + weights[2] > 0):
            return
        found, halves = sums[0] / weights[0], (sums[1] + sums[2]) / (weights[1] + weights[2])
        each = [s / w for s, w in zip(sums, weights, strict=True) if w]
        largest = max(map(abs, each))
        if not math.isfinite(sum(each)) or not largest:
            return
        if abs(found - halves) > rounding * largest:
            raise ConfigError(
                f"the loss is no mean over samples: of {self._samples_shown} it is {found:g}, and those of "
                f"their halves, weighed by what they count, make {halves:g}; so the losses of micro-batches "
                "do not make one process's. Let the loss function return a cf.LossSum: a sum, and what it is "
                "to be divided by; or insist on a mean of the micro-batches' losses with "
                "per_micro_batch_loss=True"
            )

    @property
    def _samples_shown(self) -> str:
        return "2 samples" if self._samples == 1 else f"{self._samples} samples"


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _sum(entry: Entry) -> float:
    return float(entry.loss) * entry.by


def _weight(entry: Entry) -> float:
    return float(entry.weight) * entry.by
