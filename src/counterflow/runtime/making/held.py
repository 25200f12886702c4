"""The stages that this worker holds: made of the user's modules, in their precision, sharded over its mesh.

Invariant: weights are made alike on all workers that hold a stage, before anything is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.schedule.ir import Schedule

from ..mesh.layout import Layout
from ..mesh.parallel import Parallelize, StageModule, parallelized
from ..mesh.sharding import Sharding
from ..mini_batch.counted import UNWATCHED, Means
from ..mini_batch.losses import LossFunction
from ..parameters.names import shared_names
from ..stages.deferred import defer
from ..stages.embeddings import Setting
from ..stages.named_layer import LOSS, materialised, place_of
from ..stages.ownership import Owned
from ..stages.precision import precision_of
from ..stages.randomness import RandomStreams
from ..stages.remote import refuse_remote
from ..stages.stage import StageCopy
from ..transport.base import Transport
from .model import Model, StagedModel


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker holds of a model.

    Attributes:
        stages: by number.
        owned: the modules that it trains.
        loss_function: as given, or the module that is trained in its place.
        split: the stages whose backward the schedule splits.
    """

    stages: dict[int, StageCopy]
    owned: Owned
    loss_function: LossFunction | None
    split: tuple[int, ...]

    def leave_others(self, model: StagedModel, ranks: Sequence[int]) -> None:
        """Let the user's model have no numbers of what lives elsewhere; ``ranks`` by worker of the group."""
        self.owned.leave(
            (place_of(layer), layer.module, [ranks[worker] for worker in model.holders[stage]])
            for stage, layers in enumerate(model.layers)
            if stage not in self.stages
            for layer in layers
        )

    def compile(self, how: bool | str, streams: RandomStreams) -> None:
        """Let the layers go through torch's compiler; ``how`` as ``Execution.compile``."""
        if how:
            backend = "inductor" if how is True else how
            with streams.turn():  # torch's compiler is not imported by several threads at once
                for stage in self.stages.values():
                    stage.compile(backend)


def held_stages(
    model: StagedModel,
    given: Model,
    loss_function: LossFunction | None,
    execution: Execution,
    streams: RandomStreams,
    *,
    worker: int,
    transport: Transport,
    shards: bool,
) -> Held:
    """Make a worker's stages; all workers call it.

    Args:
        model: in stages.
        given: the same, as the user gave it.
        loss_function: likewise.
        execution: how it is executed.
        streams: of random draws.
        worker: its number in its group.
        transport: how to reach the others.
        shards: whether the stages are sharded later.

    Raises:
        ConfigError: a layer cannot be trained here, or options do not go together.
    """
    schedule = model.schedule
    held = sorted({stage for _, stage in schedule.placement.held(worker)})
    last = schedule.stages - 1
    layers = [layer for stage in held for layer in model.layers[stage]]
    if model.loss is not None and last in held:
        layers.append(model.loss)
    if execution.deferred_batch_norm and not schedule.synchronous:
        raise ConfigError(
            f"deferred_batch_norm: {schedule.scheme} begins a mini-batch before the one before has "
            "ended, so that both would be in one sum; leave it away, or take a synchronous scheme"
        )
    precision = precision_of(execution, transport.device, shards=shards)
    for layer in layers:
        refuse_remote(layer.index, layer.module)
    owned = Owned([(place_of(layer), layer.module) for layer in layers], model.modules(given), transport)
    trained = zip(layers, owned.modules, strict=True)
    made = materialised([replace(layer, module=its) for layer, its in trained], transport.device, streams)
    owned.remade()
    if execution.deferred_batch_norm:
        defer(layer.module for layer in made)
    by_index = {layer.index: layer for layer in made}
    loss = by_index.get(LOSS)
    if loss is not None:
        loss_function = loss.module
    stages = {
        stage: StageCopy(
            stage,
            [by_index[layer.index] for layer in model.layers[stage]],
            streams,
            execution.recompute,
            loss=loss if stage == last else None,
            last=stage == last,
            precision=precision,
            skips=model.skips[stage],
            means=_means(model, loss_function) if stage == last else UNWATCHED,
        )
        for stage in held
    }
    return Held(stages, owned, loss_function, _split(schedule, stages))


def _split(schedule: Schedule, stages: dict[int, StageCopy]) -> tuple[int, ...]:
    """The stages whose backward is split, which they are told."""
    split = {op.stage for op in schedule.ops() if op.kind.takes is None}
    found = tuple(stage for stage, copy in stages.items() if stage in split and copy.trains)
    for stage in found:
        stages[stage].split()
    return found


def _means(model: StagedModel, loss_function: LossFunction | None) -> Means:
    """What watches the last stage's loss; asynchronous weights change before all is known."""
    if not model.schedule.synchronous:
        return UNWATCHED
    return Means(LOSS if loss_function is not None else model.layers[-1][-1].index)


def sharded(
    held: Held,
    model: StagedModel,
    execution: Execution,
    *,
    layout: Layout,
    transport: Transport,
    parallelize: Parallelize | None,
    further: DeviceMesh | None,
) -> Sharding:
    """Let the user shard the weights of a worker's stages; who gets what samples follows from it.

    Args:
        held: the stages.
        model: whose they are.
        execution: how it is executed.
        layout: of the mesh.
        transport: how to reach the others.
        parallelize: the user's function; None: nothing is sharded.
        further: the further dimensions of the mesh.

    Raises:
        ConfigError: sharding does not go with the rest.
    """
    if parallelize is None or further is None:
        return Sharding(layout)
    schedule = model.schedule
    if execution.max_norm is not None and not schedule.synchronous:
        raise ConfigError(
            f"{schedule.scheme} clips each stage by its own norm, of which each position of the "
            "mesh knows its part; leave clip_norm away, or take a synchronous scheme"
        )
    modules = [StageModule(stage, copy.layers) for stage, copy in held.stages.items()]
    found = parallelized(modules, parallelize, further, layout=layout, transport=transport, schedule=schedule)
    if found.layout.split and any(skips is not None for skips in model.skips):
        raise ConfigError(
            "fully_shard sums a module's gradients when those of its inputs are there, and what "
            "comes by a Skip is none; hand it on through the layers between, or shard by tensors"
        )
    if found.layout.split and held.split:
        raise ConfigError(
            f"fully_shard sums a module's gradients when those of its inputs are there, and "
            f"{schedule.scheme} makes those of weights later; take a scheme whose backwards are "
            "whole, or shard by tensors"
        )
    for module in modules:
        held.stages[module.number].hang_in(module)
    return found


def refuse_embeddings(model: StagedModel, execution: Execution, replicas: int) -> None:
    """Refuse embeddings that would train to other numbers in stages; errors as of ``Setting.refuse``."""
    Setting(
        model.schedule.scheme,
        flushes=model.schedule.synchronous,
        copies=[len(holders) * replicas for holders in model.holders],
        tied=shared_names(model.names),
        compute_dtype=execution.compute_dtype,
    ).refuse(model.layers)
