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
from typing import cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.common.tensors.dtensors import local
from counterflow.common.tensors.optimizer_state import state_tensors
from counterflow.errors import ConfigError
from counterflow.program.actions import StartSync, Summed, SyncAction, WaitSync

from ..mesh.parallel_dims import ParallelDims
from ..mini_batch.refusal import refusing
from ..stages.randomness import RandomStreams
from ..stages.stage import LocalStage
from ..transport.base import Group, Transport
from .ema import ExponentialAverage, WeightEma
from .extra_state import ExtraState
from .gradient_norms import OwnNorm, SquaredNorms, squared_norms
from .gradients import GradientGroup
from .hooks import Hooks
from .local_state import LocalState
from .loss_scale import LossScale
from .mutation_check import InPlaceMutationCheck
from .names import Names, named_parameters, named_tensors, shared_names
from .parameter_placement import ParameterPlacement
from .pending_copies import PendingCopies
from .replica_digests import Key, ReplicaDigests
from .sharded_updates import Owners
from .stage_optimizers import StageOptimizers
from .statistics import Statistics
from .trainable import check_same_choices, choose, trainable_choices

_LOG = logging.getLogger(__name__)


class Weights:
    """The parameters of the stages a worker holds, as a step uses them: summed, clipped, updated, compared.

    Args:
        stages: the worker's stages.
        names: names of the parameters of all stages of the model.
        aliases: by the first name of a tensor that the model has under several, all its names.
        extra_state: state of the model that is in none of its layers.
        dims: record of the parallel dimensions.
        placement: the worker's parameters, by who else holds them.
        optimizers: optimisers and schedulers of its stages.
        ema: average of its weights, once it is requested.
        loss_scale: factor of the losses, and so of the gradients until they are used; None: 1.
        state: the worker's part of the model's and the training's state.
        copies: copies of the state that are being made, which are ordered before a change.
        streams: random streams: what hooks of parameters draw is the same on all copies.
        transport: transport to the other workers.
    """

    keeps_gradients = False
    """True if ``kept_gradients`` has the gradients of the last update."""

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        *,
        names: Names,
        aliases: Mapping[str, Sequence[str]],
        extra_state: ExtraState,
        dims: ParallelDims,
        placement: ParameterPlacement,
        optimizers: StageOptimizers,
        ema: WeightEma,
        loss_scale: LossScale | None,
        state: LocalState,
        copies: PendingCopies,
        streams: RandomStreams,
        transport: Transport,
    ) -> None:
        self.stages, self.transport, self.dims = stages, transport, dims
        self.names, self.aliases, self.extra_state = names, aliases, extra_state
        self.placement, self._optimizers, self._ema = placement, optimizers, ema
        self.loss_scale, self.state, self._copies = loss_scale, state, copies
        self.kept_gradients: dict[str, Tensor] = {}
        self.hooks = Hooks(
            parameter for local_stage in stages.values() for parameter in local_stage.parameters()
        )
        self._streams = streams
        self.hooked = any(row[0] for row in transport.gather([float(self.hooks.first() is not None)]))
        """True if a parameter of the model has a hook."""
        self.mutations = InPlaceMutationCheck(stages, names, placement.groups)
        self._statistics = Statistics(stages, placement.groups, self.mutations, transport)
        self.digests = ReplicaDigests(self._compared, dims, transport)

    @property
    def groups(self) -> list[Group]:
        """All groups of ranks that were made."""
        return self.placement.created

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        """Optimisers of the stages with parameters, by stage."""
        return self._optimizers.by_stage

    @property
    def schedulers(self) -> Mapping[int, LRScheduler]:
        """Learning-rate schedulers by stage."""
        return self._optimizers.schedulers

    @property
    def owners(self) -> Owners | None:
        """Owners of the optimiser state, if it is sharded (ZeRO stage 1)."""
        return self._optimizers.owners

    @property
    def average(self) -> ExponentialAverage | None:
        """Average of the trained weights; None: not requested."""
        return self._ema.average

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze the parameters at hand, by their first names in the model.

        Raises:
            ConfigError: FSDP holds one that changes.
        """
        parameters = {
            stage: named_parameters(local_stage, self.names) for stage, local_stage in self.stages.items()
        }
        choices = trainable_choices(parameters, chosen)
        with refusing():
            check_same_choices(choices, shared_names(self.names), self.transport)
        choose(parameters, choices, self.dims)
        for local_stage in self.stages.values():
            local_stage.trains = any(p.requires_grad for p in local_stage.parameters())
        for gradients in self.placement.all_gradients():
            gradients.make()
        self.detach()
        self._optimizers.refuse_coupled()
        if self.average is not None:
            self.average.renew()

    def updated_names(self, stage: int) -> dict[int, str]:
        """First names of the parameters that a stage's update changes, by identity."""
        return self._optimizers.names(stage)

    # -- gradients and updates

    def refuse_foreign_gradients(self) -> None:
        """Refuse gradients that were computed outside the steps.

        Raises:
            ConfigError: a parameter has one.
        """
        for gradients in self.placement.all_gradients():
            gradients.refuse_foreign()

    def attach(self) -> None:
        """Let backwards add to the gradients, and note what buffers of stages with copies hold.

        Raises:
            ConfigError: a parameter has a hook, and none had one when the pipeline was made.
        """
        if not self.hooked and (parameter := self.hooks.first()) is not None:
            tables = (
                named_parameters(local_stage, self.names).items() for local_stage in self.stages.values()
            )
            name = next(name for pairs in tables for name, candidate in pairs if candidate is parameter)
            raise ConfigError(
                f"{name} has a hook that was registered after the pipeline was made, and no parameter had "
                "one by then; register it before, or make the pipeline again"
            )
        self.hooks.take()
        for gradients in self.placement.all_gradients():
            gradients.attach()
        self._statistics.defer(deferring=True)
        self.mutations.note_buffers()

    def commit_statistics(self) -> None:
        """Update the running statistics that wait for the end of a mini-batch; all its sums are there."""
        self._statistics.commit()

    def update_balances(self) -> None:
        """Move the biases of routers by the tokens since the update before."""
        self._statistics.update_balances()

    def detach(self) -> None:
        """Hide the gradients from everything but backwards and updates."""
        self._statistics.defer(deferring=False)
        self.hooks.give_back()
        for gradients in self.placement.all_gradients():
            gradients.detach()
        for local_stage in self.stages.values():
            local_stage.end_gathering()

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
                return self.placement.by_stage[sync.stage]
            case Summed.TIED:
                return self.placement.tied[sync.stage, *sync.tied]
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
        return sum(SquaredNorms(group for group in self.placement.all_gradients() if group.counted).read())

    def own_norm(self) -> OwnNorm:
        """Result of ``squared_norm()``, and True if all local gradients are finite, counted or not."""
        modules = [stage.module for stage in self.stages.values() if stage.module is not None]
        orders = [module.fsdp_order for module in modules if module.fsdp_order is not None]
        return OwnNorm(self.placement.all_gradients(), [order.verify for order in orders])

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
        groups = self.placement.by_stage[stage]
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
        for gradients in self.placement.all_gradients() if stage is None else self.placement.by_stage[stage]:
            gradients.scale(factor)

    def call_hooks(self, step: int, stage: int | None = None) -> None:
        """Let the hooks of all parameters, or those of a stage, make others of a step's summed gradients."""
        if not self.hooked:
            return
        self.hooks.give_back()  # one may remove itself
        tied = self.placement.tied if stage is None else {}
        by_stage = self.placement.by_stage if stage is None else {stage: self.placement.by_stage[stage]}
        groups_by_stages = chain(tied.items(), (((number,), groups) for number, groups in by_stage.items()))
        for stages, groups in groups_by_stages:
            for index, gradients in enumerate(groups):
                with self._streams.update("hooks", step, index, *stages):
                    gradients.call_hooks(self.hooks)
        self.hooks.take()

    def not_finite(self) -> tuple[int, str] | None:
        """Stage and name of the first parameter whose gradient is not finite."""
        for gradients in self.placement.all_gradients():
            name = gradients.not_finite()
            if name is not None:
                return gradients.stage, name
        return None

    def update(self, stage: int, step: int) -> None:
        """Let a stage's optimiser make the update of a step's mini-batch, and clear the gradients.

        Raises:
            ConfigError: the optimiser draws, and another worker updates one of its weights for another stage.
        """
        self._copies.order()
        for gradients in self.placement.updated_with(stage):
            gradients.show()
            if self.keeps_gradients:
                for name, parameter in gradients.parameters.items():
                    self.kept_gradients.pop(name, None)
                    if parameter.grad is not None:
                        self.kept_gradients[name] = parameter.grad.detach().clone()
        self._optimizers.step(stage, step)
        if self.average is not None:
            self.average.update(stage)
        for gradients in self.placement.updated_with(stage):
            gradients.clear()

    def change_after(self, order: Callable[[], None]) -> None:
        """Let the next change of weights or optimiser state call ``order``, which orders it behind a copy."""
        self._copies.add(order)

    def share(self) -> None:
        """After the updates of all stages: send those made here to the other holders, if they are sharded."""
        if self.owners is not None:
            self.owners.share()

    def skip(self, stage: int) -> None:
        """Update nothing: clear the gradients that a stage's update would take."""
        for shard in self.placement.updated_with(stage):
            shard.clear()

    def clear(self) -> None:
        """Set all gradients to zero."""
        for gradients in self.placement.all_gradients():
            gradients.clear()
        for local_stage in self.stages.values():
            local_stage.discard_gradients()

    def weight_tensors(self) -> Iterator[Tensor]:
        """Weights in all stored versions, and buffers."""
        for local_stage in self.stages.values():
            yield from map(local, local_stage.parameters())
            yield from local_stage.versions.tensors if local_stage.versions is not None else ()
            yield from (buffer for layer in local_stage.with_weights for buffer in layer.module.buffers())

    def gradient_tensors(self) -> Iterator[Tensor]:
        """Buffers in which gradients are added and summed."""
        for gradients in self.placement.all_gradients():
            yield from gradients.buffers

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """States of the optimisers."""
        for optimizer in self.optimizers.values():
            yield from map(local, state_tensors(optimizer))

    def held_bytes(self) -> int:
        """Bytes of all versions of the weights, buffers, gradients and optimiser state on this worker."""
        total = sum(gradients.nbytes for gradients in self.placement.all_gradients())
        for local_stage in self.stages.values():
            weights = sum(local(parameter).nbytes for parameter in local_stage.parameters())
            total += weights * (1 if local_stage.versions is None else local_stage.versions.peak)
            total += sum(
                buffer.nbytes for layer in local_stage.with_weights for buffer in layer.module.buffers()
            )
        total += sum(tensor.nbytes for tensor in self.optimizer_tensors())
        return total if self.average is None else total + self.average.nbytes

    # -- an average of the weights

    def follow(self, decay: float) -> None:
        """Keep an average of the trained weights from here on; all workers call it.

        Raises:
            ConfigError: there is no such decay, or workers give others.
        """
        self._ema.start(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the trained weights are their averages; all workers enter it.

        Raises:
            ConfigError: there are none.
        """
        if self.average is None:
            raise ConfigError(
                "there is no average of the weights; call ema(decay) before the steps to average"
            )
        frozen = self.average.frozen()
        if self.owners is not None:  # a holder that keeps no averages learns of those of frozen weights
            frozen.update(*cast("list[list[str]]", self.transport.gather_objects(sorted(frozen))))
        averaged = [
            parameter
            for gradients in self.placement.all_gradients()
            for name, parameter in gradients.parameters.items()
            if parameter.requires_grad or name in frozen
        ]
        weights = [local(parameter).detach() for parameter in averaged]
        contents = [weight.clone() for weight in weights]
        self._copies.order()
        try:
            self.average.show()
            if self.owners is not None:
                self.owners.share(averaged)
            self._forget_casts()
            yield
        finally:
            for weight, before in zip(weights, contents, strict=True):
                weight.copy_(before)
            self._forget_casts()

    def _forget_casts(self) -> None:
        for local_stage in self.stages.values():
            local_stage.precision.forget()

    # -- comparing

    def check_copies(self, when: str) -> None:
        """Compare the copies of every stage, and of weights that several share, by digest; all call it.

        Raises:
            WorkerError: two copies differ.
        """
        self.digests.check(when)

    def _compared(self, buffers: bool) -> dict[Key, list[Tensor]]:
        compared: dict[Key, list[Tensor]] = defaultdict(list)
        for stage, local_stage in self.stages.items():
            for name, tensor in named_tensors(local_stage, self.names, buffers=buffers):
                compared[stage, self.dims.weight(name).distinct].append(tensor)
        for name, parameter in self.placement.split_tied.items():
            compared[name, self.dims.weight(name).distinct].append(parameter)
        tied = shared_names(self.names)
        for stage, name, average in self._averages_of_all():
            distinct = self.dims.weight(name).distinct
            if name in self.placement.split_tied:
                compared[name, distinct].append(average)
            elif name not in tied:
                compared[stage, distinct].append(average)
        return compared

    def _averages_of_all(self) -> Iterator[tuple[int, str, Tensor]]:
        if self.average is not None and self.owners is None:
            for stage in self.stages:
                for name, averaged in self.average.of(stage).items():
                    yield stage, name, averaged.average
