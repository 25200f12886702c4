"""One worker's weights: who else holds them, how they are summed, updated, compared and saved.

Invariant: all copies of a stage are bitwise equal after every update. It knows nothing of orders or
micro-batches.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.errors import ConfigError
from counterflow.program.actions import StartSync, Summed, SyncAction, WaitSync

from ..mesh.dtensors import is_dtensor, like, local, part_of, whole
from ..mesh.layout import REPLICA, WORKER
from ..mesh.sharding import WHOLE, Sharding
from ..stages.randomness import RandomStreams
from ..stages.recomputation import Contents
from ..stages.stage import StageCopy
from ..transport.base import Group, Pending, Transport
from .alike import Copies, Key, tensors_of
from .average import Average, Averaged
from .coupled import Trial, error, known_coupled, options_of, refuse_changed
from .gradients import GradientGroup, OwnNorm, SquaredNorms, squared_norms, unique
from .hooks import Hooks
from .names import Names, named_parameters, shared_names
from .optimizers import MakeOptimizer, MakeScheduler, home_of, optimizer_of, refuse_others, scheduler_of
from .sharded_updates import Owners
from .streaming import Stream
from .unlisted import Unlisted

_LOG = logging.getLogger(__name__)


class _Statistics(NamedTuple):
    """Running statistics and counters on their way: all of them in one tensor, and its sum.

    ``counted`` has the counters, and what they were before the mini-batch.
    """

    means: list[Tensor]
    counted: list[tuple[Tensor, Tensor]]
    flat: Tensor
    pending: Pending
    copies: int


class Weights:
    """The parameters of the stages a worker holds.

    Args:
        stages: the worker's stages.
        names: of the parameters of all stages of the model.
        aliases: by the first name of a tensor that the model has under several, all its names.
        holders: by stage, the workers of a group that hold a copy.
        sharding: how parameters are sharded over further dimensions of the mesh.
        transport: how to reach the others.
        optimizer: a function of parameters to an optimiser.
        scheduler: a function of an optimiser to a learning-rate scheduler.
        named: whether ``optimizer`` takes (name, parameter), and not parameters alone.
        unlisted: what the model's state has beside that of its layers.
        streams: of random draws: what hooks of parameters and optimisers draw is the same on all copies.
        sharded: whether of a parameter's holders one alone has its optimiser state (ZeRO stage 1).
    """

    keeps_gradients = False
    """Whether ``kept_gradients`` has those of the last update."""
    average: Average | None = None
    """Of the trained weights; None: nobody asked for it."""

    def __init__(
        self,
        stages: Mapping[int, StageCopy],
        *,
        names: Names,
        aliases: Mapping[str, Sequence[str]],
        holders: Sequence[Sequence[int]],
        sharding: Sharding,
        transport: Transport,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        streams: RandomStreams,
        named: bool = False,
        unlisted: Unlisted,
        sharded: bool = False,
    ) -> None:
        self.stages, self.transport = stages, transport
        self.names, self.aliases, self.unlisted = names, aliases, unlisted
        self._every_name = {name: tuple(every) for every in aliases.values() for name in every}
        self.holders, self.layout, self.sharding = holders, sharding.layout, sharding
        self.kept_gradients: dict[str, Tensor] = {}
        self.groups: list[Group] = []
        """All that were made."""
        self._by_ranks: dict[tuple[int, ...], Group] = {}
        self._groups: dict[int, Group | None] = {}
        self._held: dict[int, Contents] = {}
        """By stage with copies: what its buffers held at the begin of the step."""
        self._watched: dict[int, list[nn.Parameter]] = {}
        """By stage: its parameters, but for those that are sharded."""
        self._unchanged: dict[int, list[int]] = {}
        """How often these had been changed by then."""
        self._own: dict[int, list[GradientGroup]] = {}
        self._tied: dict[tuple[int, ...], list[GradientGroup]] = {}
        self._apart: dict[int, tuple[str, tuple[int, ...]]] = {}
        """By stage: a weight that others update with another stage, and the stages that share it."""
        self._tied_apart: dict[str, nn.Parameter] = {}
        """Such weights, by name."""
        self._averages: dict[int, _Statistics] = {}
        self.changed_in_forward: set[str] = set()
        """Weights that a layer was seen to change in its forward, by first name."""
        self._copied: list[Callable[[], None]] = []
        """For each copy that is being made: orders what follows behind it."""
        unlisted.start_alike(transport)
        self._make_shards()
        self.hooks = Hooks(parameter for copy in stages.values() for parameter in copy.parameters())
        self._streams = streams
        self.hooked = any(row[0] for row in transport.gather([float(self.hooks.first() is not None)]))
        """Whether any parameter of the model has a hook."""
        for stage, copy in stages.items():
            self._watched[stage] = [one for one in copy.parameters() if not is_dtensor(one)]
        self.optimizers: dict[int, Optimizer] = {}
        self.schedulers: dict[int, LRScheduler] = {}
        self.owners = Owners(self._gradient_groups(), names, transport) if sharded else None
        """Who has whose optimiser state, if it is sharded."""
        self._make, self._named = optimizer, named
        self._tried: dict[type, bool | None] = {}
        """By kind of optimiser: whether it looks at several parameters at once; None: it cannot be tried."""
        self._untried: set[int] = set()
        """Stages whose optimiser could not be, and has made no step."""
        for stage in stages:
            parameters = self._optimized(stage)
            made = optimizer_of(stage, optimizer, parameters, named=named) if parameters else None
            if made is not None:
                self.optimizers[stage] = made
                if scheduler is not None:
                    self.schedulers[stage] = scheduler_of(stage, scheduler, made)
        self._refuse_coupled()
        self.copies = Copies(self._compared, self.layout, transport)

    # -- who holds what

    @property
    def worker(self) -> int:
        """The worker's number in its pipeline."""
        return self.layout.place(self.transport.rank)[WORKER]

    def _make_shards(self) -> None:
        """Group the worker's parameters by who else holds them; see ``GradientGroup``.

        Every worker goes through all stages and all shared parameters of the model in one order, as
        making a group for collectives needs it.
        """
        taken: set[int] = set()
        parameters = {stage: named_parameters(copy, self.names) for stage, copy in self.stages.items()}
        found = self.sharding.agreed(
            (pair for its in parameters.values() for pair in its.items()), self.transport
        )
        for name, stages in shared_names(self.names).items():
            how = found.get(name, WHOLE)
            holders = sorted({worker for stage in stages for worker in self.holders[stage]})
            if how.placements is not None and len(holders) < sum(len(self.holders[s]) for s in stages):
                raise ConfigError(
                    f"{name} is a weight of stages {stages[0]} and {stages[-1]}, which one worker holds, and "
                    "parallelize() made two of it there; leave it whole, or do not tie it"
                )
            group = self._group(holders, how.summed)
            held = [stage for stage in stages if stage in self.stages]
            if not held:
                continue
            if len({next(s for s in stages if worker in self.holders[s]) for worker in holders}) > 1:
                self._apart.setdefault(held[0], (name, tuple(stages)))
                self._tied_apart[name] = parameters[held[0]][name]
            own = unique([(name, parameters[held[0]][name])], taken)
            self._tied.setdefault(tuple(stages), []).append(
                GradientGroup(own, group, counted=self._counted(how.along, holders), stage=held[0])
            )
        for stage, copies in enumerate(self.holders):
            kinds = {found.get(first, WHOLE).summed for _, first in self.names[stage]} | {frozenset[int]()}
            groups = {kind: self._group(copies, kind) for kind in sorted(kinds, key=sorted)}
            if stage in self.stages:
                self._groups[stage] = groups[frozenset()]
                parts: dict[tuple[frozenset[int], frozenset[int]], dict[str, nn.Parameter]] = defaultdict(
                    dict
                )
                for name, parameter in unique(parameters[stage].items(), taken).items():
                    how = found.get(name, WHOLE)
                    parts[how.summed, how.along][name] = parameter
                self._own[stage] = [
                    GradientGroup(part, groups[kind], counted=self._counted(along, copies), stage=stage)
                    for (kind, along), part in parts.items()  # in one order, as the sums of all copies are
                ]

    def _counted(self, along: frozenset[int], holders: Sequence[int]) -> bool:
        """Whether this rank counts in the global norm its parts of what is sharded along some dims."""
        others = [dim for dim in self.layout.further if dim not in along]
        first = self.layout.is_first(self.transport.rank, (REPLICA, *others))
        return first and self.worker == holders[0]

    def _group(self, holders: Iterable[int], apart: frozenset[int] = frozenset()) -> Group | None:
        """The group of those who hold the same as this worker; the workers of all positions make the call.

        One for all that the same ranks hold: the checker proves that they begin their sums in one order.
        """
        mine = None
        for ranks in self.layout.copies(holders, apart):
            if len(ranks) > 1:
                group = self._by_ranks.get(tuple(ranks))
                if group is None:
                    group = self._by_ranks[tuple(ranks)] = self.transport.group(ranks)
                    self.groups.append(group)
                if self.transport.rank in ranks:
                    mine = group
        return mine

    def _gradient_groups(self) -> list[GradientGroup]:
        return [*chain.from_iterable(self._tied.values()), *chain.from_iterable(self._own.values())]

    def _updated_with(self, stage: int) -> list[GradientGroup]:
        return [gradients for gradients in self._gradient_groups() if gradients.stage == stage]

    def _optimized(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """What a stage's optimiser is made of, by name."""
        return [
            (name, parameter)
            for gradients in self._updated_with(stage)
            for name, parameter in gradients.parameters.items()
            if self.owners is None or self.owners.mine(name)
        ]

    def _refuse_coupled(self) -> None:
        """Where the model has several optimisers, refuse one that looks at all of its weights at once.

        All workers call it.

        Raises:
            ConfigError: it does.
        """
        trained = [s for s in self.optimizers if any(p.requires_grad for _, p in self._optimized(s))]
        rows = self.transport.gather([min(trained, default=math.inf), max(trained, default=-math.inf)])
        sharded = self.owners is not None
        if not sharded and min(row[0] for row in rows) >= max(row[1] for row in rows):
            return
        for stage in trained:
            optimizer = self.optimizers[stage]
            kind = type(optimizer)
            if kind not in self._tried:
                trial = Trial(self._make, optimizer, self._optimized(stage), named=self._named)
                self._tried[kind] = trial.coupled(self._streams.kept())
                if self._tried[kind] is None:
                    self._tried[kind] = known_coupled(optimizer) or None
            if self._tried[kind]:
                raise error(optimizer, stage, sharded=sharded)
            if self._tried[kind] is None:
                self._untried.add(stage)

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze the parameters at hand, by their first names in the model.

        Raises:
            ConfigError: FSDP holds one that changes.
        """
        for copy in self.stages.values():
            for name, parameter in named_parameters(copy, self.names).items():
                if id(parameter) in self.sharding.summed and chosen(name) != parameter.requires_grad:
                    raise ConfigError(
                        f"{name} is sharded by fully_shard, which knows from the first step on what is "
                        "trained; freeze it in parallelize(), before fully_shard, or in the model"
                    )
        for copy in self.stages.values():
            for name, parameter in named_parameters(copy, self.names).items():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(chosen(name))
            copy.trains = any(p.requires_grad for p in copy.parameters())
        for gradients in self._gradient_groups():
            gradients.make()
        self.detach()
        self._refuse_coupled()
        if self.average is not None:
            self.average.renew()

    def updated_names(self, stage: int) -> dict[int, str]:
        """By identity, the names of the parameters that a stage's update updates."""
        groups = self._updated_with(stage)
        names = {id(p): name for gradients in groups for name, p in gradients.parameters.items()}
        if stage in self.optimizers:
            refuse_others(self.optimizers[stage], names, stage)
        return names

    # -- gradients and updates

    def attach(self) -> None:
        """Let backwards add to the gradients, and note what buffers of stages with copies hold.

        Raises:
            ConfigError: a parameter has a hook, and none had one when the pipeline was made.
        """
        if not self.hooked and (parameter := self.hooks.first()) is not None:
            every = (named_parameters(copy, self.names).items() for copy in self.stages.values())
            name = next(name for pairs in every for name, one in pairs if one is parameter)
            raise ConfigError(
                f"{name} has a hook that was registered after the pipeline was made, and no parameter had "
                "one by then; register it before, or make the pipeline again"
            )
        self.hooks.take()
        for gradients in self._gradient_groups():
            gradients.attach()
        self._defer(deferring=True)
        self._held = {
            stage: copy.buffers.now()
            for stage, copy in self.stages.items()
            if self._groups.get(stage) is not None and copy.buffers.places
        }

    def _defer(self, *, deferring: bool) -> None:
        for copy in self.stages.values():
            for norm in copy.deferred:
                norm.deferring = deferring

    def commit_statistics(self) -> None:
        """Update the running statistics that wait for the end of a mini-batch; all its sums are there."""
        for copy in self.stages.values():
            for norm in copy.deferred:
                norm.commit()

    def note_parameters(self) -> None:
        """Note how often the parameters were changed, for ``check_buffers`` and ``refuse_overwritten``."""
        self._unchanged = {
            stage: [parameter._version for parameter in watched]  # noqa: SLF001 - documented as it
            for stage, watched in self._watched.items()
        }

    def check_buffers(self) -> None:
        """Refuse a layer that changed a buffer since ``attach``, or a weight, if its stage has copies.

        Running statistics of batch norms are averaged, and counters added up, unless mini-batches are under
        way together; what would become of another nobody knows. A buffer that becomes one of another shape is
        a cache.

        Raises:
            ConfigError: there is one.
        """
        for stage, place, name, full in self._changed_weights():
            group = self._groups.get(stage)
            if self.stages[stage].versions is not None:
                raise ConfigError(
                    f"{place} changes its weight {name!r} in training, and a schedule without a flush keeps "
                    "several versions of it, of which one would be changed; let only the optimizer change it "
                    "(in a hook after its step, say), or take a scheme with a flush"
                )
            if full in shared_names(self.names):
                raise ConfigError(
                    f"{place} changes its weight {name!r} in training, which is one of other stages too, "
                    "where it would stay; let only the optimizer change it (in a hook after its step, say)"
                )
            if group is not None:
                raise ConfigError(
                    f"{place} changes its weight {name!r} in training (max_norm of an embedding does), and "
                    f"each of the {len(group.ranks)} copies of stage {stage} would change its own; take a "
                    "scheme with one copy of a stage and one replica, or let only the optimizer change it"
                )
            self.changed_in_forward.add(full)
        for stage, before in self._held.items():
            group, copy = self._groups[stage], self.stages[stage]
            assert group is not None
            now = copy.buffers.now()
            counters = copy.buffers.summed if copy.versions is None else ()
            for number, (old, new) in enumerate(zip(before, now, strict=True)):
                if number in counters or old is new or old is None or new is None:
                    continue
                if old.shape != new.shape or old.equal(new):
                    continue
                module, name = copy.buffers.places[number]
                layer = next(x for x in copy.with_weights if module in set(x.module.modules()))
                raise ConfigError(
                    f"layer {layer.index} ({type(layer.module).__name__}) changes its buffer {name!r} in "
                    f"training, and each of the {len(group.ranks)} copies of stage {stage} would change its "
                    "own; take a scheme with one copy of a stage and one replica, let training keep the "
                    "buffer, or declare a counter with counterflow.sum_over_copies (in schemes with a flush)"
                )

    def refuse_overwritten(self) -> None:
        """After an error of autograd: see whether it is that a layer changed a weight in its forward.

        Raises:
            ConfigError: one did.
        """
        for _, place, name, _ in self._changed_weights():
            raise ConfigError(
                f"{place} changes its weight {name!r} in training, and the backwards of the micro-batches "
                "before need it as it was; let only the optimizer change it (in a hook after its step, say)"
            )

    def _changed_weights(self) -> Iterator[tuple[int, str, str, str]]:
        """Of weights that were changed since ``note_parameters``: stage, layer, name in it, first name."""
        for stage, noted in self._unchanged.items():
            for changed, version in zip(self._watched[stage], noted, strict=True):
                if changed._version != version:  # noqa: SLF001 - documented as it
                    firsts = {id(p): n for n, p in named_parameters(self.stages[stage], self.names).items()}
                    for layer in self.stages[stage].with_weights:
                        place = f"layer {layer.index} ({type(layer.module).__name__})"
                        for name, parameter in layer.module.named_parameters():
                            if parameter is changed:
                                yield stage, place, name, firsts[id(changed)]

    def detach(self) -> None:
        """Keep the gradients from whoever is not a backward or an update."""
        self._defer(deferring=False)
        self.hooks.give_back()
        for gradients in self._gradient_groups():
            gradients.detach()
        for copy in self.stages.values():
            copy.end_gathering()

    def start_sync(self, sync: StartSync) -> None:
        """Begin to sum gradients over all who hold them, or to average running statistics."""
        if sync.what is Summed.STATISTICS:
            self._averages[sync.stage] = self._start_average(sync.stage)
        for gradients in self._summed_in(sync):
            gradients.start(self.transport)

    def wait_sync(self, sync: WaitSync) -> None:
        """Until it is done."""
        if sync.what is Summed.STATISTICS:
            self._end_average(self._averages.pop(sync.stage))
        for gradients in self._summed_in(sync):
            gradients.wait()

    def _summed_in(self, sync: SyncAction) -> Sequence[GradientGroup]:
        match sync.what:
            case Summed.GRADIENTS:
                return self._own[sync.stage]
            case Summed.TIED:
                return self._tied[sync.stage, *sync.tied]
            case Summed.STATISTICS:
                return ()

    @property
    def shared(self) -> list[str]:
        """Weights of the model that several stages share."""
        return list(shared_names(self.names))

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """The groups of stages that share weights, each ascending."""
        return tuple(sorted({tuple(stages) for stages in shared_names(self.names).values()}))

    def squared_norm(self) -> float:
        """The part of the global gradient norm, squared, that this worker counts."""
        return sum(SquaredNorms(one for one in self._gradient_groups() if one.counted).read())

    def own_norm(self) -> OwnNorm:
        """What ``squared_norm()`` gives, and whether all gradients at hand are finite, counted or not."""
        return OwnNorm(self._gradient_groups())

    def clip(self, stage: int, limit: float | None, alive: Tensor | None) -> tuple[Tensor, Tensor]:
        """Clip a stage's gradients by their norm, where they are; the host does not wait for it.

        Args:
            stage: whose.
            limit: of the norm; None: any.
            alive: whether all before were finite; None: there were none.

        Returns:
            What this worker counts of the norm, squared, and whether all were finite so far: gradients that
            are not, and those after them, are set to zero.
        """
        groups = self._own[stage]
        square, counted = squared_norms(groups, self.transport.device)
        finite = square.isfinite()
        alive = finite if alive is None else alive & finite
        factor = None if limit is None else (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for gradients in groups:
            if factor is not None:
                gradients.scale(factor)
            gradients.drop(~alive)
        return counted, alive

    def scale(self, factor: float, stage: int | None = None) -> None:
        """Multiply all gradients, or those of a stage."""
        for gradients in self._gradient_groups() if stage is None else self._own[stage]:
            gradients.scale(factor)

    def call_hooks(self, step: int, stage: int | None = None) -> None:
        """Let the hooks of all parameters, or those of a stage, make others of a step's summed gradients."""
        if not self.hooked:
            return
        self.hooks.give_back()  # one may remove itself
        tied = self._tied if stage is None else {}
        own = self._own if stage is None else {stage: self._own[stage]}
        every = chain(tied.items(), (((number,), groups) for number, groups in own.items()))
        for stages, groups in every:
            for index, gradients in enumerate(groups):
                with self._streams.update("hooks", step, index, *stages):
                    gradients.call_hooks(self.hooks)
        self.hooks.take()

    def not_finite(self) -> tuple[int, str] | None:
        """Stage and name of the first parameter whose gradient is not finite."""
        for gradients in self._gradient_groups():
            name = gradients.not_finite()
            if name is not None:
                return gradients.stage, name
        return None

    def update(self, stage: int, step: int) -> None:
        """Let a stage's optimiser make the update of a step's mini-batch, and clear the gradients.

        It draws from a stream of its own, which the seed, the step and the stage tell: all copies of the
        stage draw the same, whatever their workers did before.

        Raises:
            ConfigError: it draws, and another stage's updates one of its weights on another worker.
        """
        self._order_behind_copies()
        for gradients in self._updated_with(stage):
            gradients.show()
            if self.keeps_gradients:
                for name, parameter in gradients.parameters.items():
                    self.kept_gradients.pop(name, None)
                    if parameter.grad is not None:
                        self.kept_gradients[name] = parameter.grad.detach().clone()
        if stage in self.optimizers:
            with self._streams.update("optimizer", step, stage):
                before = self._streams.states() if stage in self._apart else []
                self._step(stage, self.optimizers[stage])
                if before and self.owners is None and not self._streams.drew_nothing(before):
                    name, stages = self._apart[stage]
                    raise ConfigError(
                        f"the optimizer of stage {stage}, a {type(self.optimizers[stage]).__name__}, draws "
                        f"random numbers in its step, and {name} is a weight of stages {stages[0]} and "
                        f"{stages[-1]}, whose workers would draw others for it; do not tie it, or take an "
                        "optimizer that draws nothing"
                    )
        if stage in self.schedulers:
            self.schedulers[stage].step()
        if self.average is not None:
            self.average.update(stage)
        for gradients in self._updated_with(stage):
            gradients.clear()

    def _step(self, stage: int, optimizer: Optimizer) -> None:
        before = options_of(optimizer) if stage in self._untried else None
        optimizer.step()
        if before is not None:
            refuse_changed(optimizer, before, stage)
            self._untried.discard(stage)

    def change_after(self, order: Callable[[], None]) -> None:
        """Let the next change of weights or optimiser state (update, load, ``averaged``) call ``order``.

        Args:
            order: lets what the device is given from then on wait for a copy that is being made of them.
        """
        self._copied.append(order)

    def _order_behind_copies(self) -> None:
        while self._copied:
            self._copied.pop()()

    def share(self) -> None:
        """After the updates of all stages: send those made here to the other holders, if they are sharded."""
        if self.owners is not None:
            self.owners.share()

    def skip(self, stage: int) -> None:
        """Update nothing: clear the gradients that a stage's update would take."""
        for shard in self._updated_with(stage):
            shard.clear()

    def clear(self) -> None:
        """Set all gradients to zero."""
        for gradients in self._gradient_groups():
            gradients.clear()

    def _start_average(self, stage: int) -> _Statistics:
        """Begin to make running statistics the mean of those of the stage's copies, and add up counters."""
        group, copy = self._groups[stage], self.stages[stage]
        assert group is not None  # only then a list asks for it
        counted = [] if copy.versions is not None else self._counters(stage)
        sums = (norm.sums_of_mini_batch for norm in copy.deferred)
        counted += [(each, torch.zeros_like(each)) for each in sums]
        every = [*copy.statistics, *(buffer for buffer, _ in counted)]
        # In float64, in which counts are exact.
        flat = torch.cat([buffer.reshape(-1).double() for buffer in every] or [self._nothing()])
        return _Statistics(
            copy.statistics, counted, flat, self.transport.all_reduce(flat, group), len(group.ranks)
        )

    def _nothing(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float64, device=self.transport.device)

    def _counters(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        """A stage's counters, and what they were when the step began."""
        buffers, before = self.stages[stage].buffers, self._held.get(stage, ())
        found = []
        for place in buffers.summed:
            module, name = buffers.places[place]
            then = before[place]
            assert then is not None
            found.append((module.get_buffer(name), then))
        return found

    @staticmethod
    def _end_average(found: _Statistics) -> None:
        """Take the mean of what is averaged, rounded up if it is a count, and the sum of what was added."""
        found.pending.wait()
        sizes = [b.numel() for b in (*found.means, *(buffer for buffer, _ in found.counted))]
        parts = iter(found.flat.split(sizes) if sizes else ())
        for buffer in found.means:
            mean = next(parts) / found.copies
            buffer.copy_((mean if buffer.is_floating_point() else mean.ceil()).view_as(buffer))
        for buffer, before in found.counted:
            whole = next(parts).view_as(buffer) - (found.copies - 1) * before.double()
            buffer.copy_(whole if buffer.is_floating_point() else whole.round())

    def held_bytes(self) -> int:
        """Of all versions of the weights, buffers, gradients and optimiser state at hand."""
        total = sum(gradients.nbytes for gradients in self._gradient_groups())
        for copy in self.stages.values():
            weights = sum(local(parameter).nbytes for parameter in copy.parameters())
            total += weights * (1 if copy.versions is None else copy.versions.peak)
            total += sum(buffer.nbytes for layer in copy.with_weights for buffer in layer.module.buffers())
        for optimizer in self.optimizers.values():
            states = (value for state in optimizer.state.values() for value in state.values())
            total += sum(local(value).nbytes for value in states if isinstance(value, Tensor))
        return total if self.average is None else total + self.average.nbytes

    # -- an average of the weights

    def follow(self, decay: float) -> None:
        """Keep an average of the trained weights from here on; all workers call it.

        Raises:
            ConfigError: there is no such decay, or workers give others.
        """
        self.average = Average(decay, self._optimized, self.stages)
        for rank, (other,) in enumerate(self.transport.gather([decay])):
            if other != decay:
                raise ConfigError(
                    f"rank {self.transport.rank} averages weights with a decay of {decay}, rank {rank} with "
                    f"{other}; all workers make the same calls"
                )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the trained weights are their averages; all workers enter it.

        Raises:
            ConfigError: there are none.
        """
        if self.average is None:
            raise ConfigError(
                "there is no average of the weights; call ema(decay) before the steps to average"
            )
        every = (p for gradients in self._gradient_groups() for p in gradients.parameters.values())
        trained = [local(parameter).detach() for parameter in every if parameter.requires_grad]
        own = [weight.clone() for weight in trained]
        self._order_behind_copies()
        try:
            self.average.show()
            self.share()
            self._forget_casts()
            yield
        finally:
            for weight, before in zip(trained, own, strict=True):
                weight.copy_(before)
            self._forget_casts()

    def _forget_casts(self) -> None:
        for copy in self.stages.values():
            copy.precision.forget()

    # -- comparing and saving

    def check_copies(self, when: str) -> None:
        """Compare the copies of every stage, and of weights that several share, by digest; all call it.

        Raises:
            WorkerError: two copies differ.
        """
        self.copies.check(when)

    def _compared(self, buffers: bool) -> dict[Key, list[Tensor]]:
        """What is compared with what others hold of it."""
        found: dict[Key, list[Tensor]] = defaultdict(list)
        for stage, copy in self.stages.items():
            for tensor in tensors_of(copy, buffers=buffers):
                found[stage, tuple(sorted(self.sharding.along(tensor)))].append(tensor)
        for name, parameter in self._tied_apart.items():
            found[name, tuple(sorted(self.sharding.along(parameter)))].append(parameter)
        tied = shared_names(self.names)
        for stage, name, (parameter, average) in self._averages_of_all():
            along = tuple(sorted(self.sharding.along(parameter)))
            if name in self._tied_apart:
                found[name, along].append(average)
            elif name not in tied:
                found[stage, along].append(average)
        return found

    def _averages_of_all(self) -> Iterator[tuple[int, str, Averaged]]:
        """Stage, name and average, where all holders of a weight have one."""
        if self.average is not None and self.owners is None:
            for stage in self.stages:
                for name, kept in self.average.of(stage).items():
                    yield stage, name, kept

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and extra state at hand, by all names; on the CPU.

        Whole tensors, also where this worker has a part: who has the others makes the same call.
        """
        parts = (*map(self._state_of, self.stages), self.unlisted.entries())
        pairs = ((names, _kept(value)) for entries in parts for names, value in entries)
        return {name: kept for names, kept in pairs for name in names}

    def _state_of(self, stage: int) -> Iterator[tuple[Sequence[str], Any]]:
        """Names and value of all that a stage's state has."""
        for layer in self.stages[stage].with_weights:
            for name, value in layer.state().items():
                full = layer.names[name]
                yield self._every_name.get(full, (full,)), value

    def stream(self, rank: int | None) -> Iterator[tuple[str, Any]]:
        """The state of the whole model by all names, on the CPU of one rank, or of all for None.

        Stage by stage from the first that holds it. All workers go through it to the end.
        """
        stream = Stream(self.transport, rank)
        yield from self._stages(stream, self._state_of)
        first = self.transport.rank == 0
        yield from stream.part(list(self.unlisted.entries()) if first else None, tells=first)

    def _stages(
        self, stream: Stream, entries: Callable[[int], Iterator[tuple[Sequence[Any], Any]]]
    ) -> Iterator[tuple[Any, Any]]:
        """What the first that holds a stage has of it, whom those follow that hold the other parts."""
        me = self.transport.rank
        for stage, holders in enumerate(self.holders):
            asks = self.worker == holders[0] and self.layout.is_first(me, (REPLICA,))
            tells = asks and self.layout.is_first(me, self.layout.further)
            yield from stream.part(list(entries(stage)) if asks else None, tells=tells)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the weights at hand from a model's state.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        self._order_behind_copies()
        parts = []
        for copy in self.stages.values():
            for layer in copy.with_weights:
                part = {}
                for name, mine in layer.state().items():
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
                    if isinstance(mine, Tensor) and is_dtensor(mine):
                        part[name] = like(mine, part_of(given.to(mine.device), mine).clone())
                parts.append((layer, part))
        unlisted = self.unlisted.found_in(state)
        for layer, part in parts:
            layer.load_state(part)
        self.unlisted.load(unlisted)
        if self.average is not None:
            self.average.begin()

    def training_state(self) -> dict[str, Any]:
        """What the optimisers and schedulers at hand keep: by parameter's name, by stage; as there."""
        every = chain.from_iterable(map(self._training_of, self.stages))
        return _assembled((key, _kept(value)) for (key,), value in every)

    def whole_training_state(self, rank: int | None = None) -> dict[str, Any]:
        """The same of all stages, on one rank or on all for None; nothing on others. All workers call it."""
        stream = Stream(self.transport, rank)
        if self.owners is None:
            return _assembled(self._stages(stream, self._training_of))
        parts = (  # each that holds a stage has what it updates
            stream.part(list(self._training_of(stage)) if held else None, tells=held)
            for stage in range(len(self.holders))
            for held in (stage in self.stages,)
        )
        return _assembled(chain.from_iterable(parts))

    def _training_of(self, stage: int) -> Iterator[tuple[Sequence[_Kept], Any]]:
        """What a stage's optimiser keeps for each parameter, after its options; and the scheduler's state."""
        if stage in self.optimizers:
            optimizer, names = self.optimizers[stage], self.updated_names(stage)
            for group in optimizer.param_groups:
                options = {key: _kept(value) for key, value in group.items() if not key.startswith("param")}
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    yield (_Kept("optimizer", name),), options
                    for slot, value in optimizer.state.get(parameter, {}).items():
                        yield (_Kept("optimizer", name, slot),), value
        if stage in self.schedulers:
            yield (_Kept("scheduler", stage),), self.schedulers[stage].state_dict()
        if self.average is not None:
            yield (_Kept("averaged", stage),), self.average.updates(stage)
            for name, kept in self.average.of(stage).items():
                yield (_Kept("ema", name),), kept.laid_out

    def load_training_state(self, state: Mapping[str, Any], *, options: bool = True) -> None:
        """Take what the optimisers and schedulers at hand keep from a whole training's state.

        Args:
            state: as ``training_state`` gives it.
            options: whether the optimisers' options and the schedulers are taken too.

        Raises:
            ConfigError: a parameter is missing, or a scheduler that fits.
        """
        self._order_behind_copies()
        for stage, optimizer in self.optimizers.items():
            names = self.updated_names(stage)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    every = (name, *self.aliases.get(name, ()))
                    kept = next((state["optimizer"][n] for n in every if n in state["optimizer"]), None)
                    if kept is None:
                        raise ConfigError(f"the training state has nothing of the optimizer for {name!r}")
                    if options:
                        group.update(deepcopy(kept["options"]))
                    homes = {slot: home_of(slot, optimizer, group, parameter) for slot in kept["state"]}
                    optimizer.state[parameter] = {
                        slot: _taken(value, parameter, homes[slot]) for slot, value in kept["state"].items()
                    }
        for stage, scheduler in self.schedulers.items() if options else ():
            given = _schedule(state["scheduler"], stage, scheduler)
            if given is None:
                raise ConfigError(
                    f"the training state has no learning-rate schedule for stage {stage} with its "
                    f"{len(self.optimizers[stage].param_groups)} groups of parameters; load it with the "
                    "stages it was saved with"
                )
            scheduler.load_state_dict(given)
        self._load_average(state)

    def _load_average(self, state: Mapping[str, Any]) -> None:
        given = state.get("ema")
        if self.average is None:
            if given is not None:
                _LOG.warning(
                    "the training state has an average of the weights, and it is not taken: call ema(decay) "
                    "before the state is loaded"
                )
            return
        if given is None and self.average.nbytes:
            _LOG.warning("the training state has no average of the weights: it begins with those loaded")
        if given is None:
            return
        every = self.aliases
        self.average.load(
            lambda name: next((given[n] for n in (name, *every.get(name, ())) if n in given), None),
            max(state["averaged"].values(), default=0),
        )


def _schedule(
    given: Mapping[int, dict[str, Any]], stage: int, scheduler: LRScheduler
) -> dict[str, Any] | None:
    """A scheduler's state: the stage's, or with other cuts than then any stage's, for the rates at hand.

    The optimiser's groups have their options by now, which tell the rates.
    """
    mine, groups = scheduler.state_dict(), scheduler.optimizer.param_groups
    here = [state for number, state in given.items() if number == stage]
    for state in (*here, *given.values()):
        fitting = deepcopy(state)
        if "base_lrs" in fitting and all("initial_lr" in group for group in groups):
            fitting["base_lrs"] = [group["initial_lr"] for group in groups]
            fitting["_last_lr"] = [group["lr"] for group in groups]
        if not any(fitting.get("lr_lambdas", ())):  # functions are not in the state
            fitting |= {key: mine[key] for key in ("lr_lambdas",) if key in mine}
        lists = [key for key, value in mine.items() if isinstance(value, list)]
        if fitting.keys() == mine.keys() and all(len(fitting[key]) == len(mine[key]) for key in lists):
            return fitting
    return None


class _Kept(NamedTuple):
    """What an optimiser keeps for a weight in a slot, or its options; or what else a weight or stage has."""

    kind: str
    of: str | int
    slot: str | None = None


def _assembled(found: Iterable[tuple[_Kept, Any]]) -> dict[str, Any]:
    """What an optimiser's options come before."""
    state: dict[str, Any] = {"optimizer": {}, "scheduler": {}}
    for key, value in found:
        if key.kind != "optimizer":
            state.setdefault(key.kind, {})[key.of] = value
        elif key.slot is None:
            state["optimizer"][key.of] = {"state": {}, "options": value}
        else:
            state["optimizer"][key.of]["state"][key.slot] = value
    return state


def _kept(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return whole(value).detach().cpu().clone()


def _taken(value: Any, parameter: Tensor, home: torch.device) -> Any:
    """What ``_kept`` gave of a parameter's optimiser, for the parameter at hand; one number goes ``home``."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if not value.dim():
        return value.to(home, copy=True)
    value = value.to(parameter.device, copy=True)
    if is_dtensor(parameter) and value.shape == parameter.shape:
        return like(parameter, part_of(value, parameter).clone())
    return value
