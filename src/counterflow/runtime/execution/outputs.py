"""Heads of passes: a stage's output is taken apart for the next stage, or the loss is made of it.

Invariant: no layer of a stage runs here, only the loss function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from counterflow.api.skip import Carried
from counterflow.common.tensors.dtensors import full_tensor
from counterflow.common.trees import each_tensor, mapped
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from ..messages.values import Unit, flatten_value
from ..mini_batch.batch import Batch
from ..mini_batch.loss_output import LossFunction, LossOutput, elements_in
from ..mini_batch.losses import divisor_of
from ..mini_batch.probes import loss_probe
from ..mini_batch.samples import cut, refuse_whole_entries
from ..mini_batch.slicing import slice_of
from ..stages.aux_loss import pop_aux_losses, split_aux_losses
from ..stages.passes import BoundaryHead
from ..stages.sample_rows import SampleRows
from ..stages.saved_bytes import SavedBytes
from ..stages.stage import LocalStage
from .skips import OpSkips, Output, output_parts


class Outputs:
    """Heads of the passes of one worker.

    Args:
        schedule: what is run.
        loss_function: gives the loss of the last layer's output and target; None: the output is the loss.
        saved: counts what is saved for backward.
    """

    def __init__(self, schedule: Schedule, loss_function: LossFunction | None, saved: SavedBytes) -> None:
        self._loss_function = loss_function
        self._scheme, self._synchronous = schedule.scheme, schedule.synchronous
        self._slices = schedule.workload.slices
        self._saved = saved

    def parts_of(self, local_stage: LocalStage, output: Any, unit: Unit) -> Output:
        """Take a stage's output apart; None: the unit has no samples."""
        place, skips = f"stage {local_stage.stage}", local_stage.skips
        if skips is None or not (skips.gives or (skips.carries and self._slices > 1)):
            return flatten_value(output, place)
        return output_parts(skips, output, place, ends=self._slices == 1 or unit.part == self._slices - 1)

    def boundary_head(self, local_stage: LocalStage) -> BoundaryHead | None:
        """Head of all units of a stage that gives one value and nothing else; None: no such stage."""
        skips = local_stage.skips
        alone = skips is None or not (skips.gives or (skips.carries and self._slices > 1))
        return BoundaryHead(f"stage {local_stage.stage}") if alone and not local_stage.last else None

    def read(
        self, local_stage: LocalStage, batch: Batch, output: Any, unit: Unit, *, rerun: bool = False
    ) -> Output:
        """A stage's output taken apart; after the last stage, the unit's share of the loss."""
        if not local_stage.last:
            return self.parts_of(local_stage, output, unit)
        state: dict[int, Any] = {}
        if type(output) is Carried:
            output, state = output
        output, added = split_aux_losses(output)
        if (rows := batch.rows[unit]).start == rows.stop:
            pop_aux_losses()
            return None, [_no_loss(each_tensor(output))] if batch.training and batch.has_loss else []
        if batch.outputs is not None and not rerun:
            batch.outputs[unit] = mapped(_copy, output)
        if batch.watch is not None and not rerun and batch.watch.covers(unit):
            batch.watch.outputs[unit.part] = mapped(_copy, output)
        if not batch.has_loss:
            return None, []
        loss = self._loss_of(local_stage, batch, output, unit, added, rerun=rerun)
        return (None, [loss]) if not state else self.parts_of(local_stage, Carried(loss, state), unit)

    def _loss_of(
        self,
        local_stage: LocalStage,
        batch: Batch,
        output: Any,
        unit: Unit,
        added: Mapping[str, Tensor],
        *,
        rerun: bool,
    ) -> Tensor:
        """Return a unit's share of the mini-batch's loss, with auxiliary losses, times the loss scale."""
        rows = batch.rows[unit]
        samples = rows.stop - rows.start
        share: float = samples
        size, diagnoses = samples, () if rerun else batch.diagnoses.losses
        if self._loss_function is not None:
            assert batch.targets is not None
            targets = batch.targets[unit.micro_batch]
            target = part(targets, unit, batch, of_targets=True)
            if rows.slices > 1:
                share = samples * rows.positions / rows.sequence_length
            for diagnosis in diagnoses:
                size = rows.positions if diagnosis.of_positions else samples
                diagnosis.begin(loss_probe(local_stage, self._loss_function), output, target, size)
            size = elements_in(output)
            output = self._loss(local_stage, batch, output, target, rows)
        loss = local_stage.means.read(output, share)
        if rows.slices > 1 and self._loss_function is None and loss.weight is None:
            raise ConfigError(
                "the last layer gives a mean, and it is not known of how much of a sequence that a slice "
                "is; let it return a cf.LossSum, or give the Pipeline a loss function and targets"
            )
        if loss.weight is not None and not self._synchronous:
            if samples < batch.total:
                raise ConfigError(
                    f"{self._scheme} updates weights before the LossSum of all micro-batches is "
                    "known; return the mean loss of each, or take a synchronous scheme"
                )
            sum_of_losses, weight = loss.loss, loss.weight
            loss = LossOutput(
                sum_of_losses / weight, None, {name: x / weight for name, x in loss.metrics.items()}
            )
        divisor = batch.divisor or divisor_of(batch.total, flushes=self._synchronous)
        for diagnosis in diagnoses:
            diagnosis.end()
        terms = pop_aux_losses()  # the loss function adds to itself as layers do
        if (added or terms) and local_stage.means.compares:
            loss = loss.with_shares(share, size)
        for shares in (terms, added):
            if shares:
                loss = loss.with_added(shares)
        batch.losses.note_graph(loss.loss, recomputed=rerun)
        entry = loss.as_unit_loss(unit, share, divisor, size)
        if not rerun:
            batch.enter(entry)
        return loss.loss * (entry.by * batch.loss_scale)

    def _loss(self, local_stage: LocalStage, batch: Batch, output: Any, target: Any, rows: SampleRows) -> Any:
        assert self._loss_function is not None
        try:
            return local_stage.run_loss((self._loss_function, output, target), batch.step, rows)
        except Exception as error:
            samples = rows.stop - rows.start
            refuse_whole_entries(error, target, batch.target_dims, samples, sum(batch.samples))
            raise


class UnitHead:
    """Head of one unit's pass: its output goes to the next stage, or its loss is made of it.

    Args:
        outputs: the worker's.
        local_stage: the stage.
        batch: mini-batch of the unit.
        unit: the unit.
        skips: skip connections of the op.
    """

    __slots__ = ("_batch", "_copy", "_outputs", "_skips", "_unit")

    def __init__(
        self, outputs: Outputs, local_stage: LocalStage, batch: Batch, unit: Unit, skips: OpSkips
    ) -> None:
        self._outputs, self._copy, self._batch, self._unit, self._skips = (
            outputs,
            local_stage,
            batch,
            unit,
            skips,
        )

    def __call__(self, output: Any, *, rerun: bool = False) -> Output:
        """Return the output's structure and tensors; values that are made once per mini-batch are sent."""
        if self._skips.gives and not rerun:
            self._skips.send_once(self._batch, self._unit, output and output.skips)
        return self._outputs.read(self._copy, self._batch, output, self._unit, rerun=rerun)

    def empty(self) -> Output:
        """Return the output of a unit without samples."""
        if self._skips.gives:
            self._skips.send_once(self._batch, self._unit, None)
        return self._outputs.parts_of(self._copy, None, self._unit)

    def targets(self) -> list[Tensor]:
        """Return the targets of the mini-batch."""
        return each_tensor(self._batch.targets)


def part(tree: Any, unit: Unit, batch: Batch, *, of_targets: bool) -> Any:
    """A unit's samples, or slice, of its micro-batch's inputs or targets."""
    if unit.parts == 1:
        return tree
    if batch.sequence is not None:
        return slice_of(tree, unit, batch.sequence[of_targets], batch.sequence.slices)
    dims = batch.target_dims if of_targets else batch.input_dims
    return cut(tree, unit.rows(batch.samples[unit.micro_batch]), dims)


def _no_loss(outputs: Sequence[Tensor]) -> Tensor:
    ends = [tensor.reshape(-1)[:0].sum().float() for tensor in outputs if tensor.is_floating_point()]
    # Its backward goes through all layers, as at other positions.
    return torch.stack(ends).sum() if ends else torch.zeros(())


def _copy(tensor: Tensor) -> Tensor:
    # the user's loss, or an update, may change it
    return full_tensor(tensor.detach()).clone()
