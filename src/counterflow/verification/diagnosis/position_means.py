"""Diagnosis of the losses of slices, and of shares: whether they add up to the loss of the whole sequence.

The loss of a slice, or of the share of a sequence that a position of the mesh has, is compared with the
losses of its two halves, each weighted as in the mini-batch: their weights, their sums, and the gradient of
every element of the output. So the diagnosis finds a loss that shifts its targets within the slice,
normalises by the slice, or is no sum over positions. It is due in the first mini-batch of each kind, and
again in rarer ones: a first one without padding shows nothing of what padding changes.

It cannot decide about a loss that draws random numbers or that the last layer computes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.errors import ConfigError

from .comparison import compare_with_parts, distance
from .graded_losses import Graded, LossProbe, leaves_of
from .sample_means import LossLayout
from .tolerances import ACTIVATIONS, LOSSES_OF_SLICES, WEIGHTS

_LOG = logging.getLogger(__name__)


class PositionMeanDiagnosis:
    """Diagnosis of the losses of slices, or shares, on one worker.

    Args:
        layout: dimensions of the positions.
        option: ``target_sequence_dims`` of the pipeline, for messages.
    """

    of_positions = True

    def __init__(self, layout: LossLayout, option: object) -> None:
        self._layout, self._option = layout, option
        self._warned = False

    def begin(self, probe: LossProbe, output: Any, target: Any, positions: int) -> None:
        """Diagnose the loss of a slice, or of a share, before it is computed.

        Args:
            probe: computes the loss.
            output: output of the last layer.
            target: its targets.
            positions: positions of the slice; 0: it is a whole share, with as many as its targets have.

        Raises:
            ConfigError: the losses of its halves do not add up to it, or nothing can be decided of a slice.
        """
        if not positions:
            self._begin_share(probe, output, target)
        elif positions > 1:
            self._begin_slice(probe, output, target, positions)

    def _begin_share(self, probe: LossProbe, output: Any, target: Any) -> None:
        try:
            positions = self._layout.count(output)
            if positions != self._layout.count_target(target):
                raise ConfigError(
                    f"outputs and targets differ in the dimension {self._option!r} of their positions"
                )
            fits = positions == 1 or self._fits_halves(probe, output, target, positions)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _LOG.warning("could not verify that the loss is a mean over positions (assumed): %s", error)
            return
        if not fits:
            raise _no_mean(f"the {positions} of a share of a sequence", "shares")

    def _begin_slice(self, probe: LossProbe, output: Any, target: Any, positions: int) -> None:
        if self._layout.count(output) != positions:
            raise ConfigError(
                f"the last layer gives outputs without the {positions} positions of a slice, where "
                f"target_sequence_dims={self._option!r} says; say where they are, or take no slices"
            )
        if not self._fits_halves(probe, output, target, positions):
            raise _no_mean(f"{positions} of a slice", "slices")

    def _fits_halves(self, probe: LossProbe, output: Any, target: Any, positions: int) -> bool:
        run_slice, *parts = (
            partial(self._grade, probe, output, target, rows)
            for rows in (
                slice(0, positions),
                slice(0, positions // 2),
                slice(positions // 2, positions),
            )
        )
        join = partial(self._join, (positions // 2, positions - positions // 2))
        return compare_with_parts(run_slice, parts, join, _fits)

    @staticmethod
    def end() -> None:
        """Do nothing: each slice is diagnosed on its own."""

    finish = end

    def _grade(self, probe: LossProbe, output: Any, target: Any, rows: slice) -> Graded:
        part = pytree.tree_map_only(Tensor, _leaf, self._layout.cut(output, rows))
        targets = pytree.tree_map_only(Tensor, torch.clone, self._layout.cut_target(target, rows))
        for leaf, original in zip(pytree.tree_leaves(targets), pytree.tree_leaves(target), strict=False):
            if not isinstance(original, Tensor):
                continue
            of: SliceOf | None = getattr(original, SLICE, None)
            if of is None and leaf.shape != original.shape:  # a half of a share
                dim = next(d for d, size in enumerate(leaf.shape) if size != original.shape[d])
                of = SliceOf(original, 0, dim)
            if of is not None:
                setattr(leaf, SLICE, of._replace(start=of.start + rows.start))
        leaves = leaves_of(part)
        with torch.enable_grad():  # the loss may change its output in place, as no leaf can be
            output = pytree.tree_map_only(Tensor, torch.clone, part)
        graded = probe.grade(output, targets, rows.stop - rows.start, leaves, graph=True)
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, graded.gradients, strict=True)
        ]
        return graded._replace(gradients=gradients)

    def _join(self, sizes: Sequence[int], halves: Sequence[Graded]) -> tuple[float, float, list[Tensor]]:
        pairs = zip(*(half.gradients for half in halves), strict=True)
        gradients = [self._layout.join(pair, sizes) for pair in pairs]
        return sum(half.sum for half in halves), sum(half.weight for half in halves), gradients


def _no_mean(positions: str, parts: str) -> ConfigError:
    return ConfigError(
        f"the loss is no mean over positions: that of {positions} is not what their halves make, so the "
        f"losses of {parts} do not make one process's. Let the function return a cf.LossSum: a sum, and what "
        "it is to be divided by; shift targets with cf.next_target, and divide by what counts in "
        "cf.whole_target"
    )


def _fits(total: Graded, joined: tuple[float, float, Sequence[Tensor]]) -> bool:
    loss, weight, gradients = joined
    pairs: list[tuple[Any, Tensor]] = list(zip(total.gradients, gradients, strict=True))
    dtypes = [expected.dtype for expected, _ in pairs] or [torch.float64]
    return (
        _near(total.weight, weight, WEIGHTS)
        and all(distance(expected, got) <= ACTIVATIONS.of(expected.dtype) for expected, got in pairs)
        and _near(total.sum, loss, LOSSES_OF_SLICES.of(*dtypes))
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _near(expected: float, got: float, limit: float) -> bool:
    return not abs(expected - got) > limit * abs(expected)  # true of what is not finite: a step reports it
