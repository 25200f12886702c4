"""State of a worker's weights, optimisers and averages: saved, sent to others, and loaded.

Invariant: what is saved has the model's own names and whole tensors, so that another pipeline of the same
model loads it, under other cuts and other meshes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.common.tensors.dtensors import full_tensor, is_dtensor, like, part_of
from counterflow.errors import ConfigError

from ..mesh.parallel_dims import ParallelDims
from ..stages.stage import LocalStage
from ..transport.base import Transport
from .ema import WeightEma
from .extra_state import ExtraState
from .group_state import (
    FURTHER,
    common_options,
    further_state,
    load_common,
    refuse_another_optimizer,
    scheduler_state,
)
from .loss_scale import LossScale
from .names import Names, first_of, matching
from .optimizers import home_of
from .parameter_placement import ParameterPlacement
from .pending_copies import PendingCopies
from .stage_optimizers import StageOptimizers
from .state_records import LOSS_SCALE, RESIDUAL, StateName, assembled, refuse_other_ranks
from .streaming import Stream

_LOG = logging.getLogger(__name__)

_OF_GROUP = {"params", "param_names"}
"""What an optimiser's group has beside options."""

Load = Callable[[], None]
"""A function that loads a state which was checked; until it is called, nothing is changed."""

Saved = list[list[tuple[str, nn.Parameter, Any]]]
"""By group of an optimiser, the name of each parameter, the parameter, and its saved state."""


class LocalState:
    """A worker's part of the model's and the training's state.

    Args:
        stages: the worker's stages.
        names: names of the parameters of all stages.
        aliases: by the first name of a tensor that the model has under several, all its names.
        extra_state: state of the model that is in none of its layers.
        holders: by stage, the workers of a group that hold a copy.
        dims: record of the parallel dimensions.
        placement: the worker's parameters.
        optimizers: optimisers and schedulers of its stages.
        ema: average of its weights, once it is requested.
        loss_scale: scale of the losses; None: they are not scaled.
        copies: copies of the state that are being made, which are ordered before a load.
        transport: transport to the other workers.
    """

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        *,
        names: Names,
        aliases: Mapping[str, Sequence[str]],
        extra_state: ExtraState,
        holders: Sequence[Sequence[int]],
        dims: ParallelDims,
        placement: ParameterPlacement,
        optimizers: StageOptimizers,
        ema: WeightEma,
        loss_scale: LossScale | None,
        copies: PendingCopies,
        transport: Transport,
    ) -> None:
        self._stages, self._aliases, self._extra_state = stages, aliases, extra_state
        self._holders, self._dims, self._transport = holders, dims, transport
        self._placement, self._optimizers, self._ema = placement, optimizers, ema
        self._loss_scale, self._copies = loss_scale, copies
        self._every_name = {name: tuple(names) for names in aliases.values() for name in names}
        self._tied_names = _tied_names(names, aliases)

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and extra state at hand, by all names; on the CPU.

        Whole tensors, also where this worker has a part: who has the others makes the same call.
        """
        parts = (*map(self._state_of, self._stages), self._extra_state.entries())
        pairs = ((names, _host_copy(value)) for entries in parts for names, value in entries)
        return {name: copy for names, copy in pairs for name in names}

    def weights(self) -> dict[Sequence[str], Any]:
        """Parameters, buffers and extra state at hand as they are, not copied, by all their names."""
        parts = (*map(self._state_of, self._stages), self._extra_state.entries())
        return {tuple(names): value for names, value in chain.from_iterable(parts)}

    def _state_of(self, stage: int) -> Iterator[tuple[Sequence[str], Any]]:
        for layer in self._stages[stage].with_weights:
            for name, value in layer.state().items():
                full = layer.names[name]
                yield self._every_name.get(full, (full,)), value

    def entries(self) -> Iterator[tuple[StateName, Any]]:
        """All state at hand as it is, not copied: of the model under the first name that is known, kind
        ``model``, then of the training.
        """
        states = (*map(self._state_of, self._stages), self._extra_state.entries())
        for names, value in chain.from_iterable(states):
            yield StateName("model", names[0]), value
        for (key,), value in chain.from_iterable(map(self._training_of, self._stages)):
            yield key, value
        for (key,), value in self._residuals():
            yield key, value

    def stream(self, rank: int | None) -> Iterator[tuple[str, Any]]:
        """The state of the whole model by all names, on the CPU of one rank, or of all for None.

        Stage by stage from the first that holds it. All workers go through it to the end.
        """
        stream = Stream(self._transport, rank)
        yield from self._of_stages(stream, self._state_of)
        first = self._transport.rank == 0
        yield from stream.part(list(self._extra_state.entries()) if first else None, sends=first)

    def _of_stages(
        self, stream: Stream, entries: Callable[[int], Iterator[tuple[Sequence[Any], Any]]]
    ) -> Iterator[tuple[Any, Any]]:
        # of each stage from its first holder, with which the holders of other parts send
        me = self._transport.rank
        for stage, holders in enumerate(self._holders):
            gathers = self._dims.gathers_state(me, holders)
            sends = self._dims.sends_state(me, holders)
            yield from stream.part(list(entries(stage)) if gathers else None, sends=sends)

    def prepare_model(self, state: Mapping[str, Any]) -> Load:
        """Check a model's state, and return the function that takes the weights at hand from it.

        Raises:
            ConfigError: a name is missing, a shape differs, or names of one weight have different values.
        """
        parts = []
        for local_stage in self._stages.values():
            for layer in local_stage.with_weights:
                part = {}
                for name, value in layer.state().items():
                    full = layer.names[name]
                    part[name] = saved = matching(state, (full, *self._tied_names.get(full, ())), value)
                    if isinstance(value, Tensor) and is_dtensor(value):
                        part[name] = like(value, part_of(saved.to(value.device), value).clone())
                parts.append((layer, part))
        extra_state = self._extra_state.found_in(state)

        def load() -> None:
            self._copies.order()
            for layer, part in parts:
                layer.load_state(part)
            self._extra_state.load(extra_state)
            if self._ema.average is not None:
                self._ema.average.begin()

        return load

    def training_state(self) -> dict[str, Any]:
        """State of the optimisers and schedulers at hand: by parameter's name, by stage; on their device."""
        entries = chain.from_iterable(map(self._training_of, self._stages))
        return assembled((key, _host_copy(value)) for (key,), value in chain(entries, self._residuals()))

    def whole_training_state(self, rank: int | None = None) -> dict[str, Any]:
        """Training state of all stages, on ``rank`` or, for None, on all; else empty. All workers call it."""
        stream = Stream(self._transport, rank)
        residuals = stream.part(list(self._residuals()), sends=True)  # each holder has its own
        if self._optimizers.owners is None:
            return assembled(chain(self._of_stages(stream, self._training_of), residuals))
        parts = (  # each that holds a stage has what it updates
            stream.part(list(self._training_of(stage)) if holds else None, sends=holds)
            for stage in range(len(self._holders))
            for holds in (stage in self._stages,)
        )
        return assembled(chain(chain.from_iterable(parts), residuals))

    def _residuals(self) -> Iterator[tuple[Sequence[StateName], Tensor]]:
        rank = str(self._transport.rank)
        for gradients in self._placement.all_gradients():
            for name, residual in gradients.residuals.items():
                yield (StateName(RESIDUAL, name, rank),), residual

    def _training_of(self, stage: int) -> Iterator[tuple[Sequence[StateName], Any]]:
        if stage in self._optimizers.by_stage:
            optimizer, names = self._optimizers.by_stage[stage], self._optimizers.names(stage)
            scheduler, lists = self._optimizers.schedulers.get(stage), self._optimizers.group_lists
            further = further_state(optimizer, scheduler, lists.get(stage, ()))
            for group, extra in zip(optimizer.param_groups, further, strict=True):
                options = {key: _host_copy(value) for key, value in group.items() if key not in _OF_GROUP}
                if extra:
                    options[FURTHER] = _host_copy(extra)
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    yield (StateName("optimizer", name),), options
                    for slot, value in optimizer.state.get(parameter, {}).items():
                        yield (StateName("optimizer", name, slot),), value
        if stage in self._optimizers.schedulers:
            yield (StateName("scheduler", stage),), self._optimizers.schedulers[stage].state_dict()
        if self._loss_scale is not None:
            yield (StateName(LOSS_SCALE, stage),), self._loss_scale.state()
        if self._ema.average is not None:
            yield (StateName("averaged", stage),), self._ema.average.updates(stage)
            for name, average in self._ema.average.of(stage).items():
                yield (StateName("ema", name),), average.laid_out

    def prepare_training(self, state: Mapping[str, Any], *, options: bool = True) -> Load:
        """Check a whole training's state, and return the function that takes from it what optimisers and
        schedulers at hand keep.

        Args:
            state: as ``training_state`` gives it.
            options: whether the optimisers' options and the schedulers are taken too.

        Raises:
            ConfigError: a parameter is missing, or a scheduler that fits; or parameters of one group have
                other options each.
        """
        saved_of = {
            stage: self._saved_of(stage, optimizer, state["optimizer"])
            for stage, optimizer in self._optimizers.by_stage.items()
        }
        groups = {stage: self._options(stage, saved) for stage, saved in saved_of.items()} if options else {}
        schedules = {
            stage: self._schedule(stage, scheduler, state["scheduler"], groups[stage])
            for stage, scheduler in (self._optimizers.schedulers.items() if options else ())
        }
        residuals = state.get(RESIDUAL) or {}
        self._refuse_other_residuals(residuals)
        scales = [*state.get(LOSS_SCALE, {}).values()]
        if scales and self._loss_scale is not None:
            self._loss_scale.refuse_other(scales[0])
        average = self._average_in(state)

        def load() -> None:
            self._copies.order()
            for stage, saved in saved_of.items():
                self._load_optimizer(stage, saved, groups.get(stage))
            for stage, schedule in schedules.items():
                self._optimizers.schedulers[stage].load_state_dict(schedule)
            if average is not None and self._ema.average is not None:
                updates = max(state["averaged"].values(), default=0)
                self._ema.average.load(lambda name: first_of(average, self._names_of(name)), updates)
            self._load_residuals(residuals)
            if scales and self._loss_scale is not None:
                self._loss_scale.load(scales[0])
            elif self._loss_scale is not None:
                _LOG.warning(
                    "the training state has no loss scale: it goes on with %g", self._loss_scale.scale
                )

        return load

    def _saved_of(self, stage: int, optimizer: Optimizer, states: Mapping[str, Any]) -> Saved:
        names = self._optimizers.names(stage)
        by_group: Saved = []
        for group in optimizer.param_groups:
            by_group.append([])
            for parameter in group["params"]:
                name = names[id(parameter)]
                saved = first_of(states, self._names_of(name))
                if saved is not None:
                    by_group[-1].append((name, parameter, saved))
                elif parameter.requires_grad:  # other trainers keep nothing of what is not trained
                    raise ConfigError(f"the training state has nothing of the optimizer for {name!r}")
        return by_group

    def _options(self, stage: int, saved: Saved) -> list[Mapping[str, Any]]:
        optimizer = self._optimizers.by_stage[stage]
        by_group: list[Mapping[str, Any]] = []
        for group, of_group in zip(optimizer.param_groups, saved, strict=True):
            options = {name: state["options"] for name, _, state in of_group}
            if options:
                refuse_another_optimizer(optimizer, next(iter(options.values())))
            by_group.append(common_options(options) if options else group)
        return by_group

    def _schedule(
        self,
        stage: int,
        scheduler: LRScheduler,
        states: Mapping[int, dict[str, Any]],
        options: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        schedule = scheduler_state(states, stage, scheduler, options, self._optimizers.group_lists[stage])
        if schedule is None:
            raise ConfigError(
                f"the training state has no learning-rate schedule for stage {stage} with its {len(options)} "
                "groups of parameters; load it with the stages it was saved with"
            )
        return schedule

    def _load_optimizer(self, stage: int, saved: Saved, options: Sequence[Mapping[str, Any]] | None) -> None:
        optimizer = self._optimizers.by_stage[stage]
        for number, (group, of_group) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
            if options is not None and of_group:
                group.update(deepcopy({k: v for k, v in options[number].items() if k != FURTHER}))
                load_common(optimizer, options[number].get(FURTHER, {}))
            for _, parameter, state in of_group:
                homes = {slot: home_of(slot, optimizer, group, parameter) for slot in state["state"]}
                optimizer.state[parameter] = {
                    slot: _device_copy(value, parameter, homes[slot])
                    for slot, value in state["state"].items()
                }

    def _refuse_other_residuals(self, residuals: Mapping[str, Mapping[str, Tensor]]) -> None:
        for gradients in self._placement.all_gradients():
            for name in gradients.residuals:
                by_rank = first_of(residuals, self._names_of(name))
                if by_rank:
                    refuse_other_ranks(name, by_rank, gradients.ranks, str(self._transport.rank))

    def _load_residuals(self, residuals: Mapping[str, Mapping[str, Tensor]]) -> None:
        rank, compressed = str(self._transport.rank), False
        for gradients in self._placement.all_gradients():
            for name, residual in gradients.residuals.items():
                compressed = True
                by_rank = first_of(residuals, self._names_of(name))
                if by_rank:
                    residual.copy_(by_rank[rank])
                else:  # as of a weight that was frozen
                    residual.zero_()
        if residuals and not compressed:
            _LOG.warning(
                "the training state has residuals of compressed gradient sums, and they are not taken: this "
                "pipeline sums gradients in full"
            )
        if compressed and not residuals:
            _LOG.warning("the training state has no residuals of gradient sums: they begin with zero")

    def _names_of(self, first: str) -> tuple[str, ...]:
        return first, *self._aliases.get(first, ())

    def _average_in(self, state: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
        average: Mapping[str, Tensor] | None = state.get("ema")
        if self._ema.average is None:
            if average is not None:
                _LOG.warning(
                    "the training state has an average of the weights, and it is not taken: call ema(decay) "
                    "before the state is loaded"
                )
            return None
        if average is None and self._ema.average.nbytes:
            _LOG.warning("the training state has no average of the weights: it begins with those loaded")
        if average is not None:
            self._ema.average.refuse_missing(lambda name: first_of(average, self._names_of(name)) is not None)
        return average


def _tied_names(names: Names, aliases: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    # By each name of a weight with several, the rest of them, on whatever stages.
    by_first = {first: {*same} for first, same in aliases.items()}
    for of_stage in names:
        for name, first in of_stage:
            by_first.setdefault(first, {first}).add(name)
    return {name: sorted(same - {name}) for same in by_first.values() if len(same) > 1 for name in same}


def _host_copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return full_tensor(value).detach().cpu().clone()


def _device_copy(value: Any, parameter: Tensor, scalar_device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if not value.dim():
        return value.to(scalar_device, copy=True)
    value = value.to(parameter.device, copy=True)
    if is_dtensor(parameter) and value.shape == parameter.shape:
        return like(parameter, part_of(value, parameter).clone())
    return value
