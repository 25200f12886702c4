"""Diagnosis of a loss: whether it is a mean over samples.

Each unit's loss, and the gradient that it gives the outputs, are compared with those of two parts of the
unit's samples, each weighted as in the mini-batch; then those of all units of a worker together with those of
the units. A unit relates to its parts as one process's mini-batch relates to its micro-batches.

If the loss of a part is not finite (a variance over one sample), other parts are tried, and then whole units.
The diagnosis cannot decide about a loss that draws random numbers or that the last layer computes, or if
outputs or targets cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.errors import ConfigError

from .comparison import compare_with_parts
from .graded_losses import (
    JOINED_BYTES,
    UNDECIDED,
    Graded,
    Joined,
    LossComparison,
    LossProbe,
    as_leaves,
    compare_losses,
    copied,
    in_float32,
    joined,
    leaves_of,
)

_CONSTANTS = bool, int, float, complex, str, bytes, type(None)
"""Types of targets that a part of a micro-batch has whole."""


class LossLayout(Protocol):
    """Dimensions of the samples, or of the positions, in the outputs and the targets of a loss."""

    def count(self, output: Any) -> int:
        """Number of samples in an output; ConfigError: it has none."""

    def count_target(self, target: Any) -> int:
        """Number of samples in a target; ConfigError: it has none."""

    def cut(self, output: Any, rows: slice) -> Any:
        """Some samples of an output."""

    def cut_target(self, target: Any, rows: slice) -> Any:
        """Some samples of a target."""

    def join(self, outputs: Sequence[Any], samples: Sequence[int]) -> Any:
        """One output of the samples of several; ConfigError: they cannot be joined."""

    def join_targets(self, targets: Sequence[Any], samples: Sequence[int]) -> Any:
        """One target of the samples of several; ConfigError: they cannot be joined."""


class _Member(NamedTuple):
    output: Any
    target: Any
    samples: int
    graded: Graded

    @property
    def bytes(self) -> int:
        """Bytes of the output and the target."""
        leaves = pytree.tree_leaves((self.output, self.target))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


class SampleMeanDiagnosis:
    """Diagnosis of one mini-batch's losses on one worker.

    Args:
        layout: dimensions of the samples.
        finished: called at the end with ``decided`` and, unless decided, the ``reason``.
        graph: whether gradients are compared as well.
        units: number of losses on this worker, if no call of ``finish`` follows the last one.
        single: whether the diagnosis ends with the first unit that decides.
    """

    of_positions = False
    """True if it is about the positions of a slice's sequence, and not about samples."""

    def __init__(
        self,
        layout: LossLayout,
        finished: Callable[..., object],
        *,
        graph: bool,
        units: int | None = None,
        single: bool = False,
    ) -> None:
        self._layout = layout
        self._finished: Callable[..., object] | None = finished
        self._graph, self._units, self._single = graph, units, single
        self._decided = False
        self._reason: str | None = None
        self._has_single_sample = False
        self._members: list[_Member] = []
        """Units that are to be compared together."""
        self._probe: LossProbe
        self._joins = True

    def begin(self, probe: LossProbe, output: Any, target: Any, samples: int) -> None:
        """Diagnose a unit's loss before it is computed, because it may change its arguments.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if self._finished is None:
            return
        if self._units is not None:
            self._units -= 1
        sliced = any(hasattr(leaf, SLICE) for leaf in pytree.tree_leaves(target))
        if samples == 1 and sliced:
            self._decided = True  # the diagnosis of positions is enough: two slices are not two samples
            return
        self._probe = probe
        comparison, member = UNDECIDED, None
        try:
            if self._layout.count(output) != samples:
                raise ConfigError("outputs have no dimension of samples where output_dims says")
            member = self._member(output, target, samples)
            comparison = self._compare_parts(member)
        except Exception as error:
            self._cannot("half of a micro-batch", error)
        self._note(comparison, samples)
        self._has_single_sample = self._has_single_sample or samples == 1
        if member is not None and not sliced:
            self._save(member, decided=comparison.decided)

    def end(self) -> None:
        """Finish after a unit's loss was computed, if no other is needed.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if self._units == 0 or (self._single and self._decided):
            self.finish()

    def finish(self) -> None:
        """Finish after the last unit.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if (finished := self._finished) is None:
            return
        self._compare_members()
        self._members = []
        if self._finished is None:
            return
        self._finished = None
        if not self._decided and self._reason is None and self._has_single_sample:
            self._reason = "a worker has the loss of one sample alone"
        finished(decided=self._decided, reason=None if self._decided else self._reason)

    def _cannot(self, subject: str, error: Exception) -> None:
        finished, self._finished, self._members = self._finished, None, []
        if finished is not None:
            finished(decided=True, reason=self._reason or _reason(subject, error))

    def _member(self, output: Any, target: Any, samples: int) -> _Member:
        # Lower precision would hide what the loss is; some losses refuse float32.
        if (lifted := in_float32((output, target))) is not None:
            with suppress(Exception):
                return self._member_of(lifted[0], lifted[1], samples)
        return self._member_of(output, target, samples)

    def _member_of(self, output: Any, target: Any, samples: int) -> _Member:
        leaves = as_leaves(output) if self._graph else pytree.tree_map_only(Tensor, Tensor.detach, output)
        graded = self._graded(leaves, target, samples, leaves_of(leaves))
        return _Member(leaves, target, samples, graded)

    def _graded(self, output: Any, target: Any, samples: int, leaves: Sequence[Tensor]) -> Graded:
        with torch.set_grad_enabled(bool(leaves)):  # copies, because a loss may change its arguments
            output = pytree.tree_map_only(Tensor, torch.clone, output)
            return self._probe.grade(output, _copied(target), samples, leaves)

    def _compare_parts(self, member: _Member) -> LossComparison:
        comparison = UNDECIDED
        for point in split_points(member.samples):
            parts = [partial(self._part, member, slice(0, point))]
            parts += [partial(self._part, member, slice(point, member.samples))]
            try:
                comparison = compare_with_parts(lambda: member.graded, parts, joined, compare_losses)
            except Exception as error:  # other parts, or other units, may be large enough for the loss
                self._reason = self._reason or _reason("half of a micro-batch", error)
            if comparison.decided:
                break
        return comparison

    def _part(self, member: _Member, rows: slice) -> Graded:
        leaves = leaves_of(member.output)
        with torch.set_grad_enabled(bool(leaves)):
            output = self._layout.cut(member.output, rows)
        return self._graded(output, self._cut(member.target, rows), rows.stop - rows.start, leaves)

    def _cut(self, target: Any, rows: slice) -> Any:
        part = self._layout.cut_target(target, rows)
        sequences = self._layout.cut_target(pytree.tree_map_only(Tensor, _sequence, target), rows)
        trees = map(pytree.tree_leaves, (part, target, sequences))
        for leaf, original, sequence in zip(*trees, strict=False):
            if leaf is original and not isinstance(original, (Tensor, *_CONSTANTS)):
                raise TypeError(
                    f"a target is a {type(original).__name__}, which cannot be cut as the output is"
                )
            of: SliceOf | None = getattr(original, SLICE, None)
            if of is not None:
                setattr(leaf, SLICE, of._replace(target=sequence))
        return part

    def _save(self, member: _Member, *, decided: bool) -> None:
        if not self._joins or (decided and (self._single or member.bytes >= JOINED_BYTES)):
            return
        output = pytree.tree_map_only(Tensor, copied, member.output)  # the loss to come may change it
        self._members.append(member._replace(output=output, target=_copied(member.target)))
        if sum(saved.bytes for saved in self._members) >= JOINED_BYTES:
            self._compare_members()

    def _compare_members(self) -> None:
        if not self._members[1:]:
            return
        members, self._members = self._members, []
        samples = [member.samples for member in members]
        parts = [partial(_graded_of, member) for member in members]
        try:
            comparison = compare_with_parts(
                lambda: self._grade_together(members, samples), parts, _side_by_side, compare_losses
            )
        except Exception as error:
            self._joins = False
            if not self._decided:
                self._cannot("two micro-batches", error)
            return
        self._note(comparison, sum(samples))

    def _grade_together(self, members: Sequence[_Member], samples: Sequence[int]) -> Graded:
        leaves = [leaf for member in members for leaf in leaves_of(member.output)]
        with torch.set_grad_enabled(bool(leaves)):
            output = self._layout.join([member.output for member in members], samples)
        target = self._layout.join_targets([member.target for member in members], samples)
        return self._graded(output, target, sum(samples), leaves)

    def _note(self, comparison: LossComparison, samples: int) -> None:
        if not comparison.finite and self._reason is None:
            self._reason = "the loss, or a gradient of it, of some of the samples is not finite"
        self._decided = self._decided or comparison.decided
        insists = "insist on a mean of the micro-batches' losses with per_micro_batch_loss=True"
        if comparison.value is not None:
            expected, got = comparison.value
            raise ConfigError(
                f"the loss is no mean over samples: of {samples} samples it is {expected:g}, and those of "
                f"parts of them, weighed by what they count, make {got:g}; so the losses of micro-batches "
                "do not make one process's. Let the loss function return a cf.LossSum: a sum, and what it is "
                f"to be divided by; or {insists}"
            )
        if comparison.gradient is not None:
            raise ConfigError(
                f"the loss is no mean over samples: its value is, but the gradient that it gives {samples} "
                f"outputs is {comparison.gradient:.1%} off that of parts of them; so the gradients of "
                "micro-batches do not make one process's. Let no detached number of the same samples weigh "
                "a part of it (one of earlier steps may), or return a cf.LossSum: a sum, and what it is to "
                f"be divided by; or {insists}"
            )


def _graded_of(member: _Member) -> Graded:
    return member.graded


def _side_by_side(parts: Sequence[Graded]) -> Joined:
    return Joined(parts, [gradient for part in parts for gradient in part.gradients])


def _reason(subject: str, error: Exception) -> str:
    return f"of {subject}: {error if isinstance(error, ConfigError) else f'{type(error).__name__}: {error}'}"


def split_points(samples: int) -> list[int]:
    """Points at which the samples of a unit are cut in two: in the middle first."""
    candidates = (samples // 2, 2, samples - 2, samples // 3)
    return list(dict.fromkeys(point for point in candidates if 0 < point < samples))


def _sequence(target: Tensor) -> Tensor:
    of: SliceOf | None = getattr(target, SLICE, None)
    return target if of is None else of.target


def _copied(target: Any) -> Any:
    def copy(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        of: SliceOf | None = getattr(tensor, SLICE, None)
        if of is not None:
            setattr(clone, SLICE, of)
        return clone

    return pytree.tree_map_only(Tensor, copy, target)
