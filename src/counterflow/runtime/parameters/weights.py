"""One worker's weights: who else holds them, how they are summed, updated, compared and saved.

Invariant: all copies of a stage are bitwise equal after every update. It knows nothing of orders or
micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.errors import ConfigError, WorkerError
from counterflow.schedule.program.actions import StartSync, Summed, SyncAction, WaitSync

from ..stages.recomputation import Contents
from ..stages.stage import StageCopy
from ..transport import Group, Pending, Transport
from .gradients import GradientGroup, unique

MakeOptimizer = Callable[[Any], Optimizer]
"""Of a list of parameters, or of (name, parameter)."""

MakeScheduler = Callable[[Optimizer], LRScheduler]

Names = Sequence[Sequence[tuple[str, str]]]
"""By stage: each parameter's name in the model, and the name of the first one that is the same object."""


_BROADCAST_BYTES = 25 * 1024 * 1024
"""The size of the pieces in which copies are sent their weights at the start."""


_DIGEST_BYTES = 16

_Average = tuple[list[Tensor], Tensor, Pending, int]
"""An average under way: the buffers, all of them in one tensor, the sum of it, and how many are summed."""


class Weights:
    """The parameters of the stages a worker holds.

    Args:
        stages: the worker's stages.
        names: of the parameters of all stages of the model.
        aliases: by the first name of a tensor that the model has under several, all its names.
        holders: by stage, the workers of a group that hold a copy.
        ranks: ``ranks[replica][worker]``.
        worker: this worker.
        transport: how to reach the others.
        optimizer: a function of parameters to an optimiser.
        scheduler: a function of an optimiser to a learning-rate scheduler.
        named: whether ``optimizer`` takes (name, parameter), and not parameters alone.
    """

    def __init__(
        self,
        stages: Mapping[int, StageCopy],
        *,
        names: Names,
        aliases: Mapping[str, Sequence[str]],
        holders: Sequence[Sequence[int]],
        ranks: Sequence[Sequence[int]],
        worker: int,
        transport: Transport,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        named: bool = False,
    ) -> None:
        self.stages = stages
        self.names = names
        self.aliases = aliases
        self.holders = holders
        self.ranks = ranks
        self.worker = worker
        self.transport = transport
        self.keeps_gradients = False
        self.kept_gradients: dict[str, Tensor] = {}
        self.groups: list[Group] = []
        """All that were made."""
        self._groups: dict[int, Group | None] = {}
        self._held: dict[int, Contents] = {}
        """By stage with copies: what its buffers held at the begin of the step."""
        self._own: dict[int, GradientGroup] = {}
        self._tied: dict[tuple[int, ...], list[GradientGroup]] = {}
        self._averages: dict[int, _Average] = {}
        self._make_shards()
        self._start_alike()
        self.optimizers: dict[int, Optimizer] = {}
        self.schedulers: dict[int, LRScheduler] = {}
        for stage in stages:
            parameters = [
                pair for gradients in self._updated_with(stage) for pair in gradients.parameters.items()
            ]
            if parameters:
                made = optimizer(parameters if named else [parameter for _, parameter in parameters])
                self.optimizers[stage] = made
                if scheduler is not None:
                    self.schedulers[stage] = scheduler(made)

    # -- who holds what

    def _make_shards(self) -> None:
        """Group the worker's parameters by who else holds them; see ``GradientGroup``.

        Every worker goes through all stages and all shared parameters of the model in one order, as
        making a group for collectives needs it.
        """
        taken: set[int] = set()
        parameters = {stage: self._parameters(stage) for stage in self.stages}
        for name, stages in self._shared_names().items():
            holders = sorted({worker for stage in stages for worker in self.holders[stage]})
            group = self._group(holders)
            held = [stage for stage in stages if stage in self.stages]
            if not held:
                continue
            parameter = parameters[held[0]][name]
            if group is not None:  # they start as the first stage that has them was made
                self.transport.broadcast(parameter.data, self.ranks[0][self.holders[stages[0]][0]], group)
            own = unique([(name, parameter)], taken)
            tied = self._tied.setdefault(tuple(stages), [])
            tied.append(GradientGroup(own, group, counted=self.worker == holders[0], stage=held[0]))
        for stage, copies in enumerate(self.holders):
            group = self._group(copies)
            if stage in self.stages:
                own = unique(parameters[stage].items(), taken)
                self._own[stage] = GradientGroup(own, group, counted=self.worker == copies[0], stage=stage)
                self._groups[stage] = group

    def _shared_names(self) -> dict[str, list[int]]:
        """Parameters that several stages share, with these stages."""
        users: dict[str, list[int]] = {}
        for stage, names in enumerate(self.names):
            for _, first in names:
                stages = users.setdefault(first, [])
                if stage not in stages:
                    stages.append(stage)
        return {name: stages for name, stages in users.items() if len(stages) > 1}

    def _parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """The parameters of a stage at hand, by the name of the first that is the same."""
        names = iter(self.names[stage])
        return {
            next(names)[1]: parameter
            for layer in self.stages[stage].with_weights
            for _, parameter in layer.module.named_parameters(remove_duplicate=False)
        }

    def _group(self, holders: Iterable[int]) -> Group | None:
        ranks = [row[worker] for row in self.ranks for worker in holders]
        if len(ranks) == 1:
            return None
        self.groups.append(self.transport.group(sorted(ranks)))
        return self.groups[-1]

    def _gradient_groups(self) -> list[GradientGroup]:
        return [*chain.from_iterable(self._tied.values()), *self._own.values()]

    def _updated_with(self, stage: int) -> list[GradientGroup]:
        return [gradients for gradients in self._gradient_groups() if gradients.stage == stage]

    def _start_alike(self) -> None:
        """Let every copy of a stage start as its first holder's, whatever each was made with.

        Raises:
            ConfigError: the copies have other shapes.
        """
        digests = {stage: _shapes(copy) + _digest(copy, buffers=True) for stage, copy in self.stages.items()}
        rows = cast("list[dict[int, bytes]]", self.transport.gather_objects(digests))
        for stage, copies in enumerate(self.holders):
            found = {rank: row[stage] for rank, row in enumerate(rows) if stage in row}
            source = self.ranks[0][copies[0]]
            for rank, digest in found.items():
                if digest[:_DIGEST_BYTES] != found[source][:_DIGEST_BYTES]:
                    raise ConfigError(
                        f"ranks {source} and {rank} hold stage {stage} with weights of other shapes; "
                        "make the same model on every worker"
                    )
            group = self._groups.get(stage)
            if group is not None and any(digest != found[source] for digest in found.values()):
                self._send_copies(_tensors(self.stages[stage]), source, group)

    def _send_copies(self, tensors: Sequence[Tensor], source: int, group: Group) -> None:
        """Tensors become those of one rank; as bytes, in pieces."""
        piece: list[Tensor] = []
        for number, tensor in enumerate(tensors, 1):
            piece.append(tensor)
            if number < len(tensors) and sum(t.nbytes for t in piece) < _BROADCAST_BYTES:
                continue
            flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in piece])
            self.transport.broadcast(flat, source, group)
            parts = flat.split([t.nbytes for t in piece])
            with torch.no_grad():
                for target, part in zip(piece, parts, strict=True):
                    target.copy_(part.clone().view(target.dtype).view(target.shape))
            piece = []

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze the parameters at hand, by their first names in the model."""
        for copy in self.stages.values():
            for name, parameter in self._parameters(copy.stage).items():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(chosen(name))
            copy.trains = any(p.requires_grad for p in copy.parameters())
        for gradients in self._gradient_groups():
            gradients.make()
        self.detach()

    def _updated_names(self, stage: int) -> dict[int, str]:
        """By identity: the parameters that a stage's update updates."""
        return {
            id(p): name for gradients in self._updated_with(stage) for name, p in gradients.parameters.items()
        }

    # -- gradients and updates

    def attach(self) -> None:
        """Let backwards add to the gradients, and note what buffers of stages with copies hold."""
        for gradients in self._gradient_groups():
            gradients.attach()
        self._held = {
            stage: copy.buffers.now()
            for stage, copy in self.stages.items()
            if self._groups.get(stage) is not None and copy.buffers.places
        }

    def check_buffers(self) -> None:
        """Refuse a layer that changed a buffer since ``attach``, if its stage has copies.

        Running statistics of batch norms are averaged; what would become of another nobody knows. A buffer
        that becomes one of another shape is a cache.

        Raises:
            ConfigError: there is one.
        """
        for stage, before in self._held.items():
            group, copy = self._groups[stage], self.stages[stage]
            assert group is not None
            now = copy.buffers.now()
            for (module, name), old, new in zip(copy.buffers.places, before, now, strict=True):
                if old is new or old is None or new is None or old.shape != new.shape or old.equal(new):
                    continue
                layer = next(x for x in copy.with_weights if module in set(x.module.modules()))
                raise ConfigError(
                    f"layer {layer.index} ({type(layer.module).__name__}) changes its buffer {name!r} in "
                    f"training, and each of the {len(group.ranks)} copies of stage {stage} would change its "
                    "own; take a scheme with one copy of a stage and one replica, or let training keep the "
                    "buffer"
                )

    def detach(self) -> None:
        """Keep the gradients from whoever is not a backward or an update."""
        for gradients in self._gradient_groups():
            gradients.detach()

    def start_sync(self, sync: StartSync) -> None:
        """Begin to sum gradients over all who hold them, or to average running statistics."""
        if sync.what is Summed.STATISTICS:
            self._averages[sync.stage] = self._start_average(sync.stage)
        for gradients in self._summed_in(sync):
            gradients.start(self.transport)

    def wait_sync(self, sync: WaitSync) -> None:
        """Until it is done."""
        if sync.what is Summed.STATISTICS:
            self._end_average(*self._averages.pop(sync.stage))
        for gradients in self._summed_in(sync):
            gradients.wait()

    def _summed_in(self, sync: SyncAction) -> Sequence[GradientGroup]:
        match sync.what:
            case Summed.GRADIENTS:
                return (self._own[sync.stage],)
            case Summed.TIED:
                return self._tied[sync.stage, *sync.tied]
            case Summed.STATISTICS:
                return ()

    @property
    def shared(self) -> list[str]:
        """Weights of the model that several stages share."""
        return list(self._shared_names())

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """The groups of stages that share weights, each ascending."""
        return tuple(sorted({tuple(stages) for stages in self._shared_names().values()}))

    def counts(self, stage: int) -> bool:
        """Whether this worker is the one of its group that counts a stage in the global norm."""
        return self._own[stage].counted

    def squared_norm(self, stage: int | None = None) -> float:
        """The part of the global gradient norm, squared, that this worker counts; or that of a stage."""
        if stage is not None:
            return self._own[stage].squared_norm()
        return sum(gradients.squared_norm() for gradients in self._gradient_groups() if gradients.counted)

    def own_norm(self) -> tuple[float, bool]:
        """What ``squared_norm()`` gives; and whether all gradients at hand are finite, counted or not."""
        squares = [(gradients.squared_norm(), gradients.counted) for gradients in self._gradient_groups()]
        return sum(one for one, counted in squares if counted), all(isfinite(one) for one, _ in squares)

    def scale(self, factor: float, stage: int | None = None) -> None:
        """Multiply all gradients, or those of a stage."""
        for gradients in self._gradient_groups() if stage is None else (self._own[stage],):
            gradients.scale(factor)

    def not_finite(self, stage: int | None = None) -> tuple[int, str] | None:
        """Stage and name of the first parameter whose gradient is not finite; or that of a stage."""
        for gradients in self._gradient_groups() if stage is None else (self._own[stage],):
            name = gradients.not_finite()
            if name is not None:
                return gradients.stage, name
        return None

    def update(self, stage: int) -> None:
        """Let a stage's optimiser step, and clear its gradients."""
        for gradients in self._updated_with(stage):
            gradients.show()
            if self.keeps_gradients:
                for name, parameter in gradients.parameters.items():
                    self.kept_gradients.pop(name, None)
                    if parameter.grad is not None:
                        self.kept_gradients[name] = parameter.grad.detach().clone()
        if stage in self.optimizers:
            self.optimizers[stage].step()
        if stage in self.schedulers:
            self.schedulers[stage].step()
        for gradients in self._updated_with(stage):
            gradients.clear()

    def skip(self, stage: int) -> None:
        """Update nothing: clear the gradients that a stage's update would take."""
        for shard in self._updated_with(stage):
            shard.clear()

    def clear(self, stage: int | None = None) -> None:
        """Set all gradients to zero, or those of a stage."""
        for gradients in self._gradient_groups() if stage is None else (self._own[stage],):
            gradients.clear()

    def _start_average(self, stage: int) -> _Average:
        """Begin to make running statistics the mean of those of the stage's copies."""
        group = self._groups[stage]
        assert group is not None  # only then a list asks for it
        floats = [buffer for buffer in self.stages[stage].statistics if buffer.is_floating_point()]
        flat = torch.cat([buffer.reshape(-1) for buffer in floats])
        return floats, flat, self.transport.all_reduce(flat, group), len(group.ranks)

    @staticmethod
    def _end_average(floats: Sequence[Tensor], flat: Tensor, pending: Pending, copies: int) -> None:
        pending.wait()
        flat /= copies
        for buffer, mean in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    # -- comparing and saving

    def check_copies(self, when: str) -> None:
        """Compare the copies of every stage by digest.

        Raises:
            WorkerError: two copies differ.
        """
        mine = {stage: _digest(copy) for stage, copy in self.stages.items()}
        rows = cast("list[dict[int, bytes]]", self.transport.gather_objects(mine))
        for stage in range(len(self.holders)):
            found = {rank: row[stage] for rank, row in enumerate(rows) if stage in row}
            first = min(found)
            for rank, digest in found.items():
                if digest != found[first]:
                    raise WorkerError(
                        f"{when} the copies of stage {stage} on ranks {first} and {rank} differ"
                    )

    def state_dict(self, stage: int | None = None) -> dict[str, Any]:
        """Parameters, buffers and extra state at hand, or those of a stage, by all names; on the CPU."""
        found: dict[str, Any] = {}
        for copy in self.stages.values() if stage is None else (self.stages[stage],):
            for layer in copy.with_weights:
                for name, value in layer.module.state_dict().items():
                    kept = value.detach().cpu().clone() if isinstance(value, Tensor) else deepcopy(value)
                    full = layer.names[name]
                    for each in self.aliases.get(full, (full,)):
                        found[each] = kept
        return found

    def whole_state_dict(self) -> dict[str, Any]:
        """The same of the whole model, on every worker; stage by stage from the first that holds it."""
        whole: dict[str, Any] = {}
        for stage, holders in enumerate(self.holders):
            sends = self.transport.rank == self.ranks[0][holders[0]]
            part = self.state_dict(stage) if sends else {}
            for row in self.transport.gather_objects(part):
                whole.update(cast("dict[str, Any]", row))
        return whole

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the weights at hand from a model's state.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        parts = []
        for copy in self.stages.values():
            for layer in copy.with_weights:
                part = {}
                for name, mine in layer.module.state_dict().items():
                    full = layer.names[name]
                    known = next((n for n in (full, *self.aliases.get(full, ())) if n in state), None)
                    if known is None:
                        raise ConfigError(f"the state has no {full!r}")
                    part[name] = given = state[known]
                    shape = tuple(given.shape) if isinstance(given, Tensor) else None
                    if isinstance(mine, Tensor) and shape != tuple(mine.shape):
                        raise ConfigError(
                            f"{full} has shape {shape} in the state, {tuple(mine.shape)} in the model"
                        )
                parts.append((layer.module, part))
        for module, part in parts:
            module.load_state_dict(part)

    def training_state(self, stage: int | None = None) -> dict[str, Any]:
        """What the optimisers and schedulers at hand, or of a stage, keep: by parameter's name, by stage."""
        optimizers = {}
        stages = self.stages if stage is None else (stage,)
        for each in (s for s in stages if s in self.optimizers):
            optimizer, names = self.optimizers[each], self._updated_names(each)
            for group in optimizer.param_groups:
                options = {key: _kept(value) for key, value in group.items() if not key.startswith("param")}
                for parameter in group["params"]:
                    state = {key: _kept(value) for key, value in optimizer.state.get(parameter, {}).items()}
                    optimizers[names[id(parameter)]] = {"state": state, "options": options}
        schedulers = {s: deepcopy(self.schedulers[s].state_dict()) for s in stages if s in self.schedulers}
        return {"optimizer": optimizers, "scheduler": schedulers}

    def whole_training_state(self) -> dict[str, Any]:
        """The same of all stages, on every worker."""
        whole: dict[str, Any] = {"optimizer": {}, "scheduler": {}}
        for stage, holders in enumerate(self.holders):
            sends = self.transport.rank == self.ranks[0][holders[0]]
            for row in self.transport.gather_objects(self.training_state(stage) if sends else {}):
                for part, found in cast("dict[str, Any]", row).items():
                    whole[part] |= found
        return whole

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take what the optimisers and schedulers at hand keep from a whole training's state.

        Raises:
            ConfigError: a parameter is missing, or a scheduler that fits.
        """
        for stage, optimizer in self.optimizers.items():
            names = self._updated_names(stage)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    every = (name, *self.aliases.get(name, ()))
                    kept = next((state["optimizer"][n] for n in every if n in state["optimizer"]), None)
                    if kept is None:
                        raise ConfigError(f"the training state has nothing of the optimizer for {name!r}")
                    group.update(deepcopy(kept["options"]))
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device if value.dim() else "cpu", copy=True)
                        if isinstance(value, Tensor)
                        else deepcopy(value)
                        for key, value in kept["state"].items()
                    }
        for stage, scheduler in self.schedulers.items():
            given = state["scheduler"].get(stage)
            rates = scheduler.state_dict().get("base_lrs", ())
            if given is None or len(given.get("base_lrs", ())) != len(rates):
                raise ConfigError(
                    f"the training state has no learning-rate schedule for stage {stage} with its "
                    f"{len(rates)} groups of parameters; load it with the stages it was saved with"
                )
            scheduler.load_state_dict(deepcopy(given))


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else deepcopy(value)


def _shapes(copy: StageCopy) -> bytes:
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in _tensors(copy)]
    return hashlib.blake2b(repr(shapes).encode(), digest_size=_DIGEST_BYTES).digest()


def _digest(copy: StageCopy, *, buffers: bool = False) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in _tensors(copy, buffers=buffers):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.digest()


def _tensors(copy: StageCopy, *, buffers: bool = True) -> list[Tensor]:
    """A stage's parameters, and its buffers."""
    found: list[Tensor] = []
    for layer in copy.with_weights:
        found += layer.module.parameters()
        if buffers:
            found += layer.module.buffers()
    return found
