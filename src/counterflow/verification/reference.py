"""Training in one process without a pipeline: the reference for every schedule's numbers.

It trains the same model on the same micro-batches (or parts of them, if the schedule divides them), one after
another, without workers or orders. For an asynchronous scheme it stores old weights, and computes each stage
with the version that the scheme's table states for the period.

It is written in plain torch, so an error of the engine is not in both sides of a comparison. Of the engine it
imports how a loss is read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.torch_private import hook_tables, hooks_of
from counterflow.program.segments import segments
from counterflow.runtime.mini_batch.loss_output import LossFunction, LossOutput, read_loss
from counterflow.runtime.mini_batch.mean_losses import MeanLossDetector
from counterflow.schedule.ir import Schedule

from .reference_layers import LOSS, copied_layers, loss_layer, named_layers, placed_layers
from .reference_parts import MicroBatchPart, run_parts, samples_in
from .reference_seeds import RandomSeeds


@dataclass(frozen=True, slots=True)
class Staleness:
    """Weight versions of an asynchronous scheme.

    Attributes:
        cuts: the numbers of the layers with which stages 1, 2, ... begin.
        version: function of number of stages, stage and period that returns the updates that the weights have
            seen; periods and updates count from the last flush.
    """

    cuts: tuple[int, ...]
    version: Callable[[int, int, int], int]

    @classmethod
    def of(cls, schedule: Schedule, cuts: Sequence[int]) -> Staleness | None:
        """Versions with which a schedule's ops compute; None for a synchronous one.

        Raises:
            ConfigError: as of ``VersionTable.of``.
            ScheduleError: as of ``VersionTable.of``.
        """
        return None if schedule.synchronous else cls(tuple(cuts), VersionTable.of(schedule))


@dataclass(frozen=True, slots=True)
class VersionTable:
    """Versions that the ops of an asynchronous schedule compute with.

    Attributes:
        versions: by stage, the version of each period; after the last one all periods are as stale as that.
    """

    versions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> VersionTable:
        """Table of a schedule, in as many periods as a training needs before it repeats them.

        Raises:
            ConfigError: periods are missing.
            ScheduleError: no training can run the schedule; for one, ops of a stage and period compute with
                different versions.
        """
        schedule = segments(schedule).schedule
        table = {(op.stage, schedule.period_of(op)): op.version for op in schedule.ops()}
        stages, periods = range(schedule.stages), range(schedule.periods)
        return cls(tuple(tuple(table[stage, period] for period in periods) for stage in stages))

    def __call__(self, stages: int, stage: int, period: int) -> int:
        """Return the version of a stage in a period."""
        del stages
        versions = self.versions[stage]
        last = min(period, len(versions) - 1)
        return versions[last] + period - last


class ReferenceStep(NamedTuple):
    """Result of a step.

    Attributes:
        number: number of the step, from 0.
        loss: mean over the samples of the mini-batch of all replicas.
        grad_norm: global norm of the gradients before clipping.
        samples: number of samples of all replicas.
        skipped: whether nothing was updated, because a gradient was not finite.
        loss_scale: factor of the losses in their backwards; None: they were not scaled.
    """

    number: int
    loss: float
    grad_norm: float
    samples: int
    skipped: bool = False
    loss_scale: float | None = None


class NamedParameters(list[nn.Parameter]):
    """Parameters for the user's function of an optimiser; ``named`` has their names in the model."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = list(named)
        super().__init__(parameter for _, parameter in self.named)


class Reference:
    """Training in one process.

    Args:
        layers: the model's layers, which are copied, so the same ones can go through a pipeline.
        loss_function: function of the last layer's output and the target that returns the mean loss over the
            samples.
        parts: for each micro-batch of a replica, number of parts in which it runs, each with its own random
            draws.
        optimizer: function that makes an optimiser of parameters.
        scheduler: function that makes a learning-rate scheduler of an optimiser.
        seed: seed of weights on the meta device and of all random draws of the layers.
        clip_norm: maximum global norm of gradients; with ``staleness`` each stage is clipped by its own norm,
            to ``clip_norm / sqrt(stages)``.
        device: device of the computation.
        staleness: which weights each stage computes with; None: the latest.
        autocast: layers and loss run under torch's autocast to it.
        compute_dtype: layers run with weights and inputs cast to it; the loss is of a float32 output.
        scaler: scales losses, and skips updates with gradients that are not finite; None: neither.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss_function: LossFunction,
        parts: Sequence[int],
        *,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        device: torch.device | str = "cpu",
        staleness: Staleness | None = None,
        autocast: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.seeds = RandomSeeds(seed, self.device)
        self._means = MeanLossDetector()
        loss = loss_layer(loss_function)
        self.with_weights = placed_layers(
            copied_layers([*named_layers(layers), *loss]), self.device, self.seeds
        )
        self.layers = self.with_weights[: len(layers)]
        self.loss_function = self.with_weights[-1].module if loss else loss_function
        self.parts = parts
        self.clip_norm = clip_norm
        first_names: dict[nn.Parameter, str] = {}
        for layer in self.with_weights:
            for name, parameter in layer.module.named_parameters():
                first_names.setdefault(parameter, layer.names[name])  # a tied weight once
        self.parameters = NamedParameters(
            (name, p) for p, name in first_names.items() if p.is_floating_point() or p.is_complex()
        )
        self.optimizer = optimizer(self.parameters)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.steps = 0
        self.staleness = staleness
        self._autocast, self._compute_dtype, self._scaler = autocast, compute_dtype, scaler
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        """Hooks, which are called with gradients of the whole mini-batch, after the tables they are from."""
        self._take_hooks()
        cuts = staleness.cuts if staleness else ()
        owner: dict[int, int] = {}
        for index, layer in enumerate(self.with_weights):
            for parameter in layer.module.parameters():
                owner.setdefault(id(parameter), bisect_right(cuts, index))
        self._stage_of = [owner[id(parameter)] for parameter in self.parameters]
        self._history: list[list[Tensor]] = []
        """All parameters, by number of updates since the last flush."""
        self.flush()
        self.gradients: dict[str, Tensor] = {}
        """Gradients of the last update, clipped, by ``<layer>.<name>``."""

    def step(self, batches: Sequence[tuple[Any, Any]]) -> ReferenceStep:
        """Train on the mini-batches (inputs, targets) of all replicas."""
        total = sum(samples_in(inputs) for inputs, _ in batches)
        losses, weights = [], []
        self._use_old_weights()
        with self.seeds.restored():
            for part in run_parts(batches, self.parts):
                output = self._loss(part, seeded=True)
                loss = output.loss * (part.size / total if output.weight is None else 1 / total)
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
                losses.append(float(loss.detach()))
                weights += [] if output.weight is None else [float(output.weight)]
        scale = total / math.fsum(weights) if weights else 1.0
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            if parameter.grad is not None and scale != 1.0:
                parameter.grad.mul_(scale)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        self._call_hooks()
        norm, gradients = self._clip(), self._named_gradients()
        finite = all(map(math.isfinite, losses))  # fsum rejects infinities of both signs
        result = ReferenceStep(
            self.steps, scale * (math.fsum(losses) if finite else sum(losses)), norm, total
        )
        if self._scaler is not None:
            result = self._update_scaled(self._scaler, result)
        else:
            self.optimizer.step()
        if not result.skipped:
            self.gradients = gradients
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.staleness is not None:
            self._history.append([parameter.detach().clone() for parameter in self.parameters])
        return result

    def _update_scaled(self, scaler: torch.amp.GradScaler, result: ReferenceStep) -> ReferenceStep:
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
        norm = math.nan if skipped else result.grad_norm
        return result._replace(grad_norm=norm, skipped=skipped, loss_scale=before)

    def _named_gradients(self) -> dict[str, Tensor]:
        first: dict[nn.Parameter, str] = {}
        for layer in self.with_weights:
            for name, p in layer.module.named_parameters():
                first.setdefault(p, layer.names[name])  # a tied weight once, as in a pipeline
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p, name in first.items()
            if p.requires_grad
        }

    def flush(self) -> None:
        """Restart the count of versions; the current weights are version 0."""
        self._history = [[parameter.detach().clone() for parameter in self.parameters]]

    def _use_old_weights(self) -> None:
        if self.staleness is None:
            return
        stages, period = len(self.staleness.cuts) + 1, len(self._history) - 1
        with torch.no_grad():
            for number, (parameter, stage) in enumerate(zip(self.parameters, self._stage_of, strict=True)):
                version = self.staleness.version(stages, stage, period)
                parameter.copy_(self._history[version][number])

    def _call_hooks(self) -> None:
        if self.staleness is not None:
            with torch.no_grad():
                for parameter, latest in zip(self.parameters, self._history[-1], strict=True):
                    parameter.copy_(latest)
        while self._hooks:
            table, hooks = self._hooks.pop()
            table.update({**hooks, **{key: table.pop(key) for key in list(table)}})
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            before, after = hooks_of(parameter)
            with torch.no_grad():
                gradient = parameter.grad
                for hook in before:
                    result = hook(gradient)
                    gradient = gradient if result is None else result
                parameter.grad = gradient
                for hook in after:
                    hook(parameter)
        self._take_hooks()

    def _take_hooks(self) -> None:
        # Autograd would call parameters' hooks in each backward.
        for parameter in self.parameters:
            for table in hook_tables(parameter):
                if table:
                    self._hooks.append((table, dict(table)))
                    table.clear()

    def _clip(self) -> float:
        squares = [0.0 if p.grad is None else _squares(p.grad) for p in self.parameters]
        norm = math.sqrt(sum(squares))
        for parameter, stage in zip(self.parameters, self._stage_of, strict=True):
            if self.staleness is None:
                factor = _clip_factor(norm, self.clip_norm)
            else:
                limit = self.clip_norm and self.clip_norm / math.sqrt(len(self.staleness.cuts) + 1)
                of_stage = [s for s, number in zip(squares, self._stage_of, strict=True) if number == stage]
                factor = _clip_factor(math.sqrt(sum(of_stage)), limit)
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return norm  # before clipping

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """The mean loss, without gradients."""
        total = sum(samples_in(inputs) for inputs, _ in batches)
        losses, weights = [], []
        with torch.no_grad(), _evaluating([layer.module for layer in self.with_weights]):
            for part in run_parts(batches, (1,) * len(self.parts)):
                output = self._loss(part, seeded=False)
                losses.append(float(output.loss) * (part.size / total if output.weight is None else 1.0))
                weights += [] if output.weight is None else [float(output.weight)]
        return math.fsum(losses) / (math.fsum(weights) if weights else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by ``<layer>.<name>``."""
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for layer in self.with_weights
            for name, value in layer.state().items()
        }

    def _loss(self, part: MicroBatchPart, *, seeded: bool) -> LossOutput:
        inputs, targets = pytree.tree_map_only(Tensor, self._on_device, (part.inputs, part.targets))
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return self._loss_within(inputs, targets, part, seeded=seeded)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _loss_within(self, inputs: Any, targets: Any, part: MicroBatchPart, *, seeded: bool) -> LossOutput:
        lower, value = self._compute_dtype, inputs
        if lower is not None:
            value = pytree.tree_map_only(Tensor, lambda tensor: _cast(tensor, lower), value)
        with added_losses() as terms:
            for layer in self.layers:
                if seeded:
                    self.seeds.seed_layer(layer.index, self.steps, part)
                value = layer.module(value) if lower is None else _lowered(layer.module, lower, value)
            if lower is not None:
                value = pytree.tree_map_only(Tensor, Tensor.float, value)
            if seeded:
                self.seeds.seed_layer(LOSS, self.steps, part)
            with self._means.watching():
                output = self.loss_function(value, targets)
        if self.staleness is None:
            return self._means.read(output, part.size).with_added(terms)
        loss = read_loss(output)
        return (loss if loss.weight is None else LossOutput(loss.loss / loss.weight)).with_added(terms)


def _squares(gradient: Tensor) -> float:
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return float(numbers.double().square().sum())


def _clip_factor(norm: float, limit: float | None) -> float:
    # as torch.nn.utils.clip_grad_norm_ computes it
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    modes = [(child, child.training) for module in modules for child in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _lowered(layer: nn.Module, dtype: torch.dtype, value: Any) -> Any:
    # Norms with running statistics compute in the precision of these, which are never cast.
    uncast = {
        id(weight)
        for module in layer.modules()
        if getattr(module, "track_running_stats", False)
        for weight in module.parameters(recurse=False)
    }
    weights = {
        name: weight if id(weight) in uncast else _cast(weight, dtype)
        for name, weight in layer.named_parameters()
    }
    return functional_call(layer, weights, (value,))
