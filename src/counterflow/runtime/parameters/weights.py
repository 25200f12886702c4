"""One worker's weights: who else holds them, how they are summed, updated and compared.

Invariant: all copies of a stage are bitwise equal after every update. It knows nothing of orders or
micro-batches.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.errors import ConfigError
from counterflow.program.actions import StartSync, Summed, SyncAction, WaitSync

from ..dtensors import local
from ..mesh.parallel_dims import ParallelDims
from ..mini_batch.refusal import refusing
from ..stages.randomness import RandomStreams
from ..stages.stage import LocalStage
from ..transport.base import Transport
from .changes import Changes
from .compressed_sums import SumCompression
from .coupled import Coupling
from .ema import ExponentialAverage
from .extra_state import ExtraState
from .gradients import GradientGroup, OwnNorm, SquaredNorms, squared_norms
from .hooks import Hooks
from .local_state import LocalState
from .loss_scale import LossScale
from .names import Names, named_parameters, named_tensors, shared_names
from .optimizers import MakeOptimizer, MakeScheduler, optimizer_of, refuse_others, scheduler_of
from .parameter_placement import ParameterPlacement
from .recipes import Recipes
from .replica_digests import Key, ReplicaDigests
from .sharded_updates import Owners
from .statistics import Statistics
from .trainable import check_same_choices, choose, trainable_choices

_LOG = logging.getLogger(__name__)


class Weights:
    """The parameters of the stages a worker holds.

    Args:
        stages: the worker's stages.
        names: of the parameters of all stages of the model.
        aliases: by the first name of a tensor that the model has under several, all its names.
        holders: by stage, the workers of a group that hold a copy.
        dims: record of the parallel dimensions.
        transport: how to reach the others.
        optimizer: a function of parameters to an optimiser.
        scheduler: a function of an optimiser to a learning-rate scheduler.
        extra_state: what the model's state has beside that of its layers.
        streams: of random draws: what hooks of parameters and optimisers draw is the same on all copies.
        sharded: whether of a parameter's holders one alone has its optimiser state (ZeRO stage 1).
        compression: form in which gradients are summed; None: in full.
    """

    keeps_gradients = False
    """Whether ``kept_gradients`` has those of the last update."""
    average: ExponentialAverage | None = None
    """Average of the trained weights; None: not requested."""
    loss_scale: LossScale | None = None
    """By what gradients are too large until they are used; None: they are as they are."""

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        *,
        names: Names,
        aliases: Mapping[str, Sequence[str]],
        holders: Sequence[Sequence[int]],
        dims: ParallelDims,
        transport: Transport,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        streams: RandomStreams,
        extra_state: ExtraState,
        sharded: bool,
        compression: SumCompression | None = None,
    ) -> None:
        self.stages, self.transport = stages, transport
        self.names, self.aliases, self.extra_state = names, aliases, extra_state
        self.holders, self.dims = holders, dims
        self.kept_gradients: dict[str, Tensor] = {}
        self._copied: list[Callable[[], None]] = []
        """For each copy that is being made: orders what follows behind it."""
        extra_state.broadcast(transport)
        self.holdings = ParameterPlacement(stages, names, holders, dims, transport, compression=compression)
        self.groups = self.holdings.made
        """All groups that were made."""
        self.hooks = Hooks(parameter for copy in stages.values() for parameter in copy.parameters())
        self._streams = streams
        self.hooked = any(row[0] for row in transport.gather([float(self.hooks.first() is not None)]))
        """Whether any parameter of the model has a hook."""
        self.changes = Changes(stages, names, self.holdings.groups)
        self._statistics = Statistics(stages, self.holdings.groups, self.changes, transport)
        self.saved = LocalState(self)
        self.optimizers: dict[int, Optimizer] = {}
        self.schedulers: dict[int, LRScheduler] = {}
        self.owners = Owners(self.holdings.every(), names, transport) if sharded else None
        """Owners of the optimiser state, if it is sharded."""
        self._coupling = Coupling(optimizer, streams, transport, sharded=sharded)
        for stage in stages:
            parameters = self._optimized(stage)
            made = optimizer_of(stage, optimizer, parameters) if parameters else None
            if made is not None:
                self.optimizers[stage] = made
                if scheduler is not None:
                    self.schedulers[stage] = scheduler_of(stage, scheduler, made)
        recipes = Recipes(optimizer, scheduler, streams, transport, sharded=sharded)
        recipes.compare(self.optimizers, self.schedulers)
        self._coupling.refuse(self.optimizers, self._optimized)
        self.copies = ReplicaDigests(self._compared, dims, transport)

    # -- who holds what

    @property
    def worker(self) -> int:
        """The worker's number in its pipeline."""
        return self.holdings.worker

    def _optimized(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """What a stage's optimiser is made of, by name."""
        return [
            (name, parameter)
            for gradients in self.holdings.updated_with(stage)
            for name, parameter in gradients.parameters.items()
            if self.owners is None or self.owners.mine(name)
        ]

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze the parameters at hand, by their first names in the model.

        Raises:
            ConfigError: FSDP holds one that changes.
        """
        parameters = {stage: named_parameters(copy, self.names) for stage, copy in self.stages.items()}
        choices = trainable_choices(parameters, chosen)
        with refusing():
            check_same_choices(choices, shared_names(self.names), self.transport)
        choose(parameters, choices, self.dims)
        for copy in self.stages.values():
            copy.trains = any(p.requires_grad for p in copy.parameters())
        for gradients in self.holdings.every():
            gradients.make()
        self.detach()
        self._coupling.refuse(self.optimizers, self._optimized)
        if self.average is not None:
            self.average.renew()

    def updated_names(self, stage: int) -> dict[int, str]:
        """Names of the parameters that a stage's update changes, by identity."""
        groups = self.holdings.updated_with(stage)
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
        for gradients in self.holdings.every():
            gradients.attach()
        self._statistics.defer(deferring=True)
        self.changes.note_buffers()

    def commit_statistics(self) -> None:
        """Update the running statistics that wait for the end of a mini-batch; all its sums are there."""
        self._statistics.commit()

    def detach(self) -> None:
        """Hide the gradients from everything but backwards and updates."""
        self._statistics.defer(deferring=False)
        self.hooks.give_back()
        for gradients in self.holdings.every():
            gradients.detach()
        for copy in self.stages.values():
            copy.end_gathering()

    def start_sync(self, sync: StartSync) -> None:
        """Begin to sum gradients over all who hold them, or to average running statistics."""
        if sync.what is Summed.STATISTICS:
            self._statistics.start(sync.stage)
        for gradients in self._summed_in(sync):
            gradients.start(self.transport)

    def wait_sync(self, sync: WaitSync) -> None:
        """Wait until a gradient sum is complete."""
        if sync.what is Summed.STATISTICS:
            self._statistics.end(sync.stage)
        for gradients in self._summed_in(sync):
            gradients.wait()

    def _summed_in(self, sync: SyncAction) -> Sequence[GradientGroup]:
        match sync.what:
            case Summed.GRADIENTS:
                return self.holdings.own[sync.stage]
            case Summed.TIED:
                return self.holdings.tied[sync.stage, *sync.tied]
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
        return sum(SquaredNorms(one for one in self.holdings.every() if one.counted).read())

    def own_norm(self) -> OwnNorm:
        """What ``squared_norm()`` gives, and whether all gradients at hand are finite, counted or not."""
        return OwnNorm(self.holdings.every())

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
        groups = self.holdings.own[stage]
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
        for gradients in self.holdings.every() if stage is None else self.holdings.own[stage]:
            gradients.scale(factor)

    def call_hooks(self, step: int, stage: int | None = None) -> None:
        """Let the hooks of all parameters, or those of a stage, make others of a step's summed gradients."""
        if not self.hooked:
            return
        self.hooks.give_back()  # one may remove itself
        tied = self.holdings.tied if stage is None else {}
        own = self.holdings.own if stage is None else {stage: self.holdings.own[stage]}
        every = chain(tied.items(), (((number,), groups) for number, groups in own.items()))
        for stages, groups in every:
            for index, gradients in enumerate(groups):
                with self._streams.update("hooks", step, index, *stages):
                    gradients.call_hooks(self.hooks)
        self.hooks.take()

    def not_finite(self) -> tuple[int, str] | None:
        """Stage and name of the first parameter whose gradient is not finite."""
        for gradients in self.holdings.every():
            name = gradients.not_finite()
            if name is not None:
                return gradients.stage, name
        return None

    def update(self, stage: int, step: int) -> None:
        """Let a stage's optimiser make the update of a step's mini-batch, and clear the gradients.

        The optimiser draws random numbers from its own stream, fixed by seed, step and stage: all copies of
        the stage draw equal numbers, whatever their workers did before.

        Raises:
            ConfigError: the optimiser draws, and another worker updates one of its weights for another stage.
        """
        self.order_behind_copies()
        for gradients in self.holdings.updated_with(stage):
            gradients.show()
            if self.keeps_gradients:
                for name, parameter in gradients.parameters.items():
                    self.kept_gradients.pop(name, None)
                    if parameter.grad is not None:
                        self.kept_gradients[name] = parameter.grad.detach().clone()
        if stage in self.optimizers:
            with self._streams.update("optimizer", step, stage):
                before = self._streams.states() if stage in self.holdings.apart else []
                self._coupling.step(stage, self.optimizers[stage])
                if before and self.owners is None and not self._streams.drew_nothing(before):
                    name, stages = self.holdings.apart[stage]
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
        for gradients in self.holdings.updated_with(stage):
            gradients.clear()

    def change_after(self, order: Callable[[], None]) -> None:
        """Let the next change of weights or optimiser state (update, load, ``averaged``) call ``order``.

        Args:
            order: lets what the device is given from then on wait for a copy that is being made of them.
        """
        self._copied.append(order)

    def order_behind_copies(self) -> None:
        """Let what changes state from here on wait for the copies that are being made."""
        while self._copied:
            self._copied.pop()()

    def share(self) -> None:
        """After the updates of all stages: send those made here to the other holders, if they are sharded."""
        if self.owners is not None:
            self.owners.share()

    def skip(self, stage: int) -> None:
        """Update nothing: clear the gradients that a stage's update would take."""
        for shard in self.holdings.updated_with(stage):
            shard.clear()

    def clear(self) -> None:
        """Set all gradients to zero."""
        for gradients in self.holdings.every():
            gradients.clear()

    def held_bytes(self) -> int:
        """Bytes of all versions of the weights, buffers, gradients and optimiser state on this worker."""
        total = sum(gradients.nbytes for gradients in self.holdings.every())
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
        for rank, (other,) in enumerate(self.transport.gather([decay])):
            if other != decay:
                raise ConfigError(
                    f"rank {self.transport.rank} averages weights with a decay of {decay}, rank {rank} with "
                    f"{other}; all workers make the same calls"
                )
        self.average = ExponentialAverage(decay, self._optimized, self.stages)

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
        every = (p for gradients in self.holdings.every() for p in gradients.parameters.values())
        trained = [local(parameter).detach() for parameter in every if parameter.requires_grad]
        own = [weight.clone() for weight in trained]
        self.order_behind_copies()
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

    # -- comparing

    def check_copies(self, when: str) -> None:
        """Compare the copies of every stage, and of weights that several share, by digest; all call it.

        Raises:
            WorkerError: two copies differ.
        """
        self.copies.check(when)

    def _compared(self, buffers: bool) -> dict[Key, list[Tensor]]:
        """What is compared with what others hold of it."""
        compared: dict[Key, list[Tensor]] = defaultdict(list)
        for stage, copy in self.stages.items():
            for name, tensor in named_tensors(copy, self.names, buffers=buffers):
                compared[stage, self.dims.weight(name).distinct].append(tensor)
        for name, parameter in self.holdings.tied_apart.items():
            compared[name, self.dims.weight(name).distinct].append(parameter)
        tied = shared_names(self.names)
        for stage, name, average in self._averages_of_all():
            distinct = self.dims.weight(name).distinct
            if name in self.holdings.tied_apart:
                compared[name, distinct].append(average)
            elif name not in tied:
                compared[stage, distinct].append(average)
        return compared

    def _averages_of_all(self) -> Iterator[tuple[int, str, Tensor]]:
        """Stage, name and average, where all holders of a weight have one."""
        if self.average is not None and self.owners is None:
            for stage in self.stages:
                for name, averaged in self.average.of(stage).items():
                    yield stage, name, averaged.average
