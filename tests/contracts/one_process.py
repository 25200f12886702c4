"""Plain torch on one process: what a pipeline with the same features has to compute.

Of Counterflow it uses only what a user's layer and loss import, and the versions that an asynchronous scheme
publishes; nothing of the engine, so that a fault of the engine is not in both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import counterflow as cf
from counterflow.schedule import registry
from counterflow.schedule.registry import schedule_of

from .features import DECAY, Case, Normed


@dataclass
class Training:
    """Numbers of a training.

    Attributes:
        losses: by step.
        state: weights and buffers after it.
        average: of the weights; empty without one.
        evaluation: loss of a mini-batch with the model as it is then.
    """

    losses: list[float]
    state: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    evaluation: float


class OneProcess:
    """A trainer of a case.

    Args:
        case: features of the training.
        cuts: first layers of stages 1, 2, ..., which matter to asynchronous schemes.
    """

    def __init__(self, case: Case, cuts: Sequence[int]) -> None:
        self.case, self.cuts = case, cuts
        self.schedule = schedule_of(case.schedule, {})
        self.model = nn.Sequential(*case.layers())
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = case.optimizer(self.weights)
        self.scheduler = case.scheduler(self.optimizer) if case.scheduler else None
        options = case.options
        self.lower = options.get("compute_dtype")
        self.autocast = options.get("autocast")
        self.clip_norm = options.get("clip_norm", math.inf)
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=options.get("loss_scale", 1.0),
            growth_interval=options.get("loss_scale_interval", 1),
            enabled="loss_scale" in options,
        )
        decay = get_ema_multi_avg_fn(DECAY)
        self.average = AveragedModel(self.model, multi_avg_fn=decay) if case.largest("ema") else None
        self.statistics = RunningStatistics(self.model, deferred="deferred_batch_norm" in options)
        self.flush()

    def flush(self) -> None:
        """Count versions of the weights from here."""
        self.versions = [[weight.detach().clone() for weight in self.weights]]

    def train(self, steps: Sequence[int]) -> list[float]:
        """Losses of some steps."""
        losses = []
        collected: list[float] = []
        for step in steps:
            self._stale()
            losses.append(self._gradients(step, collected))
            if (step + 1) % self.case.largest("together") == 0:
                self._update(math.fsum(collected))
                collected.clear()
        self.flush()
        return losses

    def evaluate(self, step: int) -> float:
        self.model.eval()
        with torch.no_grad():
            parts = [(float(loss), weight) for copy in self._copies(step) for loss, weight in copy]
        self.model.train()
        return math.fsum(loss for loss, _ in parts) / math.fsum(weight for _, weight in parts)

    def training(self, losses: list[float], step: int) -> Training:
        """All numbers; the evaluation is of the step's mini-batch."""
        average = {} if self.average is None else self.average.module.state_dict()
        return Training(losses, self.model.state_dict(), average, self.evaluate(step))

    # -- a step

    def _copies(self, step: int) -> Iterator[Iterator[tuple[Tensor, float]]]:
        """Weighted loss and weight of every micro-batch, by copy of the stages."""
        count = 2 if self.case.scheme.two_directions else 1
        for replica in range(self.case.replicas):
            x, y = self.case.batch(step, replica)
            pairs = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
            for copy in range(count):
                yield self._parts(pairs[copy * 4 // count : (copy + 1) * 4 // count])

    def _parts(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, float]]:
        halves = 2 if self.model.training and "backward-halving" in self.case.schedule else 1
        for pair in pairs:
            for x, y in zip(*(rows.tensor_split(halves) for rows in pair), strict=True):
                if len(x):
                    yield self._loss(x, y)

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        with (
            torch.autocast("cpu", self.autocast) if self.autocast else nullcontext(),
            cf.added_losses() as added,
        ):
            loss = self.case.loss(self._output(x), y)
        extra = sum(added.values())
        if isinstance(loss, cf.LossSum):
            return loss.sum + float(loss.weight) * extra, float(loss.weight)
        return len(x) * (loss + extra), float(len(x))

    def _output(self, x: Tensor) -> Any:
        if self.lower is None:
            return self.model(x)
        uncast = {  # norms compute in the precision of their running statistics
            id(weight)
            for module in self.model.modules()
            if getattr(module, "track_running_stats", False)
            for weight in module.parameters(recurse=False)
        }
        tensors = {
            name: weight.to(weight.dtype if id(weight) in uncast else self.lower)
            for name, weight in self.model.named_parameters()
        }
        return torch.func.functional_call(self.model, tensors, (x.to(self.lower),)).float()

    def _gradients(self, step: int, collected: list[float]) -> float:
        """Add up a step's gradients, without the division by its weight; return its loss."""
        loss = total = 0.0
        self.statistics.begin()
        for parts in self._copies(step):
            for part, weight in parts:
                self.scaler.scale(part).backward()
                loss, total = loss + part.item(), total + weight
            self.statistics.end_copy()
        self.statistics.end()
        collected.append(total)
        return loss / total

    def _update(self, total: float) -> None:
        self._latest()
        self.scaler.unscale_(self.optimizer)
        for weight in self.weights:
            if weight.grad is not None:
                weight.grad /= total
        skip = not all(w.grad is None or bool(w.grad.isfinite().all()) for w in self.weights)
        self._clip()
        before = self.scaler.get_scale()
        if self.scaler.is_enabled() or not skip:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        skip = self.scaler.get_scale() < before if self.scaler.is_enabled() else skip
        self.optimizer.zero_grad()
        if not skip:
            if self.scheduler is not None:
                self.scheduler.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
        self.versions.append([weight.detach().clone() for weight in self.weights])

    def _clip(self) -> None:
        """By the norm of the whole gradient, or of each stage in an asynchronous scheme."""
        stages: dict[int, list[nn.Parameter]] = {}
        for weight, stage in zip(self.weights, self._stages(), strict=True):
            stages.setdefault(0 if self.schedule.synchronous else stage, []).append(weight)
        limit = self.clip_norm / (1 if self.schedule.synchronous else math.sqrt(self.schedule.stages))
        if math.isfinite(limit):
            for weights in stages.values():
                nn.utils.clip_grad_norm_(weights, limit)

    def _stages(self) -> list[int]:
        of = {
            id(p): bisect_right(self.cuts, at)
            for at, layer in enumerate(self.model)
            for p in layer.parameters()
        }
        return [of[id(weight)] for weight in self.weights]

    def _stale(self) -> None:
        """Set each stage's weights to the version that an asynchronous scheme computes with."""
        if self.schedule.synchronous:
            return
        rule = registry.scheme(self.schedule.scheme).version_rule(dict(self.schedule.options))
        assert rule is not None
        with torch.no_grad():
            for at, (weight, stage) in enumerate(zip(self.weights, self._stages(), strict=True)):
                version = rule(self.schedule.stages, stage, len(self.versions) - 1)
                weight.copy_(self.versions[version][at])

    def _latest(self) -> None:
        with torch.no_grad():
            for weight, value in zip(self.weights, self.versions[-1], strict=True):
                weight.copy_(value)


class RunningStatistics:
    """Buffers of batch norms: each copy of a stage counts its micro-batches, and the mean is the new one.

    Deferred ones are counted once a step, from what all forwards normalised.
    """

    def __init__(self, model: nn.Sequential, *, deferred: bool) -> None:
        self.norms = [layer.norm for layer in model if isinstance(layer, Normed)]
        self.deferred = deferred
        self.inputs: dict[nn.Module, list[Tensor]] = {norm: [] for norm in self.norms}
        self.copies: dict[nn.Module, list[dict[str, Tensor]]] = {norm: [] for norm in self.norms}
        for norm in self.norms:
            norm.register_forward_pre_hook(self._collect)
        self.begin()

    def _collect(self, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        if norm.training:
            self.inputs[norm].append(inputs[0].detach())

    def begin(self) -> None:
        """Begin a step."""
        self.before = {norm: self._buffers(norm) for norm in self.norms}
        for norm in self.norms:
            self.inputs[norm].clear()
            self.copies[norm].clear()

    def end_copy(self) -> None:
        """Restore what the next copy of the stages begins with."""
        for norm in self.norms:
            self.copies[norm].append(self._buffers(norm))
            norm.load_state_dict(self.before[norm], strict=False)

    def end(self) -> None:
        """End a step."""
        with torch.no_grad():
            for norm in self.norms:
                if self.deferred:
                    norm.load_state_dict(self._counted(norm), strict=False)
                    continue
                for name, buffer in norm.named_buffers():
                    mean = torch.stack([values[name].double() for values in self.copies[norm]]).mean(0)
                    buffer.copy_(mean.ceil() if name == "num_batches_tracked" else mean)

    def _counted(self, norm: nn.BatchNorm1d) -> dict[str, Tensor]:
        once = nn.BatchNorm1d(norm.num_features, momentum=norm.momentum).to(norm.weight.dtype)
        once.load_state_dict(norm.state_dict())
        once(torch.cat(self.inputs[norm]))
        return self._buffers(once)

    @staticmethod
    def _buffers(norm: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in norm.named_buffers()}
