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


def loss_probe(copy: LocalStage, function: LossFunction) -> LossProbe:
    """Loss of the last stage, computed without effect on buffers and random state."""

    def compute(output: Any, target: Any, samples: float, graph: bool) -> tuple[Tensor, UnitLoss]:
        size = elements_in(output)  # before the loss, which may change its arguments
        loss = _probe_loss(copy, function, output, target, samples, graph=graph)
        return loss.loss, loss.as_unit_loss(Unit(0), samples, 1.0, size)

    return LossProbe(compute, copy.parameters, full_tensor)


def _probe_loss(
    copy: LocalStage, function: LossFunction, output: Any, target: Any, samples: float, *, graph: bool
) -> LossOutput:
    contents = copy.buffers.snapshot()
    mode = torch.set_grad_enabled(graph)
    unchanged = copy.buffers.swapped_in(contents)
    with mode, added_losses() as terms, copy.streams.preserved(), unchanged, copy.means.watching():
        outcome = copy.streams.unless_drawn(lambda: (function(output, target),))
    if copy.buffers.snapshot() is not contents:
        copy.buffers.restore(contents)
    if outcome is None:
        raise ConfigError("it draws random numbers")
    loss = copy.means.read(outcome[0], samples)
    return loss.with_added(terms) if terms else loss


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
    diagnosis.run(_AuxStage(copy, step, rows), _layer_input(copy, value), unit)


def diagnose_slices(
    diagnosis: SlicedLayerDiagnosis, copy: LocalStage, value: Value, step: int, rows: SampleRows
) -> None:
    """Diagnose a stage's layers on a slice, before its forward.

    Args:
        diagnosis: diagnosis of the pipeline.
        copy: the stage.
        value: the stage's input.
        step: the step's number.
        rows: samples and positions of the slice.

    Raises:
        ConfigError: a layer computes something else of the whole sequence.
    """
    if not diagnosis.expects(copy.stage, value, step, rows):
        return
    with added_losses():
        value = _layer_input(copy, value)
        if copy.stage == 0:
            value = copy.precision.cast_input(value)
        states = [number for _, _, numbers in copy.layer_runs() for number in numbers]
        diagnosis.add(_SlicedStage(copy, step), _without(value, states), rows)


@dataclass(frozen=True, slots=True)
class _ProbedStage:
    copy: LocalStage
    step: int

    @property
    def number(self) -> int:
        return self.copy.stage


@dataclass(frozen=True, slots=True)
class _SlicedStage(_ProbedStage):
    @property
    def lower_precision(self) -> bool:
        return not self.copy.precision.plain

    @property
    def shares_sequences(self) -> bool:
        return self.copy.context_guard is not None

    def layers(self) -> Iterator[SlicedLayer]:
        for layer, run, numbers in self.copy.layer_runs():
            yield SlicedLayer(place_of(layer), partial(self._run, run, numbers))

    def _run(
        self, run: Run, numbers: Collection[int], value: Value, states: Mapping[int, Any], rows: Any
    ) -> tuple[Value, Mapping[int, Any]] | None:
        if states:
            value = value._replace(skips=value.skips | states)
        output = self.copy.streams.unless_drawn(lambda: (run(value, self.step, rows),))
        if output is None:
            return None
        states_out = {number: output[0].skips[number] for number in numbers if number in output[0].skips}
        return _without(output[0], numbers), states_out

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        copy = self.copy
        norms = {id(module) for module, _ in copy.buffers.norms}  # normalise by their input, as in training
        with _calm(copy, lambda module: id(module) in norms), copy.precision.computing():
            yield


@dataclass(frozen=True, slots=True)
class _AuxStage(_ProbedStage):
    rows: SampleRows

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
        with _calm(copy, lambda _: training), copy.streams.preserved(), buffers, copy.precision.computing():
            yield


@contextmanager
def _calm(copy: LocalStage, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Context in which only the modules that ``trains`` selects are in training mode; buffers stay."""
    modules = [module for layer in copy.layers for module in layer.module.modules()]
    modes = [module.training for module in modules]
    contents = copy.buffers.snapshot()
    try:
        for module in modules:
            module.training = module.training and trains(module)
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        if copy.buffers.snapshot() is not contents:
            copy.buffers.restore(contents)


def _layer_input(copy: LocalStage, value: Value) -> Value:
    value, _ = split_aux_losses(value)
    return Carried(value, {}) if copy.skips is not None and type(value) is not Carried else value


def _without(value: Value, numbers: Collection[int]) -> Value:
    if type(value) is not Carried:
        return value
    return Carried(value.value, {n: skip for n, skip in value.skips.items() if n not in numbers})
