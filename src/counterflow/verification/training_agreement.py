"""The same training by a pipeline and by one process, and the difference of their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from counterflow.capture.estimates import estimated_costs
from counterflow.capture.model_layers import layers_of
from counterflow.common.tensors.devices import autocast_type
from counterflow.common.tensors.dtypes import as_real, dtype_of
from counterflow.common.tensors.module_copies import copy_module
from counterflow.execution import Batching, Execution, Flat, records
from counterflow.program.checker import checked_program
from counterflow.runtime.execution.step import Step
from counterflow.runtime.mini_batch.loss_output import LossFunction
from counterflow.runtime.parameters.optimizers import MakeOptimizer, MakeScheduler
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.kinds import kind_of
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.cuts import balance, explicit
from counterflow.schedule.ir import Schedule

from .diagnosis.tolerances import COMPRESSED_TRAININGS, TRAININGS
from .reference import Reference, ReferenceStep, Staleness
from .reference_parts import parts_of

SMALL = 1e-3
"""Errors of a tensor are relative to its own largest value, or to this share of that of all tensors:
what is zero but for rounding (a key's bias has no gradient) has no digits to agree in."""

MiniBatches = Sequence[Sequence[tuple[Any, Any]]]
"""Inputs and targets by step and replica."""

StepProgress: TypeAlias = Callable[[int, int, str], None]
"""Called with the number of steps made, all steps, and the name of what makes them."""


@dataclass(frozen=True, slots=True)
class TrainingAgreement:
    """The largest relative errors over all steps, and their tolerance.

    Attributes:
        loss_error: error of the loss of any step, and of an evaluation after the last.
        norm_error: error of the gradients' global norm before clipping.
        gradient_error: error of any parameter's gradient in the last step.
        weight_error: error of any parameter or buffer after the last step.
        tolerance: maximum of each error.
    """

    loss_error: float
    norm_error: float
    gradient_error: float
    weight_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if everything agrees."""
        errors = self.loss_error, self.norm_error, self.gradient_error, self.weight_error
        return all(error <= self.tolerance for error in errors)

    def __str__(self) -> str:
        errors = (
            f"loss {self.loss_error:.1e}, norm {self.norm_error:.1e}, gradients {self.gradient_error:.1e}"
        )
        text = f"{errors}, weights {self.weight_error:.1e}; within {self.tolerance:g}"
        return f"Agreement: they {'agree' if self.ok else 'DIFFER'} ({text})"


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of a training."""

    steps: Sequence[Step | ReferenceStep]
    evaluation: float
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def verify(
    schedule: Schedule,
    layers: Sequence[nn.Module],
    loss_function: LossFunction,
    batches: MiniBatches,
    *,
    optimizer: MakeOptimizer,
    scheduler: MakeScheduler | None = None,
    transport: str = "local",
    timeout_seconds: float = 120.0,
    device: str = "cpu",
    flush_after: Sequence[int] = (),
    reference: TrainingResult | None = None,
    progress: StepProgress | None = None,
    execution: Execution | None = None,
    batching: Batching | None = None,
    **options: Any,
) -> TrainingAgreement:
    """Train with one process and with a pipeline, and compare.

    One process sums gradients in full. With ``gradient_compression`` errors in float32 are those of the form:
    5 % of a tensor's largest value are accepted for ``bfloat16`` and 40 % for ``int8``. Adam's updates are as
    large for small gradients as for large ones, so that weights may differ more than gradients do.

    Args:
        schedule: what the pipeline executes.
        layers: the model; not changed.
        loss_function: function of the last layer's output and the target that returns the mean loss over the
            samples. With processes it and the functions below must be importable by name.
        batches: mini-batches by step and replica; as many replicas as the first step has.
        optimizer: function that makes an optimiser of parameters.
        scheduler: function that makes a learning-rate scheduler of an optimiser.
        transport: name of a transport, as in ``launch``.
        timeout_seconds: seconds that a worker waits for another.
        device: device of the computation.
        flush_after: the steps after which the pipeline is flushed; it always is after the last.
        reference: result of ``one_process`` for the same arguments, if available.
        progress: called after each step of one process, and of the first worker if it is a thread.
        execution: how the pipeline executes the schedule; one process clips and computes in the same way.
        batching: how mini-batches are cut.
        options: fields of these two records, and further arguments of ``Pipeline``.

    Raises:
        ConfigError: the pipeline cannot run this.
        WorkerError: a worker failed.
    """
    replicas = len(batches[0])
    flat = {name: options.pop(name) for name in [*options] if name in Flat.__annotations__}
    stated_options = set() if execution is None else execution.model_fields_set
    usual = {"digest_every": 1, "timeout_seconds": timeout_seconds}
    flat = {name: value for name, value in usual.items() if name not in stated_options} | flat
    execution, batching = records(execution, batching, flat)
    lower = execution.computes_in
    # Sums in low precision depend on the number of threads.
    threads = 1 if lower else None
    if schedule.synchronous:
        checked_program(schedule, replicas=replicas)
    if reference is None:
        modules = layers_of(list(layers))
        if (cuts := options.get("cuts")) is not None:
            cuts = explicit(cuts, len(modules), schedule.stages)
        else:
            cuts = balance(options.get("costs") or estimated_costs(modules), schedule.stages)
        with _threads(threads):
            reference = one_process(
                layers,
                loss_function,
                parts_of(schedule),
                batches,
                optimizer=optimizer,
                scheduler=scheduler,
                seed=execution.seed,
                clip_norm=execution.max_norm,
                device=device,
                staleness=Staleness.of(schedule, cuts),
                flush_after=flush_after,
                autocast=dtype_of(execution.autocast),
                compute_dtype=dtype_of(execution.compute_dtype),
                scaler=_scaler(execution, torch.device(device)),
                progress=progress,
            )
    trained = list(layers)
    if kind_of(transport).threads:  # threads train the modules that they are given
        memo: dict[int, Any] = {}
        trained = [copy_module(layer, memo) for layer in layers]
        if isinstance(loss_function, nn.Module):
            loss_function = copy_module(loss_function, memo)
    results: list[TrainingResult] = launch(
        _train,
        schedule,
        trained,
        loss_function,
        batches,
        {
            "optimizer": optimizer,
            "scheduler": scheduler,
            "execution": execution,
            "batching": batching,
            "flush_after": tuple(flush_after),
            "progress": progress if kind_of(transport).threads else None,
            **options,
        },
        workers=schedule.workers * replicas,
        transport=transport,
        device=device,
        timeout_seconds=timeout_seconds,
        threads=threads,
    )
    agreement = compare(reference, results)
    if execution.gradient_compression is None or agreement.tolerance != TRAININGS.float32:
        return agreement  # gradients in float64 are summed in full
    return replace(agreement, tolerance=COMPRESSED_TRAININGS[execution.gradient_compression])


def _scaler(execution: Execution, device: torch.device) -> torch.amp.GradScaler | None:
    first, interval = execution.first_scale, execution.loss_scale_interval
    if first is None:
        return None
    return torch.amp.GradScaler(autocast_type(device), init_scale=first, growth_interval=interval)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_process(
    layers: Sequence[nn.Module],
    loss_function: LossFunction,
    parts: Sequence[int],
    batches: MiniBatches,
    *,
    flush_after: Sequence[int] = (),
    progress: StepProgress | None = None,
    **options: Any,
) -> TrainingResult:
    """Train with one process; see ``Reference`` for the options."""
    training = Reference(layers, loss_function, parts, **options)
    steps = []
    for number, row in enumerate(batches):
        steps.append(training.step(row))
        if progress is not None:
            progress(number + 1, 2 * len(batches), "one process")
        if number in flush_after:
            training.flush()
    evaluation = training.evaluate(batches[0])
    return TrainingResult(steps, evaluation, training.gradients, training.state_dict())


def _train(
    schedule: Schedule,
    layers: list[nn.Module],
    loss_function: LossFunction,
    batches: MiniBatches,
    options: Mapping[str, Any],
) -> TrainingResult:
    options = dict(options)
    flush_after, progress = options.pop("flush_after"), options.pop("progress", None)
    pipeline = Pipeline(layers, loss_function, schedule, **options)
    pipeline.keeps_gradients = True
    steps_and_updates = []
    for number, row in enumerate(batches):
        steps_and_updates.append(pipeline.step(*row[pipeline.replica]))
        if progress is not None and not pipeline.transport.rank:
            progress(len(batches) + number + 1, 2 * len(batches), "the pipeline")
        if number in flush_after:
            steps_and_updates += pipeline.flush()
    steps_and_updates += pipeline.flush()
    steps = [step for step in steps_and_updates if step.reports_step is not None]
    evaluation = pipeline.evaluate(*batches[0][pipeline.replica]).loss
    return TrainingResult(steps, evaluation, pipeline.gradients, pipeline.model_state_dict())


def compare(reference: TrainingResult, results: Sequence[TrainingResult]) -> TrainingAgreement:
    """The largest errors over the results of all workers.

    Raises:
        KeyError: no worker has a gradient that is nonzero in one process, or a state lacks a name.
    """
    with_gradients = set().union(*(worker.gradients for worker in results))
    # A gradient that a hook has removed is absent there and zero here.
    for name, gradient in reference.gradients.items():
        if name not in with_gradients and gradient.any():
            raise KeyError(f"no worker has a gradient of {name}")
    dtypes = [gradient.dtype.to_real() for gradient in reference.gradients.values()]  # none: all was skipped
    losses, norms, gradients, weights = [], [], [], []
    for worker in results:
        for step, expected in zip(worker.steps, reference.steps, strict=True):
            if (step.skipped, step.loss_scale) != (expected.skipped, expected.loss_scale):
                losses.append(math.inf)
            if not expected.skipped or math.isfinite(expected.loss):
                losses.append(_relative(step.loss, expected.loss))
            if not expected.skipped:
                norms.append(_relative(step.grad_norm, expected.grad_norm))
        losses.append(_relative(worker.evaluation, reference.evaluation))
        gradients.append(_largest(worker.gradients, reference.gradients))
        weights.append(_largest(worker.state, reference.state))
        missing = reference.state.keys() - worker.state.keys()
        if missing:
            raise KeyError(f"the pipeline's state has no {min(missing)}")
    tolerance = TRAININGS.of(dtypes[0] if dtypes else torch.float32)
    return TrainingAgreement(_worst(losses), _worst(norms), _worst(gradients), _worst(weights), tolerance)


def _worst(errors: Sequence[float]) -> float:
    # ``max`` ignores NaN.
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def _relative(got: float, expected: float) -> float:
    return abs(got - expected) / max(abs(expected), 1e-30)


def _largest(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    got, expected = (
        {n: t for n, t in tensors.items() if isinstance(t, Tensor)} for tensors in (got, expected)
    )
    floor = SMALL * max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    errors = []
    for name, tensor in got.items():
        expected_tensor = expected[name].to(tensor.device)
        if tensor.numel():
            scale = max(float(expected_tensor.abs().max()), floor, 1e-30)
            difference = as_real(tensor).double() - as_real(expected_tensor).double()
            errors.append(float(difference.abs().max()) / scale)
    return _worst(errors)
