"""Stages as diagnoses run them: losses without effect, and layers one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor
from counterflow.verification.diagnosis.aux_means import AuxLayer, AuxMeanDiagnosis, Terms, UnitRows
from counterflow.verification.diagnosis.graded_losses import LossProbe

from ..messages.values import Unit, Value
from ..stages.named_layer import place_of
from ..stages.sample_rows import SampleRows
from ..stages.slice_check import calm
from ..stages.stage_wrappers import Run
from .losses import LossFunction, UnitLoss, elements_in

if TYPE_CHECKING:
    from ..stages.stage import LocalStage


def loss_probe(copy: LocalStage, function: LossFunction) -> LossProbe:
    """Loss of the last stage, computed without effect on buffers and random state."""

    def compute(output: Any, target: Any, samples: float, graph: bool) -> tuple[Tensor, UnitLoss]:
        size = elements_in(output)  # before the loss, which may change its arguments
        loss = copy.loss_apart(function, output, target, samples, graph=graph)
        return loss.loss, loss.as_unit_loss(Unit(0), samples, 1.0, size)

    return LossProbe(compute, copy.parameters, full_tensor)


def diagnose_aux(
    diagnosis: AuxMeanDiagnosis, copy: LocalStage, value: Value, step: int, rows: SampleRows
) -> None:
    """Diagnose what a stage adds to the loss for a unit.

    Args:
        diagnosis: diagnosis of the mini-batch.
        copy: the stage.
        value: copy of the stage's input.
        step: the step's number.
        rows: samples of the unit.

    Raises:
        ConfigError: a term is no mean over samples, or positions.
    """
    unit = UnitRows(rows.stop - rows.start, rows.slice, rows.slices, rows.positions)
    diagnosis.run(_AuxStage(copy, step, rows), copy.carried(value), unit)


@dataclass(frozen=True, slots=True)
class _AuxStage:
    copy: LocalStage
    step: int
    rows: SampleRows

    @property
    def number(self) -> int:
        return self.copy.stage

    @property
    def sharded(self) -> bool:
        return self.copy.module is not None

    @property
    def lower_precision(self) -> bool:
        device = self.copy.streams.device.type
        return not self.copy.precision.plain or torch.is_autocast_enabled(device)

    @property
    def has_batch_norms(self) -> bool:
        return bool(self.copy.buffers.norms)

    def layers(self) -> Iterator[AuxLayer]:
        for layer, run, carries in self.copy.layer_runs():
            weights = [p for p in layer.module.parameters() if p.requires_grad and not is_dtensor(p)]
            yield AuxLayer(place_of(layer), partial(self._run, run), weights, bool(carries))

    def _run(self, run: Run, value: Value) -> tuple[Value, Terms] | None:
        with added_losses() as terms:
            output = self.copy.streams.unless_drawn(lambda: (run(value, self.step, self.rows),))
        return None if output is None else (output[0], terms)

    @contextmanager
    def undisturbed(self, *, training: bool) -> Iterator[None]:
        copy = self.copy
        buffers = copy.buffers.swapped_in(copy.buffers.snapshot())
        with calm(copy, lambda _: training), copy.streams.kept(), buffers, copy.precision.computing():
            yield
