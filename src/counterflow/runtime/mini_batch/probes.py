"""Stages as diagnoses run them: losses without effect, and layers one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from counterflow.api.aux_loss import added_losses
from counterflow.api.skip import Carried
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.aux_means import AuxLayer, AuxMeanDiagnosis, Terms, UnitRows
from counterflow.verification.diagnosis.graded_losses import LossProbe
from counterflow.verification.diagnosis.sliced_layers import SlicedLayer, SlicedLayerDiagnosis

from ..messages.values import Unit, Value
from ..stages.aux_loss import split_aux_losses
from ..stages.named_layer import place_of
from ..stages.sample_rows import SampleRows
from ..stages.stage_wrappers import Run
from .loss_output import LossFunction, LossOutput, UnitLoss, elements_in

if TYPE_CHECKING:
    from ..stages.stage import LocalStage


def loss_probe(local_stage: LocalStage, function: LossFunction) -> LossProbe:
    """Loss of the last stage, computed without effect on buffers and random state."""

    def compute(output: Any, target: Any, samples: float, graph: bool) -> tuple[Tensor, UnitLoss]:
        size = elements_in(output)  # before the loss, which may change its arguments
        loss = _probe_loss(local_stage, function, output, target, samples, graph=graph)
        return loss.loss, loss.as_unit_loss(Unit(0), samples, 1.0, size)

    return LossProbe(compute, local_stage.parameters, full_tensor, local_stage.streams.backward)


def _probe_loss(
    local_stage: LocalStage, function: LossFunction, output: Any, target: Any, samples: float, *, graph: bool
) -> LossOutput:
    contents = local_stage.buffers.snapshot()
    mode = torch.set_grad_enabled(graph)
    unchanged = local_stage.buffers.swapped_in(contents)
    with (
        mode,
        added_losses() as terms,
        local_stage.streams.preserved(),
        unchanged,
        local_stage.means.watching(),
    ):
        outcome = local_stage.streams.unless_drawn(lambda: (function(output, target),))
    if local_stage.buffers.snapshot() is not contents:
        local_stage.buffers.restore(contents)
    if outcome is None:
        raise ConfigError("it draws random numbers")
    loss = local_stage.means.read(outcome[0], samples)
    return loss.with_added(terms) if terms else loss


def diagnose_aux(
    diagnosis: AuxMeanDiagnosis, local_stage: LocalStage, value: Value, step: int, rows: SampleRows
) -> None:
    """Diagnose what a stage adds to the loss for a unit.

    Args:
        diagnosis: diagnosis of the mini-batch.
        local_stage: the stage.
        value: copy of the stage's input.
        step: the step's number.
        rows: samples of the unit.

    Raises:
        ConfigError: a term is no mean over samples, or positions.
    """
    unit = UnitRows(rows.stop - rows.start, rows.slice, rows.slices, rows.positions)
    diagnosis.run(_AuxStage(local_stage, step, rows), _layer_input(local_stage, value), unit)


def diagnose_slices(
    diagnosis: SlicedLayerDiagnosis, local_stage: LocalStage, value: Value, step: int, rows: SampleRows
) -> None:
    """Diagnose a stage's layers on a slice, before its forward.

    Args:
        diagnosis: diagnosis of the pipeline.
        local_stage: the stage.
        value: the stage's input.
        step: the step's number.
        rows: samples and positions of the slice.

    Raises:
        ConfigError: a layer computes something else of the whole sequence.
    """
    if not diagnosis.expects(local_stage.stage, value, step, rows):
        return
    with added_losses():
        value = _layer_input(local_stage, value)
        if local_stage.stage == 0:
            value = local_stage.precision.cast_input(value)
        states = [number for _, _, numbers in local_stage.layer_runs() for number in numbers]
        diagnosis.add(_SlicedStage(local_stage, step), _without(value, states), step, rows)


@dataclass(frozen=True, slots=True)
class _ProbedStage:
    local_stage: LocalStage
    step: int

    @property
    def number(self) -> int:
        return self.local_stage.stage


@dataclass(frozen=True, slots=True)
class _SlicedStage(_ProbedStage):
    @property
    def lower_precision(self) -> bool:
        return not self.local_stage.precision.plain

    @property
    def shares_sequences(self) -> bool:
        return self.local_stage.context_guard is not None

    def layers(self) -> Iterator[SlicedLayer]:
        for layer, run, numbers in self.local_stage.layer_runs():
            yield SlicedLayer(place_of(layer), partial(self._run, run, numbers))

    def _run(
        self, run: Run, numbers: Collection[int], value: Value, states: Mapping[int, Any], rows: Any
    ) -> tuple[Value, Mapping[int, Any]] | None:
        if states:
            value = value._replace(skips=value.skips | states)
        output = self.local_stage.streams.unless_drawn(lambda: (run(value, self.step, rows),))
        if output is None:
            return None
        states_out = {number: output[0].skips[number] for number in numbers if number in output[0].skips}
        return _without(output[0], numbers), states_out

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        local_stage = self.local_stage
        norms = {
            id(module) for module, _ in local_stage.buffers.norms
        }  # normalise by their input, as in training
        with (
            _calm(local_stage, lambda module: id(module) in norms),
            local_stage.precision.computing(),
            local_stage.streams.backward(),
        ):
            yield


@dataclass(frozen=True, slots=True)
class _AuxStage(_ProbedStage):
    rows: SampleRows

    @property
    def sharded(self) -> bool:
        return self.local_stage.module is not None

    @property
    def lower_precision(self) -> bool:
        device = self.local_stage.streams.device.type
        return not self.local_stage.precision.plain or torch.is_autocast_enabled(device)

    @property
    def has_batch_norms(self) -> bool:
        return bool(self.local_stage.buffers.norms)

    def layers(self) -> Iterator[AuxLayer]:
        for layer, run, carries in self.local_stage.layer_runs():
            weights = [p for p in layer.module.parameters() if p.requires_grad and not is_dtensor(p)]
            yield AuxLayer(place_of(layer), partial(self._run, run), weights, bool(carries))

    def _run(self, run: Run, value: Value) -> tuple[Value, Terms] | None:
        with added_losses() as terms:
            output = self.local_stage.streams.unless_drawn(lambda: (run(value, self.step, self.rows),))
        return None if output is None else (output[0], terms)

    @contextmanager
    def undisturbed(self, *, training: bool) -> Iterator[None]:
        local_stage = self.local_stage
        buffers = local_stage.buffers.swapped_in(local_stage.buffers.snapshot())
        with (
            _calm(local_stage, lambda _: training),
            local_stage.streams.preserved(),
            buffers,
            local_stage.precision.computing(),
        ):
            yield


@contextmanager
def _calm(local_stage: LocalStage, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Context in which only the modules that ``trains`` selects are in training mode; buffers stay."""
    modules = [module for layer in local_stage.layers for module in layer.module.modules()]
    modes = [module.training for module in modules]
    contents = local_stage.buffers.snapshot()
    try:
        for module in modules:
            module.training = module.training and trains(module)
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        if local_stage.buffers.snapshot() is not contents:
            local_stage.buffers.restore(contents)


def _layer_input(local_stage: LocalStage, value: Value) -> Value:
    value, _ = split_aux_losses(value)
    return Carried(value, {}) if local_stage.skips is not None and type(value) is not Carried else value


def _without(value: Value, numbers: Collection[int]) -> Value:
    if type(value) is not Carried:
        return value
    return Carried(value.value, {n: skip for n, skip in value.skips.items() if n not in numbers})
