"""Training in one process without a pipeline: the reference for every schedule's numbers.

It trains the same model on the same micro-batches (or parts of them, if the schedule divides them), one after
another, without workers or orders. For an asynchronous scheme it stores old weights, and computes each stage
with the version that the scheme's table states for the period.

It is written in plain torch, so an error of the engine is not in both sides of a comparison. Of the engine it
imports how a loss is read. Seeds of random streams and names of parameters are part of what is compared, so
their rules are written down here once more.
"""

from __future__ import annotations

import copy
import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.torch_private import hook_tables, hooks_of, is_loss
from counterflow.errors import ConfigError
from counterflow.runtime.mini_batch.losses import LossFunction, LossOutput, read_loss
from counterflow.runtime.mini_batch.mean_losses import MeanLossDetector
from counterflow.schedule import registry
from counterflow.schedule.ir import Schedule

_LOSS = -1
"""Number of a loss function among the layers."""

_BITS = 2**64 - 1


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
    parts = [1] * schedule.micro_batches
    if schedule.workload.slices > 1:  # one process runs the whole sequence
        return tuple(parts)
    for op in schedule.ops():
        if not op.kind.whole:
            parts[op.micro_batches[0] % schedule.micro_batches] = op.parts
    return tuple(parts)


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


@dataclass(frozen=True, slots=True)
class ReferenceLayer:
    """A layer of the model, or a loss function that has weights or buffers.

    Attributes:
        index: number of the layer; -1: the loss function.
        names: names in the model's state by the layer's own.
        module: the layer.
    """

    index: int
    names: Mapping[str, str]
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """State of the layer by the model's names."""
        state = self.module.state_dict()
        return {self.names[name]: value for name, value in state.items() if name in self.names}


class _MicroBatchPart(NamedTuple):
    """Part of a micro-batch that runs at once: its samples ``start`` to ``stop`` of ``samples``."""

    micro_batch: int
    samples: int
    start: int
    stop: int
    inputs: Any
    targets: Any

    @property
    def size(self) -> int:
        return self.stop - self.start


class RandomSeeds:
    """Seeds of the random draws of each layer, by step, micro-batch and part.

    Args:
        seed: seed of the run.
        device: device of the layers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def restored(self) -> Any:
        """Context after which the user's random state is as before."""
        device = self._device
        if device.type != "cuda":
            return torch.random.fork_rng(devices=[])
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.random.fork_rng(devices=[index])

    def seed_weights(self, layer: int) -> None:
        """Seed the initialisation of a layer."""
        self._apply(_digest(self._seed, "weights", layer))

    def seed_layer(self, layer: int, step: int, part: _MicroBatchPart) -> None:
        """Seed a layer's forward (SplitMix64 of a base of the step)."""
        base = _digest(self._seed, step)
        mixed = base + part.micro_batch * 0x9E3779B97F4A7C15 + layer * 0xD1342543DE82EF95
        mixed += (part.start << 32 | part.samples - part.stop) * 0xD6E8FEB86659FD93
        mixed &= _BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
        self._apply(mixed >> 12)

    def _apply(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)


def _digest(*parts: object) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 12


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
        loss = _loss_layer(loss_function)
        self.with_weights = _placed(_copied([*_named(layers), *loss]), self.device, self.seeds)
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
        total = sum(_size(inputs) for inputs, _ in batches)
        losses, weights = [], []
        self._use_old_weights()
        with self.seeds.restored():
            for part in _parts(batches, self.parts):
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
        """Clip the gradients; return the norm before."""
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
        return norm

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """The mean loss, without gradients."""
        total = sum(_size(inputs) for inputs, _ in batches)
        losses, weights = [], []
        with torch.no_grad(), _evaluating([layer.module for layer in self.with_weights]):
            for part in _parts(batches, (1,) * len(self.parts)):
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

    def _loss(self, part: _MicroBatchPart, *, seeded: bool) -> LossOutput:
        inputs, targets = pytree.tree_map_only(Tensor, self._on_device, (part.inputs, part.targets))
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return self._loss_within(inputs, targets, part, seeded=seeded)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _loss_within(self, inputs: Any, targets: Any, part: _MicroBatchPart, *, seeded: bool) -> LossOutput:
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
                self.seeds.seed_layer(_LOSS, self.steps, part)
            with self._means.watching():
                output = self.loss_function(value, targets)
        if self.staleness is None:
            return self._means.read(output, part.size).with_added(terms)
        loss = read_loss(output)
        return (loss if loss.weight is None else LossOutput(loss.loss / loss.weight)).with_added(terms)


def _named(layers: nn.Sequential | Sequence[nn.Module]) -> Iterator[ReferenceLayer]:
    prefixes = [str(index) for index in range(len(layers))]
    if isinstance(layers, nn.Sequential):
        names = [name for name, _ in layers.named_modules(remove_duplicate=False)]
        prefixes = [name for name in names if name and "." not in name]
    for index, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True)):
        names = [*layer.state_dict(), *(name for name, _ in layer.named_parameters(remove_duplicate=False))]
        yield ReferenceLayer(index, {name: f"{prefix}.{name}" for name in names}, layer)


def _loss_layer(loss_function: object) -> list[ReferenceLayer]:
    """A loss function that is a module with weights or buffers; those of torch's own losses are no state."""
    if not isinstance(loss_function, nn.Module):
        return []
    constants = {
        f"{place}.{name}" if place else name
        for place, module in loss_function.named_modules()
        if is_loss(module)
        for name, _ in module.named_buffers(recurse=False)
    }
    names = {n: f"loss_function.{n}" for n in loss_function.state_dict() if n not in constants}
    has_any = names or next(loss_function.buffers(), None) is not None
    return [ReferenceLayer(_LOSS, names, loss_function)] if has_any else []


def _copied(layers: Sequence[ReferenceLayer]) -> list[ReferenceLayer]:
    """Copies that share what the layers share, with hooks and attributes of parameters."""
    memo: dict[int, Any] = {}
    copies = []
    for layer in layers:
        for module in layer.module.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:  # weight norm's, say: computed anew
                    memo[id(value)] = value.detach().clone()
        parameters = [p for p in layer.module.parameters() if id(p) not in memo]
        copies.append(replace(layer, module=copy.deepcopy(layer.module, memo)))
        for parameter in parameters:
            _attach(memo[id(parameter)], *copy.deepcopy((parameter.__dict__, *hooks_of(parameter)), memo))
    return copies


def _placed(
    layers: Sequence[ReferenceLayer], device: torch.device, seeds: RandomSeeds
) -> list[ReferenceLayer]:
    """Layers on a device; weights on the meta device are initialised, each layer's from a seed of its own."""
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for layer in layers:
        module = layer.module
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(device)
            continue
        before = dict(module.named_parameters(remove_duplicate=False))
        module.to_empty(device=device)
        firsts: dict[int, nn.Parameter] = {}
        for name, old in before.items():  # what is tied within the layer is initialised once
            _set(module, name, firsts.setdefault(id(old), module.get_parameter(name)))
        with seeds.restored():
            seeds.seed_weights(layer.index)
            make_weights = getattr(module, "make_weights", None)
            if callable(make_weights):
                make_weights()
            for child in () if callable(make_weights) else module.modules():
                reset = getattr(child, "reset_parameters", None)
                if callable(reset):
                    reset()
        for name, old in before.items():
            new = module.get_parameter(name)
            if id(old) in replaced:
                _set(module, name, replaced[id(old)][1])
                continue
            replaced[id(old)] = old, new
            if new is not old:
                _attach(new, old.__dict__, *hooks_of(old))
    return list(layers)


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _attach(
    parameter: nn.Parameter, attributes: Mapping[str, Any], before: Sequence[Any], after: Sequence[Any]
) -> None:
    vars(parameter).update(attributes)
    trains = parameter.requires_grad
    parameter.requires_grad_()  # a frozen one accepts no hooks
    for hook in before:
        parameter.register_hook(hook)
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trains)


def _parts(batches: Sequence[tuple[Any, Any]], counts: Sequence[int]) -> Iterator[_MicroBatchPart]:
    """Parts of every micro-batch of all replicas that have samples; the first micro-batches are larger."""
    for replica, (inputs, targets) in enumerate(batches):
        size, more = divmod(_size(inputs), len(counts))
        first = 0
        for number, parts in enumerate(counts):
            samples = size + (number < more)
            for part in range(parts):
                start, stop = samples * part // parts, samples * (part + 1) // parts
                if start < stop:
                    rows = slice(first + start, first + stop)
                    data = _cut(inputs, rows), _cut(targets, rows)
                    yield _MicroBatchPart(replica * len(counts) + number, samples, start, stop, *data)
            first += samples


def _size(inputs: Any) -> int:
    return next(len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())


def _cut(tree: Any, rows: slice) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)


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
    weights = {name: _cast(weight, dtype) for name, weight in layer.named_parameters()}
    return functional_call(layer, weights, (value,))
