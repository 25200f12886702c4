"""Stages made by hand, for tests of what holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from counterflow.runtime.assembly import weights as build
from counterflow.runtime.mesh.parallel_dims import ParallelDims, WeightDims
from counterflow.runtime.mesh.rank_mesh import RankMesh
from counterflow.runtime.parameters.extra_state import ExtraState
from counterflow.runtime.parameters.names import Names
from counterflow.runtime.parameters.optimizers import MakeOptimizer, MakeScheduler
from counterflow.runtime.parameters.weights import Weights
from counterflow.runtime.stages.named_layer import NamedLayer
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.stages.stage import LocalStage
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.transport.local import Hub
from counterflow.schedule.modes import Recompute

STREAMS = RandomStreams(0, torch.device("cpu"))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def stage_of(number: int, modules: Sequence[nn.Module], first: int = 0) -> LocalStage:
    """A stage of some layers, the first of which has number ``first`` in the model."""
    layers = [
        NamedLayer(index, {name: f"{index}.{name}" for name in module.state_dict()}, module)
        for index, module in enumerate(modules, first)
    ]
    return LocalStage(number, layers, STREAMS, Recompute.NONE)


def names_of(*stages: LocalStage) -> Names:
    """The names of all stages' parameters; those that several have go by the first."""
    firsts: dict[int, str] = {}
    return [
        [
            (layer.names[name], firsts.setdefault(id(parameter), layer.names[name]))
            for layer in stage.with_weights
            for name, parameter in layer.module.named_parameters(remove_duplicate=False)
        ]
        for stage in stages
    ]


def weights_of(
    modules: Sequence[Sequence[nn.Module]],
    *,
    optimizer: MakeOptimizer = sgd,
    scheduler: MakeScheduler | None = None,
    model: nn.Module | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    holders: Sequence[Sequence[int]] | None = None,
    transport: Transport | None = None,
    sharded: bool = False,
    positions: int = 1,
    dims: Mapping[str, WeightDims] | None = None,
) -> Weights:
    """One worker's weights of a model in stages; by default it is alone, and has all stages.

    ``positions``: along a further dimension of the mesh without samples, with ``dims`` of weights by name.
    """
    transport = transport or Hub(1).transport(0)
    first, stages = 0, []
    for number, its in enumerate(modules):
        stages.append(stage_of(number, its, first))
        first += len(its)
    holders = holders or [[0]] * len(stages)
    count = max(map(max, holders)) + 1
    shape = transport.world_size // count // positions, count, *([positions] if positions > 1 else ())
    mesh = RankMesh(shape, tuple(range(transport.world_size)))
    worker = mesh.coordinates(transport.rank)[1]
    names = [layer.names for stage in stages for layer in stage.layers]
    return build.weights_of(
        {stage.stage: stage for stage in stages if worker in holders[stage.stage]},
        names=names_of(*stages),
        aliases=aliases or {},
        holders=holders,
        dims=ParallelDims(mesh, weights=dims or {}),
        transport=transport,
        optimizer=optimizer,
        scheduler=scheduler,
        streams=STREAMS,
        extra_state=ExtraState(nn.Module() if model is None else model, names),
        sharded=sharded,
    )


def backward(weights: Weights, *values: float) -> None:
    """Backwards that add a value to every gradient at hand, once for each value."""
    weights.attach()
    for value in values:
        for stage in weights.stages.values():
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    (parameter * value).sum().backward()
