"""Probe of optimisers whose update of one parameter depends on others, or on how it is sharded.

A stage has an optimiser of its own, and with ``zero_stage`` each worker has one of the weights that it
updates. An optimiser that computes a number from all its parameters then makes other updates than one
optimiser of the whole model does. ``verification.diagnosis.optimizer_coupling`` recognises it by runs of the
user's function; one that cannot be run there is recognised by its name, or in its first step.

Of weights that are sharded over further dimensions of the mesh each position updates its shard.
``verification.diagnosis.optimizer_shards`` compares that with an update of the whole weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from counterflow.common.tensors.torch_private import step_pre_hooks
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.optimizer_coupling import OptimizerCouplingDiagnosis, chooses_by_place
from counterflow.verification.diagnosis.optimizer_shards import OptimizerShardDiagnosis, ShardFailure

from ..stages.randomness import RandomStreams
from ..transport.base import Transport
from .optimizers import MakeOptimizer, Parameters

_COUPLED_NAMES = ("dadapt", "prodigy", "lamb")
"""Parts of the names of optimisers that couple parameters."""

_REMEDY = "take one that looks at each weight for itself (SGD, AdamW, Adafactor, Muon)"

_SHARD_REMEDY = "take one that treats each value by itself (SGD, AdamW), or Muon, or do not shard its weights"


class OptimizerProbe:
    """Refusal of optimisers that couple parameters, if one optimiser has only some of the model's.

    Args:
        make: the user's function of parameters to an optimiser.
        streams: random streams.
        transport: transport to the other workers.
        sharded: True if each worker updates some of a stage's weights; False: each stage all of its own.
    """

    def __init__(
        self, make: MakeOptimizer, streams: RandomStreams, transport: Transport, *, sharded: bool
    ) -> None:
        self._make, self._streams, self._transport = make, streams, transport
        self._sharded = sharded
        self._couples: dict[type, bool | None] = {}
        """True if an optimiser couples parameters, by its class; None: the diagnosis cannot run it."""
        self._undecided: set[int] = set()
        """Stages whose optimiser the diagnosis cannot run, before its first step."""
        self._hooks: dict[int, set[int]] = {}
        """Hooks before steps that the diagnosis ran, by stage, if there are several."""

    def refuse(
        self,
        optimizers: Mapping[int, Optimizer],
        optimized: Callable[[int], Sequence[tuple[str, nn.Parameter]]],
    ) -> None:
        """Refuse an optimiser that couples parameters if the model has several; all workers call it.

        Args:
            optimizers: optimisers by stage.
            optimized: returns the parameters of a stage's optimiser, by name.

        Raises:
            ConfigError: an optimiser couples parameters.
        """
        trained = [s for s in optimizers if any(p.requires_grad for _, p in optimized(s))]
        rows = self._transport.gather([min(trained, default=math.inf), max(trained, default=-math.inf)])
        if not self._sharded and min(row[0] for row in rows) >= max(row[1] for row in rows):
            return
        for stage in trained:
            optimizer = optimizers[stage]
            kind = type(optimizer)
            if kind not in self._couples:
                self._couples[kind] = self._diagnose(optimizer, optimized(stage))
            self._hooks.setdefault(stage, step_pre_hooks(optimizer))
            if self._couples[kind] or self._chooses_by_place(optimizer, optimized(stage)):
                raise _coupled_error(optimizer, stage, sharded=self._sharded)
            if self._couples[kind] is None:
                self._undecided.add(stage)

    def refuse_sharded(
        self,
        optimizers: Mapping[int, Optimizer],
        optimized: Callable[[int], Sequence[tuple[str, nn.Parameter]]],
    ) -> None:
        """Refuse an optimiser that updates shards otherwise than whole weights; all positions call it.

        Args:
            optimizers: optimisers by stage.
            optimized: returns the parameters of a stage's optimiser, by name.

        Raises:
            ConfigError: an optimiser does so at any position, or cannot update shards.
        """
        make, refusals, causes = self._make, list[str](), list[Exception | None]()
        for stage, optimizer in optimizers.items():
            parameters = optimized(stage)
            diagnosis = OptimizerShardDiagnosis(lambda named: make(Parameters(named)), optimizer, parameters)
            failure = diagnosis.run(self._streams.preserved())
            if failure is not None:
                refusals.append(_shard_refusal(optimizer, stage, failure))
                causes.append(failure.error)
        if any(row[0] for row in self._transport.gather([float(bool(refusals))])):
            rows = cast("list[list[str]]", self._transport.gather_objects(refusals))
            cause = next(iter(causes), None)
            raise ConfigError(next(row[0] for row in rows if row)) from cause

    def _diagnose(self, optimizer: Optimizer, parameters: Sequence[tuple[str, nn.Parameter]]) -> bool | None:
        make = self._make
        diagnosis = OptimizerCouplingDiagnosis(lambda named: make(Parameters(named)), optimizer, parameters)
        couples = diagnosis.run(self._streams.preserved())
        if couples is None and any(name in type(optimizer).__name__.lower() for name in _COUPLED_NAMES):
            return True
        return couples

    def _chooses_by_place(self, optimizer: Optimizer, parameters: Sequence[tuple[str, nn.Parameter]]) -> bool:
        make, state = self._make, self._streams.preserved()
        return chooses_by_place(lambda named: make(Parameters(named)), optimizer, parameters, state)

    def step(self, stage: int, optimizer: Optimizer) -> None:
        """Step a stage's optimiser; if the diagnosis could not run it, the first step is observed.

        Raises:
            ConfigError: the step changed options of its groups, which it computed from all parameters; or a
                hook was registered since the diagnosis.
        """
        if stage in self._hooks and not step_pre_hooks(optimizer) <= self._hooks[stage]:
            raise ConfigError(
                f"the optimizer of stage {stage} has a hook before its step that was registered after the "
                "pipeline was made, and sees this stage's weights alone; register it in the function that "
                "makes the optimizer, or clip by clip_norm"
            )
        before = _options_of(optimizer) if stage in self._undecided else None
        optimizer.step()
        if before is not None:
            _refuse_changed_options(optimizer, before, stage)
            self._undecided.discard(stage)


def _shard_refusal(optimizer: Optimizer, stage: int, failure: ShardFailure) -> str:
    subject = f"the optimizer of stage {stage}, a {type(optimizer).__name__},"
    if failure.error is None:
        return (
            f"{subject} updates a weight that is sharded over the mesh ({failure.name}) otherwise than the "
            "whole weight, as those do that read a norm of it by .item(), which is one of a position's "
            f"shard; {_SHARD_REMEDY}"
        )
    reason = re.split(r"\.?\s*\n|\. |\.$", str(failure.error).strip())[0]
    return (
        f"{subject} cannot update a weight that is sharded over the mesh ({failure.name}): "
        f"{type(failure.error).__name__}: {reason}; {_SHARD_REMEDY}"
    )


def _options_of(optimizer: Optimizer) -> list[dict[str, float]]:
    return [
        {key: float(value) for key, value in group.items() if isinstance(value, float | Tensor)}
        for group in optimizer.param_groups
    ]


def _refuse_changed_options(optimizer: Optimizer, before: list[dict[str, float]], stage: int) -> None:
    for earlier, later in zip(before, _options_of(optimizer), strict=True):
        changed = sorted(key for key in later if later[key] != earlier.get(key))
        if changed:
            raise ConfigError(
                f"the optimizer of stage {stage}, a {type(optimizer).__name__}, changed {changed[0]!r} of a "
                "group in its step, as those do that look at all parameters together, and it has some of the "
                f"model's alone; {_REMEDY}"
            )


def _coupled_error(optimizer: Optimizer, stage: int, *, sharded: bool) -> ConfigError:
    why = "zero_stage = 1 lets each worker update some of them" if sharded else "each stage has its own"
    return ConfigError(
        f"the optimizer of stage {stage}, a {type(optimizer).__name__}, updates a weight otherwise when it "
        f"has others beside it, so that it has to be one for the whole model, and {why}; {_REMEDY}, and "
        "let its function go by names (parameters.named), not by places in its list"
    )
