"""Training in one process without a pipeline: the reference for every schedule's numbers.

It trains the same model on the same micro-batches (or parts of them, if the schedule divides them), one after
another, with the same random streams, without workers or orders. For an asynchronous scheme it stores old
weights, and computes each stage with the version that the scheme's table states for the period.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from counterflow.api.aux_loss import added_losses
from counterflow.errors import ConfigError
from counterflow.runtime.execution.step import Step
from counterflow.runtime.messages.values import Unit
from counterflow.runtime.mini_batch.losses import LossFunction, LossOutput, added, read_loss
from counterflow.runtime.mini_batch.mean_losses import MeanLossDetector
from counterflow.runtime.mini_batch.samples import cut, moved, samples_in, split_points
from counterflow.runtime.parameters.gradients import clip_factor, real, unique
from counterflow.runtime.parameters.hooks import Hooks, called
from counterflow.runtime.parameters.optimizers import MakeOptimizer, MakeScheduler, Parameters
from counterflow.runtime.stages.layers import state_names
from counterflow.runtime.stages.materialization import materialised
from counterflow.runtime.stages.named_layer import LOSS, NamedLayer, loss_layer
from counterflow.runtime.stages.ownership import copied
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.stages.recomputation import mapped
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.stage import evaluating
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule


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
        """Versions that a schedule's scheme states; None for a synchronous one.

        Raises:
            ConfigError: the scheme states none.
        """
        if schedule.synchronous:
            return None
        scheme = registry.find(schedule.scheme)
        rule = None if scheme is None else scheme.version_rule(dict(schedule.options))
        if rule is None:
            raise ConfigError(
                f"no table says which weights {schedule.scheme} computes with; verify a scheme that states "
                "its versions"
            )
        return cls(tuple(cuts), rule)


def parts_of(schedule: Schedule) -> tuple[int, ...]:
    """The number of parts in which a schedule's backwards run each micro-batch.

    >>> from counterflow.schedule import schemes
    >>> parts_of(schemes.chimera(2, 2, concat="backward-halving"))
    (2, 2)
    """
    found = [1] * schedule.micro_batches
    if schedule.workload.slices > 1:  # one process runs the whole sequence
        return tuple(found)
    for op in schedule.ops():
        if not op.kind.whole:
            found[op.micro_batches[0] % schedule.micro_batches] = op.parts
    return tuple(found)


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
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        device: torch.device | str = "cpu",
        staleness: Staleness | None = None,
        autocast: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.streams = RandomStreams(seed, self.device)
        self._means = MeanLossDetector()
        named = [
            NamedLayer(index, names, layer)
            for index, (layer, names) in enumerate(zip(layers, state_names(layers), strict=True))
        ]
        loss = loss_layer(loss_function)
        memo: dict[int, Any] = {}
        mine = [
            replace(layer, module=copied(layer.module, memo))
            for layer in (named if loss is None else [*named, loss])
        ]
        made = materialised(mine, self.device, self.streams)
        self.layers = made[: len(named)]
        self.with_weights = made
        self.loss_function = loss_function if loss is None else made[-1].module
        self.parts = parts
        self.clip_norm = clip_norm
        pairs = (
            (layer.names[n], p) for layer in self.with_weights for n, p in layer.module.named_parameters()
        )
        self.parameters = Parameters(unique(pairs, set()).items())
        self.optimizer = optimizer(self.parameters)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.steps = 0
        self.staleness = staleness
        self._autocast, self._compute_dtype, self._scaler = autocast, compute_dtype, scaler
        self._hooks = Hooks(self.parameters)
        self._hooks.take()
        """Hooks, which are called with the gradients of the whole mini-batch."""
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

    def step(self, batches: Sequence[tuple[Any, Any]]) -> Step:
        """Train on the mini-batches (inputs, targets) of all replicas."""
        total = sum(samples_in(inputs) for inputs, _ in batches)
        losses, weights = [], []
        self._take_old_weights()
        with self.streams.step():
            for rows, inputs, targets in self._pieces(batches, self.parts):
                found = self._loss(inputs, targets, rows)
                samples = rows.stop - rows.start
                loss = found.loss * (samples / total if found.weight is None else 1 / total)
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
                losses.append(float(loss.detach()))
                weights += [] if found.weight is None else [float(found.weight)]
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
        made = Step(self.steps, scale * added(losses), norm, total, 0.0, self.steps)
        if self._scaler is not None:
            made = self._scaled(self._scaler, made)
        else:
            self.optimizer.step()
        if not made.skipped:
            self.gradients = gradients
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.staleness is not None:
            self._history.append([parameter.detach().clone() for parameter in self.parameters])
        return made

    def _scaled(self, scaler: torch.amp.GradScaler, made: Step) -> Step:
        """Update, unless a gradient is not finite; what is reported of it."""
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
        norm = math.nan if skipped else made.grad_norm
        return replace(made, grad_norm=norm, skipped=skipped, loss_scale=before)

    def _named_gradients(self) -> dict[str, Tensor]:
        """Gradients as an update uses them."""
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

    def _take_old_weights(self) -> None:
        """Set the model to the weights that the step's forwards and backwards use."""
        if self.staleness is None:
            return
        stages, period = len(self.staleness.cuts) + 1, len(self._history) - 1
        with torch.no_grad():
            for number, (parameter, stage) in enumerate(zip(self.parameters, self._stage_of, strict=True)):
                version = self.staleness.version(stages, stage, period)
                parameter.copy_(self._history[version][number])

    def _call_hooks(self) -> None:
        """Call hooks with the gradients and the weights that these will change."""
        if self.staleness is not None:
            with torch.no_grad():
                for parameter, latest in zip(self.parameters, self._history[-1], strict=True):
                    parameter.copy_(latest)
        self._hooks.give_back()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = called(parameter, parameter.grad)
        self._hooks.take()

    def _clip(self) -> float:
        """Clip the gradients; return the norm before."""
        squares = [
            0.0 if p.grad is None else float(real(p.grad).double().square().sum()) for p in self.parameters
        ]
        norm = math.sqrt(sum(squares))
        for parameter, stage in zip(self.parameters, self._stage_of, strict=True):
            if self.staleness is None:
                factor = clip_factor(norm, self.clip_norm)
            else:
                limit = self.clip_norm and self.clip_norm / math.sqrt(len(self.staleness.cuts) + 1)
                of_stage = [s for s, other in zip(squares, self._stage_of, strict=True) if other == stage]
                factor = clip_factor(math.sqrt(sum(of_stage)), limit)
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return norm

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """The mean loss, without gradients."""
        total = sum(samples_in(inputs) for inputs, _ in batches)
        losses, weights = [], []
        with torch.no_grad(), evaluating(layer.module for layer in self.with_weights):
            for rows, inputs, targets in self._pieces(batches, (1,) * len(self.parts)):
                found = self._loss(inputs, targets, None)
                samples = rows.stop - rows.start
                losses.append(float(found.loss) * (samples / total if found.weight is None else 1.0))
                weights += [] if found.weight is None else [float(found.weight)]
        return math.fsum(losses) / (math.fsum(weights) if weights else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by ``<layer>.<name>``."""
        return {
            layer.names[name]: value.detach().clone() if isinstance(value, Tensor) else value
            for layer in self.with_weights
            for name, value in layer.state().items()
        }

    @staticmethod
    def _pieces(
        batches: Sequence[tuple[Any, Any]], every: Sequence[int]
    ) -> Iterator[tuple[SampleRows, Any, Any]]:
        """Samples, inputs and targets of each part of every micro-batch, if it has samples."""
        count = len(every)
        for replica, (inputs, targets) in enumerate(batches):
            points = split_points(samples_in(inputs), count)
            for m, parts in enumerate(every):
                samples = points[m + 1] - points[m]
                for part in range(parts):
                    its = Unit(m, part, parts).rows(samples)
                    if its.start == its.stop:
                        continue
                    rows = SampleRows(replica * count + m, samples, its.start, its.stop)
                    piece = slice(points[m] + its.start, points[m] + its.stop)
                    yield rows, cut(inputs, piece), cut(targets, piece)

    def _loss(self, inputs: Any, targets: Any, drawn: SampleRows | None) -> LossOutput:
        inputs, targets = moved(inputs, self.device), moved(targets, self.device)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return self._loss_within(inputs, targets, drawn)

    def _loss_within(self, inputs: Any, targets: Any, drawn: SampleRows | None) -> LossOutput:
        lower = self._compute_dtype
        value: Any = inputs if lower is None else mapped(partial(_in_place_of, dtype=lower), inputs)

        def drawing(index: int) -> AbstractContextManager[Any]:
            return nullcontext() if drawn is None else self.streams.layer(index, self.steps, drawn)

        with added_losses() as added:
            for layer in self.layers:
                module = layer.module if lower is None else partial(_lowered, layer.module, lower)
                with drawing(layer.index):
                    value = module(value)
            value = value if lower is None else mapped(Tensor.float, value)
            with self._means.watching(), drawing(LOSS):
                output = self.loss_function(value, targets)
        if self.staleness is None:
            return self._means.read(output, samples_in(inputs)).with_added(added)
        found = read_loss(output)
        return (found if found.weight is None else LossOutput(found.loss / found.weight)).with_added(added)


def _in_place_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _lowered(layer: nn.Module, dtype: torch.dtype, value: Any) -> Any:
    """Output of a layer with weights cast to a lower precision."""
    weights = {name: _in_place_of(weight, dtype) for name, weight in layer.named_parameters()}
    return functional_call(layer, weights, (value,))
