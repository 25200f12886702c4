"""Check that a loss is a mean over samples, in the first mini-batch of a kind and in some later ones.

Each unit's loss, and the gradient that it gives the outputs, are compared with those of two parts of the
unit's samples, each weighted as in the mini-batch; then those of all units of a worker together with those of
the units. A unit relates to its parts as one process's mini-batch relates to its micro-batches.

If the loss of a part is not finite (a variance over one sample), other parts are tried, and then whole units.
The check cannot decide about a loss that draws random numbers or that the last layer computes, or if outputs
or targets cannot be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.api.loss_sum import SLICE, SliceOf
from counterflow.errors import ConfigError

from ..doubling import is_doubling
from ..messages.values import Unit
from .graded import (
    JOINED_BYTES,
    UNDECIDED,
    Comparison,
    Graded,
    Gradients,
    added,
    as_leaves,
    compare,
    copied,
    grade,
    in_float32,
    leaves_of,
)
from .losses import LossFunction
from .samples import Dims, cut, joined, samples_in

if TYPE_CHECKING:
    from ..stages.stage import LocalStage

_LOG = logging.getLogger(__name__)

_WHOLE, _ONE, _OTHER = (Unit(number) for number in range(3))

_KINDS = 256
"""Maximum number of kinds of mini-batches in which the loss is checked."""

_TRIES = 8
"""Number of mini-batches of a kind that are all checked as long as none decides; then ever fewer are."""


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


@dataclass(slots=True)
class _Kind:
    """What is known of a kind of mini-batches.

    Attributes:
        tries: number of its mini-batches whose check did not decide.
        mini_batches: number of its mini-batches.
        checked: whether the check of one decided, or cannot decide in any.
    """

    tries: int = 0
    mini_batches: int = 0
    checked: bool = False

    @property
    def due(self) -> bool:
        """Whether the next mini-batch is to be checked."""
        count = self.mini_batches
        return not self.checked and (self.tries < _TRIES or is_doubling(count))


class LossChecks:
    """Checks of one pipeline's losses.

    Args:
        output_dims: dimensions of the samples in the outputs.
        target_dims: dimensions of the samples in the targets.
    """

    def __init__(self, output_dims: Dims, target_dims: Dims) -> None:
        self._dims = output_dims, target_dims
        self._kinds: dict[Hashable, _Kind] = {}
        self._warned = False

    def of(
        self, kind: int, *, evaluates: bool, units: int | None = None, again: bool = False
    ) -> LossCheck | None:
        """Return the check of a mini-batch; None: it needs none.

        Args:
            kind: kind of the mini-batch.
            evaluates: whether nothing is trained on it.
            units: number of its losses on this worker, if no call of ``finish`` follows the last one.
            again: whether to check one unit of the mini-batch though others of its kind were checked.
        """
        known = self._kinds.get((kind, evaluates))
        if known is None:
            if len(self._kinds) == _KINDS:
                return None
            known = self._kinds[kind, evaluates] = _Kind()
        known.mini_batches += 1
        if not (due := known.due) and not again:
            return None
        return LossCheck(
            *self._dims, partial(self._finished, known), graph=not evaluates, units=units, one=not due
        )

    def _finished(self, kind: _Kind, *, decided: bool, reason: str | None) -> None:
        """Note the end of a check, and warn once if there is a reason for which it could not decide."""
        kind.checked = kind.checked or decided
        kind.tries += 1
        if reason is not None and not self._warned:
            self._warned = True
            _LOG.warning(
                "it could not be seen whether the loss is a mean over samples, as it is taken to be (%s)",
                reason,
            )


class _Member(NamedTuple):
    """A unit's output as leaves, its target, and its loss.

    Attributes:
        output: output of the last layer.
        target: target of the unit.
        samples: number of samples.
        graded: loss of all of the samples.
    """

    output: Any
    target: Any
    samples: int
    graded: Graded

    @property
    def bytes(self) -> int:
        """Bytes of the output and the target."""
        leaves = pytree.tree_leaves((self.output, self.target))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


class LossCheck:
    """Check of one mini-batch's losses on one worker.

    Args:
        output_dims: dimensions of the samples in the outputs.
        target_dims: dimensions of the samples in the targets.
        finished: called once, with whether the check decided, or else the reason if that is worth a warning.
        graph: whether gradients are compared as well.
        units: number of the losses; None: ``finish`` is called after the last one.
        one: whether the check ends with the first unit that decides.
    """

    of_positions = False
    """Whether it is about the positions of a slice's sequence, and not about samples."""

    def __init__(
        self,
        output_dims: Dims,
        target_dims: Dims,
        finished: Callable[..., object],
        *,
        graph: bool,
        units: int | None = None,
        one: bool = False,
    ) -> None:
        self._output_dims, self._target_dims = output_dims, target_dims
        self._finished: Callable[..., object] | None = finished
        self._graph, self._units, self._one = graph, units, one
        self._decided = False
        self._reason: str | None = None
        self._alone = False
        """Whether a unit of one sample was seen."""
        self._members: list[_Member] = []
        """Units that are to be compared together."""
        self._grade: Callable[..., Graded]
        self._joins = True

    def begin(self, copy: LocalStage, function: LossFunction, output: Any, target: Any, samples: int) -> None:
        """Check a unit's loss before it is computed, which may change what it is given.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if self._finished is None:
            return
        if self._units is not None:
            self._units -= 1
        sliced = any(hasattr(leaf, SLICE) for leaf in pytree.tree_leaves(target))
        if samples == 1 and sliced:
            self._decided = True  # the check of positions is enough: two slices are not two samples
            return
        self._grade = partial(grade, copy, function)
        comparison, member = UNDECIDED, None
        try:
            if samples_in(output, self._output_dims, "outputs") != samples:
                raise ConfigError("outputs have no dimension of samples where output_dims says")
            member = self._member(output, target, samples)
            comparison = self._parted(member)
        except Exception as error:
            self._cannot("half of a micro-batch", error)
        self._note(comparison, samples)
        self._alone = self._alone or samples == 1
        if member is not None and not sliced:
            self._join(member, decided=comparison.decided)

    def end(self) -> None:
        """Finish the check after a unit's loss was computed, if no other is needed.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if self._units == 0 or (self._one and self._decided):
            self.finish()

    def finish(self) -> None:
        """Finish the check after the last unit.

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
        if not self._decided and self._reason is None and self._alone:
            self._reason = "a worker has the loss of one sample alone"
        finished(decided=self._decided, reason=None if self._decided else self._reason)

    def _cannot(self, what: str, error: Exception) -> None:
        """Note that the check of this kind cannot decide, and end it."""
        finished, self._finished, self._members = self._finished, None, []
        if finished is not None:
            finished(decided=True, reason=self._reason or _reason(what, error))

    def _member(self, output: Any, target: Any, samples: int) -> _Member:
        """A unit's loss, in float32 where that can be and lower precision would hide what it is."""
        if (wide := in_float32((output, target))) is not None:
            with suppress(Exception):
                return self._member_of(wide[0], wide[1], samples)
        return self._member_of(output, target, samples)

    def _member_of(self, output: Any, target: Any, samples: int) -> _Member:
        leaves = as_leaves(output) if self._graph else pytree.tree_map_only(Tensor, Tensor.detach, output)
        graded = self._graded(leaves, target, samples, leaves_of(leaves), _WHOLE)
        return _Member(leaves, target, samples, graded)

    def _graded(self, output: Any, target: Any, samples: int, leaves: Sequence[Tensor], unit: Unit) -> Graded:
        """Loss of some samples, for which they are copied: a loss may change what it is given."""
        with torch.set_grad_enabled(bool(leaves)):
            own = pytree.tree_map_only(Tensor, torch.clone, output)
            return self._grade(own, _copied(target), samples, leaves, unit)

    def _parted(self, member: _Member) -> Comparison:
        """Compare a unit's loss with those of two parts, until two show anything."""
        comparison = UNDECIDED
        for point in points(member.samples):
            try:
                comparison = self._halved(member, point)
            except Exception as error:  # other parts, or other units, may be large enough for the loss
                self._reason = self._reason or _reason("half of a micro-batch", error)
            if comparison.decided:
                break
        return comparison

    def _halved(self, member: _Member, point: int) -> Comparison:
        """Compare a unit's loss with those of its samples up to a point and from there on."""
        output, target, samples, whole = member
        leaves = leaves_of(output)
        parts: list[Graded] = []
        for rows, unit in ((slice(0, point), _ONE), (slice(point, samples), _OTHER)):
            with torch.set_grad_enabled(bool(leaves)):
                its = cut(output, rows, self._output_dims)
            part = self._graded(its, self._cut(target, rows), rows.stop - rows.start, leaves, unit)
            parts.append(part)
        gradients = added([part.gradients for part in parts])
        return compare(whole, [part.entry for part in parts], gradients)

    def _cut(self, target: Any, rows: slice) -> Any:
        """Some samples of a target, of which a slice knows the whole."""
        found = cut(target, rows, self._target_dims)
        sequences = cut(pytree.tree_map_only(Tensor, _sequence, target), rows, self._target_dims)
        trees = map(pytree.tree_leaves, (found, target, sequences))
        for own, given, sequence in zip(*trees, strict=False):
            of: SliceOf | None = getattr(given, SLICE, None)
            if of is not None:
                setattr(own, SLICE, of._replace(target=sequence))
        return found

    def _join(self, member: _Member, *, decided: bool) -> None:
        """Keep a unit to be compared together with others, and compare them if they are large."""
        if not self._joins or (decided and (self._one or member.bytes >= JOINED_BYTES)):
            return
        output = pytree.tree_map_only(Tensor, copied, member.output)  # the loss to come may change it
        self._members.append(member._replace(output=output, target=_copied(member.target)))
        if sum(its.bytes for its in self._members) >= JOINED_BYTES:
            self._compare_members()

    def _compare_members(self) -> None:
        """Compare the loss of all samples of several units with those of the units."""
        if not self._members[1:]:
            return
        members, self._members = self._members, []
        samples = [member.samples for member in members]
        leaves = [leaf for member in members for leaf in leaves_of(member.output)]
        try:
            with torch.set_grad_enabled(bool(leaves)):
                output = joined(
                    [m.output for m in members], self._output_dims, "outputs", samples, equal=True
                )
            target = joined([m.target for m in members], self._target_dims, "targets", samples, equal=True)
            whole = self._graded(output, target, sum(samples), leaves, _WHOLE)
            gradients: Gradients = [g for member in members for g in member.graded.gradients]
            comparison = compare(whole, [member.graded.entry for member in members], gradients)
        except Exception as error:
            self._joins = False
            if not self._decided:
                self._cannot("two micro-batches", error)
            return
        self._note(comparison, sum(samples))

    def _note(self, comparison: Comparison, samples: int) -> None:
        """Note the outcome of a comparison.

        Raises:
            ConfigError: the loss is no mean over samples.
        """
        if not comparison.finite and self._reason is None:
            self._reason = "the loss, or a gradient of it, of some of the samples is not finite"
        self._decided = self._decided or comparison.decided
        insists = "insist on a mean of the micro-batches' losses with per_micro_batch_loss=True"
        if comparison.value is not None:
            whole, parts = comparison.value
            raise ConfigError(
                f"the loss is no mean over samples: of {samples} samples it is {whole:g}, and those of "
                f"parts of them, weighed by what they count, make {parts:g}; so the losses of micro-batches "
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


def _reason(what: str, error: Exception) -> str:
    return f"of {what}: {error if isinstance(error, ConfigError) else f'{type(error).__name__}: {error}'}"


def points(samples: int) -> list[int]:
    """Points at which the samples of a unit are cut in two: in the middle first."""
    tried = (samples // 2, 2, samples - 2, samples // 3)
    return list(dict.fromkeys(point for point in tried if 0 < point < samples))


def _sequence(target: Tensor) -> Tensor:
    of: SliceOf | None = getattr(target, SLICE, None)
    return target if of is None else of.target


def _copied(target: Any) -> Any:
    """A target in memory of its own, whose slices know the whole."""

    def copy(tensor: Tensor) -> Tensor:
        found = tensor.detach().clone()
        of: SliceOf | None = getattr(tensor, SLICE, None)
        if of is not None:
            setattr(found, SLICE, of)
        return found

    return pytree.tree_map_only(Tensor, copy, target)
