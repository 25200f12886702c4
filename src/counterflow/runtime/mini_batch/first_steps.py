"""Diagnoses of the user's model that are due in a pipeline's steps: in the first of each kind, then rarely.

Invariant: all workers of a replica diagnose the same mini-batches. What is diagnosed, and how, is not known
here (``verification.diagnosis``).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from counterflow.common.doubling import is_doubling, rechecks
from counterflow.execution import Batching
from counterflow.verification.diagnosis.aux_means import AuxMeanDiagnosis
from counterflow.verification.diagnosis.position_means import PositionMeanDiagnosis
from counterflow.verification.diagnosis.sample_means import SampleMeanDiagnosis
from counterflow.verification.diagnosis.sliced_layers import SlicedLayerDiagnosis

from .input_cuts import InputChecks, InputCutDiagnosis
from .samples import LossDims
from .user_batch import UserBatch

_LOG = logging.getLogger(__name__)

LossDiagnosis = SampleMeanDiagnosis | PositionMeanDiagnosis

_LOSS_KINDS = 256
"""Maximum number of kinds of mini-batches in which losses are diagnosed."""

_INPUT_KINDS = 4096
"""Maximum number of kinds of mini-batches whose inputs are remembered."""

_TRIES = 8
"""Number of mini-batches of a kind that are all diagnosed as long as none decides; then ever fewer are."""


class FirstOfKind:
    """Says whether a mini-batch is the first of its kind; beyond ``_LOSS_KINDS`` kinds, that it is not."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def __call__(self, kind: Hashable) -> bool:
        """Return whether this is the first call for a kind."""
        if kind in self._seen or len(self._seen) == _LOSS_KINDS:
            return False
        self._seen.add(kind)
        return True


@dataclass(slots=True)
class _Kind:
    tries: int = 0  # mini-batches whose diagnosis did not decide
    mini_batches: int = 0
    settled: bool = False  # one was decided, or none can be

    @property
    def due(self) -> bool:
        """True if the next mini-batch is to be diagnosed."""
        return not self.settled and (self.tries < _TRIES or is_doubling(self.mini_batches))


@dataclass(frozen=True, slots=True)
class Diagnoses:
    """Diagnoses that are due in a mini-batch.

    Attributes:
        losses: diagnoses of the loss as a mean over positions, and over samples.
        aux: diagnosis of what layers add to the loss; None: none is due.
        slices: diagnosis of layers on slices; None: there are no slices.
    """

    losses: tuple[LossDiagnosis, ...] = ()
    aux: AuxMeanDiagnosis | None = None
    slices: SlicedLayerDiagnosis | None = None


NO_DIAGNOSES = Diagnoses()


class FirstSteps:
    """Diagnoses of one pipeline.

    Args:
        batching: how mini-batches are cut.
        parts: number of units into which the scheme cuts each micro-batch.
        sliced: whether micro-batches are cut in slices of their sequence.
        shared: whether positions of the mesh share sequences.
        diagnoses_inputs: whether units may be empty, which the diagnosis of inputs needs.
    """

    def __init__(
        self, batching: Batching, parts: int, *, sliced: bool, shared: bool, diagnoses_inputs: bool
    ) -> None:
        self._parts, self._sliced, self._shared = parts, sliced, shared
        self._diagnoses_inputs = diagnoses_inputs
        self._trusts_losses = batching.per_micro_batch_loss
        self._samples = LossDims(batching.output_dims, batching.target_dims)
        option = batching.target_sequence_dims
        positions = LossDims(option if isinstance(option, int) else 1, option, uncut=True)
        self._position_means = PositionMeanDiagnosis(positions, option)
        self._sliced_layers = SlicedLayerDiagnosis()
        self._input_checks = InputChecks()
        self._loss_kinds: dict[Hashable, _Kind] = {}
        self._first_with_positions, self._first_with_aux = FirstOfKind(), FirstOfKind()
        self._aux_tries = 0
        """Number of mini-batches that are still diagnosed because layers' terms were not decided."""
        self._warned_of_losses = self._warned_of_aux = False

    def of_inputs(
        self, user_batch: UserBatch, kind: int, sizes: Sequence[int], *, trains: bool, step: int
    ) -> InputCutDiagnosis | None:
        """Diagnosis of how inputs are cut; None: no tensor may be cut by coincidence, or it is not due.

        Args:
            user_batch: inputs and targets of this worker.
            kind: signature of the inputs; 0: this worker has none.
            sizes: samples by micro-batch.
            trains: whether gradients are computed.
            step: number of earlier steps.
        """
        checks = self._input_checks
        if not self._diagnoses_inputs or not sizes or not kind or kind in checks.settled:
            return None
        due = trains and is_doubling(step)
        diagnosis = InputCutDiagnosis.of(user_batch, sizes, self._parts, checks, due=due)
        if diagnosis is not None and not diagnosis.ways:
            if len(checks.settled) < _INPUT_KINDS:
                checks.settled.add(kind)
            return None
        return diagnosis

    def of_step(
        self, kind: int, *, trains: bool, step: int, has_losses: bool, units: int | None, compares: bool
    ) -> Diagnoses:
        """Diagnoses of a mini-batch's losses and layers.

        Args:
            kind: kind of the mini-batch.
            trains: whether gradients are computed.
            step: number of earlier steps.
            has_losses: whether this worker computes losses with targets.
            units: number of losses on this worker, if no call of ``finish`` follows the last one.
            compares: whether the mini-batch has several units, without which there are no parts.
        """
        slices = self._sliced_layers if self._sliced and trains else None
        losses: list[LossDiagnosis] = []
        if has_losses and self._checks_positions(kind, trains=trains, step=step):
            losses.append(self._position_means)
        if not compares:
            return Diagnoses(tuple(losses), slices=slices)
        if has_losses and not self._trusts_losses:
            of_samples = self._of_samples(kind, trains=trains, step=step, units=units)
            losses += [] if of_samples is None else [of_samples]
        return Diagnoses(tuple(losses), self._of_aux(kind, trains=trains, step=step), slices)

    def _checks_positions(self, kind: int, *, trains: bool, step: int) -> bool:
        if not trains or not (self._sliced or self._shared):
            return False
        return self._first_with_positions(kind) or rechecks(step)

    def _of_samples(
        self, kind: int, *, trains: bool, step: int, units: int | None
    ) -> SampleMeanDiagnosis | None:
        state = self._loss_kinds.get((kind, trains))
        if state is None:
            if len(self._loss_kinds) == _LOSS_KINDS:
                return None
            state = self._loss_kinds[kind, trains] = _Kind()
        state.mini_batches += 1
        due = state.due
        if not due and not (trains and rechecks(step)):
            return None
        finished = partial(self._note_losses, state)
        return SampleMeanDiagnosis(self._samples, finished, graph=trains, units=units, single=not due)

    def _note_losses(self, state: _Kind, *, decided: bool, reason: str | None) -> None:
        state.settled = state.settled or decided
        state.tries += 1
        if reason is not None and not self._warned_of_losses:
            self._warned_of_losses = True
            _LOG.warning(
                "could not verify that the loss is a mean over samples (assumed): %s",
                reason,
            )

    def _of_aux(self, kind: int, *, trains: bool, step: int) -> AuxMeanDiagnosis | None:
        if self._trusts_losses:
            return None
        self._aux_tries -= 1
        first = self._first_with_aux((kind, trains)) or self._aux_tries >= 0
        if not first and not (trains and rechecks(step)):
            return None
        return AuxMeanDiagnosis(self._note_undecided_aux, graph=trains, single=not first)

    def _note_undecided_aux(self, reason: str) -> None:
        if not self._warned_of_aux:
            self._warned_of_aux, self._aux_tries = True, _TRIES
            _LOG.warning(
                "could not verify that what layers add to the loss is a mean over samples (assumed): %s",
                reason,
            )
