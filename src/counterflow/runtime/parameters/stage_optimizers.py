"""Optimisers and learning-rate schedulers of a worker's stages, made by the user's functions and stepped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.errors import ConfigError

from ..stages.randomness import RandomStreams
from ..transport.base import Transport
from .group_state import group_lists
from .optimizer_probe import OptimizerProbe
from .optimizers import MakeOptimizer, MakeScheduler, optimizer_of, refuse_others, scheduler_of
from .parameter_placement import ParameterPlacement
from .recipes import Recipes
from .sharded_updates import Owners
from .tensor_options import TensorOptions


class StageOptimizers:
    """Optimisers of one worker's stages; all workers make theirs together.

    Args:
        stages: numbers of the worker's stages.
        placement: the worker's parameters, by the stage that updates them.
        owners: owners of the optimiser state, if it is sharded (ZeRO stage 1).
        optimizer: the user's function of parameters to an optimiser.
        scheduler: the user's function of an optimiser to a learning-rate scheduler.
        streams: random streams: what an optimiser draws is the same on all copies of a stage.
        transport: transport to the other workers.

    Attributes:
        schedulers: schedulers by stage.

    Raises:
        ConfigError: a pipeline cannot step an optimiser, or workers made theirs differently.
    """

    def __init__(
        self,
        stages: Iterable[int],
        placement: ParameterPlacement,
        owners: Owners | None,
        *,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        streams: RandomStreams,
        transport: Transport,
    ) -> None:
        self._placement, self.owners, self._streams = placement, owners, streams
        self._by_stage: dict[int, Optimizer] = {}
        self._tensor_options: dict[int, TensorOptions] = {}
        self.schedulers: dict[int, LRScheduler] = {}
        self.group_lists: dict[int, frozenset[str]] = {}
        """By stage, names of its scheduler's lists with an entry for each group."""
        sharded = owners is not None
        self._probe = OptimizerProbe(optimizer, streams, transport, sharded=sharded)
        for stage in stages:
            parameters = self.parameters(stage)
            of_stage = optimizer_of(stage, optimizer, parameters) if parameters else None
            if of_stage is not None:
                self._by_stage[stage] = of_stage
                self._tensor_options[stage] = TensorOptions(of_stage)
                if scheduler is not None:
                    self.schedulers[stage] = scheduler_of(stage, scheduler, of_stage)
                    with streams.preserved():
                        self.group_lists[stage] = group_lists(scheduler, of_stage, self.schedulers[stage])

        def separate(parameters: Any) -> Optimizer:
            of_trial = optimizer(parameters)
            TensorOptions(of_trial)  # the scheduler of a trial must not change the user's tensors either
            return of_trial

        recipes = Recipes(separate, scheduler, streams, transport, sharded=sharded)
        recipes.compare(self.by_stage, self.schedulers, self.group_lists)
        self.refuse_coupled()

    @property
    def by_stage(self) -> Mapping[int, Optimizer]:
        """Optimisers of the stages with parameters, with what the user has written into tensor options."""
        for options in self._tensor_options.values():
            options.follow()
        return self._by_stage

    def parameters(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """Parameters of a stage's optimiser, by first name."""
        return [
            (name, parameter)
            for gradients in self._placement.updated_with(stage)
            for name, parameter in gradients.parameters.items()
            if self.owners is None or self.owners.owned_here(name)
        ]

    def names(self, stage: int) -> dict[int, str]:
        """First names of the parameters that a stage's update changes, by identity.

        Raises:
            ConfigError: the user has added a parameter of another stage to the optimiser.
        """
        groups = self._placement.updated_with(stage)
        names = {id(p): name for gradients in groups for name, p in gradients.parameters.items()}
        if stage in self.by_stage:
            refuse_others(self.by_stage[stage], names, stage)
        return names

    def refuse_coupled(self) -> None:
        """Refuse an optimiser whose update of a parameter depends on others, or on how it is sharded.

        All workers call it.

        Raises:
            ConfigError: the model has several optimisers, and one is such, or one updates shards otherwise.
        """
        self._probe.refuse_sharded(self.by_stage, self.parameters)
        self._probe.refuse(self.by_stage, self.parameters)

    def step(self, stage: int, step: int) -> None:
        """Step a stage's optimiser and scheduler.

        The optimiser draws random numbers from its own stream, fixed by seed, step and stage: all copies of
        the stage draw equal numbers, whatever their workers did before.

        Raises:
            ConfigError: the optimiser draws, and another worker updates one of its weights for another stage.
        """
        if stage in self.by_stage:
            optimizer, shared = self.by_stage[stage], self._placement.split_ties
            with self._streams.update("optimizer", step, stage):
                before = self._streams.states() if stage in shared else []
                self._probe.step(stage, optimizer)
                if before and self.owners is None and not self._streams.drew_nothing(before):
                    name, stages = shared[stage]
                    raise ConfigError(
                        f"the optimizer of stage {stage}, a {type(optimizer).__name__}, draws "
                        f"random numbers in its step, and {name} is a weight of stages {stages[0]} and "
                        f"{stages[-1]}, whose workers would draw others for it; do not tie it, or take an "
                        "optimizer that draws nothing"
                    )
        if stage in self.schedulers:
            self.schedulers[stage].step()
