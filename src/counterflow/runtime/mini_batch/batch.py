"""The mini-batch of one step as a worker sees it: its part of the samples, the losses, known shapes.

It does not decide which worker gets which samples; ``batches.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..messages.values import Shapes, Unit
from ..stages.sample_rows import SampleRows
from .first_steps import NO_DIAGNOSES, Diagnoses
from .input_cuts import InputCutDiagnosis
from .loss_output import UnitLoss
from .losses import Losses
from .prefetcher import MicroBatchPrefetcher
from .samples import Dims
from .slicing import SequenceDims, Slices
from .step_report import CallReport
from .unit_watch import UnitWatch

Key = tuple[int, Unit]
"""A stage and what runs through it (a micro-batch runs on one pipe only)."""


class RowsOf(dict[Unit, SampleRows]):
    """Samples of each unit, numbered in the whole mini-batch; computed on first use.

    Args:
        first: number of this replica's first micro-batch among those of all replicas.
        samples: number of samples by micro-batch.
        slices: slices of each micro-batch; None: it is whole.
        positions: number of positions of the sequence by micro-batch; empty if not known.
    """

    def __init__(
        self,
        first: int,
        samples: Sequence[int],
        slices: Slices | None = None,
        positions: Sequence[int] = (),
    ) -> None:
        self.first, self.samples, self.slices, self.positions = first, samples, slices, positions

    def __missing__(self, unit: Unit) -> SampleRows:
        samples = self.samples[unit.micro_batch]
        if self.slices is not None:  # parts are slices of all its samples
            number, length = self.first + unit.micro_batch, 0
            if self.positions:
                length = self.positions[unit.micro_batch]
            positions = self.slices.rows(unit.part, length)
            count = positions.stop - positions.start
            rows = self[unit] = SampleRows(number, samples, 0, samples, *unit[1:3], count, length)
            return rows
        in_unit = unit.rows(samples)
        rows = self[unit] = SampleRows(self.first + unit.micro_batch, samples, in_unit.start, in_unit.stop)
        return rows


rows_of = lru_cache(maxsize=64)(RowsOf)
"""Cached rows; mini-batches of equal shapes share them."""


@dataclass(slots=True)
class Batch:
    """The replica's mini-batch of one step.

    Attributes:
        step: the step's number.
        inputs: by micro-batch, on the device; None on a worker without the first stage.
        targets: by micro-batch, on the device; None on a worker without the last stage.
        samples: number of samples by micro-batch.
        total: number of samples in the mini-batch of all replicas.
        rows: samples of each unit.
        training: whether gradients are computed.
        input_dims: dimensions of the samples in the inputs.
        target_dims: dimensions of the samples in the targets.
        known: shapes of the messages by stage and unit, if they were seen before.
        report: this worker's report of the call, sent with the loss if there was no agreement before.
        compare: checks the reports of all workers.
        learnt: record of the shapes of the messages.
        learns: whether ``learnt`` is used for later mini-batches.
        await_total: waits for the others' reports before they see any effect; returns ``total``.
        divisor: normaliser of the losses of the mini-batch; None: its number of samples.
        loss_scale: what its losses are multiplied by before their backwards.
        diagnoses: diagnoses of losses and layers that are due.
        losses: losses of its micro-batches so far.
        outputs: outputs of the last stage by unit, if requested.
        has_loss: whether losses are computed.
        compared: whether the copies of stages are compared after this mini-batch.
        sequence: how it is cut in slices; None: it is not cut.
        input_cuts: diagnosis of how its inputs are cut, on workers with inputs; None: none is due.
        ways: number of other ways to cut them, known to all workers of the replica; 0: no check is due.
        ready: whether its micro-batches were ready.
        guarded: whether a unit whose layer fails is passed on like one without samples.
        watch: saves the output and the loss of one unit; None: nothing is saved.
    """

    step: int
    inputs: MicroBatchPrefetcher | None
    targets: MicroBatchPrefetcher | None
    samples: Sequence[int]
    total: int
    rows: RowsOf
    training: bool
    input_dims: Dims
    target_dims: Dims
    known: Shapes | None
    report: CallReport
    compare: Callable[[Sequence[CallReport]], object]
    learnt: Shapes = field(default_factory=dict)
    learns: bool = False
    await_total: Callable[[], int] | None = None
    divisor: float | None = None
    loss_scale: float = 1.0
    diagnoses: Diagnoses = NO_DIAGNOSES
    losses: Losses = field(default_factory=Losses)
    outputs: dict[Unit, Any] | None = None
    has_loss: bool = True
    compared: bool = False
    sequence: SequenceDims | None = None
    input_cuts: InputCutDiagnosis | None = None
    ways: int = 0
    ready: bool = False
    guarded: bool = False
    watch: UnitWatch | None = None

    def agree(self) -> None:
        """Wait until all workers have reported this call."""
        if self.await_total is not None:
            self.total, self.await_total = self.await_total(), None

    def enter(self, entry: UnitLoss) -> None:
        """Add the loss of a unit."""
        self.losses.entries.append(entry)
        if self.watch is not None and self.watch.covers(entry.unit):
            self.watch.save_loss(entry)

    @property
    def feeds(self) -> list[MicroBatchPrefetcher]:
        """The inputs and the targets, where there are any."""
        return [feed for feed in (self.inputs, self.targets) if feed is not None]
