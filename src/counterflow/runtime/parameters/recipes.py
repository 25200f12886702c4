"""Optimisers and schedulers of all workers, compared by what the users' functions made.

Copies of a stage have equal optimisers. Those of several stages may differ, where the user's function goes by
the parameters that it is given: then it is tried on a few small ones, the same on all workers, and what it
makes of these has to be equal.

Invariant: no weights travel, and the function is called once more only where optimisers differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.common.tensors.source_descriptions import described, source_of_name
from counterflow.errors import ConfigError

from ..stages.randomness import RandomStreams
from ..transport.base import Transport
from .group_state import group_lists, has_entry_by_group
from .optimizers import MakeOptimizer, MakeScheduler, Parameters

_FOR_SPEED: Final = {"fused", "foreach", "capturable", "differentiable"}
"""Options by which a device's kernels are chosen."""

_OF_GROUPS: Final = {"base_lrs", "_last_lr", "last_epoch", "_step_count", "_initial_step"}
"""Parts of a scheduler's state that follow from the optimiser's groups."""


class Recipe(NamedTuple):
    """Description of the arguments of an optimiser and its scheduler.

    Attributes:
        options: by name, what does not depend on parameters where the user's function does not.
        groups: options of each group.
    """

    options: Mapping[str, str]
    groups: Sequence[Mapping[str, str]]

    @property
    def kinds(self) -> set[str]:
        """The groups, without how many are alike."""
        return {repr(sorted(group.items())) for group in self.groups}

    @classmethod
    def of(cls, optimizer: Optimizer, scheduler: LRScheduler | None, names: Collection[str]) -> Recipe:
        """The recipe of an optimiser that a user's function made; ``names`` are the ``group_lists``."""
        options = {"optimizer": source_of_name(type(optimizer))}
        options |= dict(_in_words(getattr(optimizer, "defaults", {})))
        groups = [dict(_in_words(g, without={"params", "initial_lr"})) for g in optimizer.param_groups]
        if scheduler is not None:
            options["scheduler"] = source_of_name(type(scheduler))
            state = {k: v for k, v in vars(scheduler).items() if k not in _OF_GROUPS and k != "optimizer"}
            by_group = {
                k: v for k, v in state.items() if k in names and has_entry_by_group(k, v, len(groups))
            }
            options |= _of_scheduler({k: v for k, v in state.items() if k not in by_group})
            groups = [
                _of_scheduler({k: v[number] for k, v in by_group.items()}) | group
                for number, group in enumerate(groups)
            ]
        return cls(options, groups)


class Recipes:
    """Comparison of one worker's optimisers with those of the others.

    Args:
        optimizer: the user's function of parameters to an optimiser.
        scheduler: the user's function of an optimiser to a scheduler; None: there is none.
        streams: random draws, which a trial leaves as they were.
        transport: transport to the other workers.
        sharded: whether each holder of a stage has the optimiser of some of its parameters alone.
    """

    def __init__(
        self,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        streams: RandomStreams,
        transport: Transport,
        *,
        sharded: bool,
    ) -> None:
        self._optimizer, self._scheduler, self._sharded = optimizer, scheduler, sharded
        self._streams, self._transport = streams, transport

    def compare(
        self,
        optimizers: Mapping[int, Optimizer],
        schedulers: Mapping[int, LRScheduler],
        names: Mapping[int, Collection[str]],
    ) -> None:
        """Compare the optimisers; all workers call it.

        Args:
            optimizers: this worker's, by stage.
            schedulers: this worker's, by stage.
            names: ``group_lists`` of the schedulers.

        Raises:
            ConfigError: workers made them otherwise.
        """
        recipes_here = {
            stage: Recipe.of(of_rank, schedulers.get(stage), names.get(stage, ()))
            for stage, of_rank in optimizers.items()
        }
        rows = cast("list[dict[int, Recipe]]", self._transport.gather_objects(recipes_here))
        first: dict[int, tuple[int, Recipe]] = {}
        for rank, row in enumerate(rows):
            for stage, recipe in row.items():
                source, known = first.setdefault(stage, (rank, recipe))
                _refuse_other(known, recipe, source, rank, f" of stage {stage}", groups=not self._sharded)
        recipes = [recipe for _, recipe in first.values()]
        if all(
            recipe.options == recipes[0].options and recipe.kinds == recipes[0].kinds for recipe in recipes
        ):
            return
        tried = cast("list[Recipe | None]", self._transport.gather_objects(self._tried()))
        of_rank = [(rank, recipe) for rank, recipe in enumerate(tried) if recipe is not None]
        for rank, recipe in of_rank[1:]:
            source, known = of_rank[0]
            _refuse_other(known, recipe, source, rank, "", groups=True)

    def _tried(self) -> Recipe | None:
        small = {"layer.weight": nn.Parameter(torch.zeros(2, 2)), "layer.bias": nn.Parameter(torch.zeros(2))}
        with self._streams.preserved():
            try:
                optimizer = self._optimizer(Parameters(small.items()))
                if self._scheduler is None:
                    return Recipe.of(optimizer, None, ())
                scheduler = self._scheduler(optimizer)
                return Recipe.of(optimizer, scheduler, group_lists(self._scheduler, optimizer, scheduler))
            except Exception:  # the user's function may raise anything
                return None


def _refuse_other(known: Recipe, recipe: Recipe, first: int, rank: int, where: str, *, groups: bool) -> None:
    pairs: list[tuple[Mapping[str, str], Mapping[str, str], str]] = [(known.options, recipe.options, "")]
    if groups:
        counts = [{"groups": str(len(recipe_of_rank.groups))} for recipe_of_rank in (known, recipe)]
        groups_of_both = zip(known.groups, recipe.groups, strict=False)
        pairs += [(counts[0], counts[1], "")]
        pairs += [
            (options, reference, f" of group {number}")
            for number, (options, reference) in enumerate(groups_of_both)
        ]
    for options, reference, group in pairs:
        for name in dict.fromkeys([*options, *reference]):
            if options.get(name) != reference.get(name):
                raise ConfigError(
                    f"the optimizer{where} of rank {first} has {name} = {options.get(name, 'none')}{group}, "
                    f"that of rank {rank} {name} = {reference.get(name, 'none')}; give all workers the same "
                    "optimizer and scheduler"
                )


def _of_scheduler(state: Mapping[str, Any]) -> dict[str, str]:
    return {f"scheduler's {name}": text for name, text in _in_words(state)}


def _in_words(values: Mapping[str, Any], without: set[str] | None = None) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name in _FOR_SPEED or (without and name in without):
            continue
        if isinstance(value, dict):
            continue
        text = described(value) if not isinstance(value, Tensor) or value.numel() == 1 else None
        if text is not None:
            yield name, text
