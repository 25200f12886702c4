"""The stages that this worker holds: made of the user's modules, in their precision, sharded over its mesh.

Invariant: weights are made alike on all workers that hold a stage, before anything is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from counterflow.api.experts import TokenBalance
from counterflow.common.tensors.divided_modules import expert_modules
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import keeps_buffers
from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution
from counterflow.schedule.ir import Schedule

from ..mesh.parallel import (
    Parallelize,
    StageModule,
    context_dims,
    expert_dims,
    fsdp_modules,
    parallelize_stages,
    same_token_dims,
)
from ..mesh.parallel_dims import ParallelDims
from ..mesh.rank_mesh import WORKER, RankMesh
from ..mesh.weight_dims import agreed_dims
from ..mini_batch.loss_output import LossFunction
from ..mini_batch.mean_losses import UNWATCHED, MeanLossDetector
from ..parameters.names import named_buffers, named_parameters, shared_names
from ..parameters.replica_digests import broadcast_initial_weights, refuse_other_seeds
from ..stages.captures import Captures
from ..stages.carrying import carries_in
from ..stages.compiled import Backend
from ..stages.deferred import defer
from ..stages.embeddings import Setting
from ..stages.materialization import materialised
from ..stages.named_layer import LOSS, place_of
from ..stages.ownership import ThreadLocalModules
from ..stages.precision import precision_of
from ..stages.randomness import RandomStreams
from ..stages.remote import refuse_remote
from ..stages.stage import LocalStage
from ..transport.base import Transport
from .partition import Model, PartitionedModel


@dataclass(frozen=True, slots=True)
class LocalStages:
    """Stages of a worker.

    Attributes:
        stages: by number.
        owned: the modules that it trains.
        loss_function: as given, or the module that is trained in its place.
        split: the stages whose backward the schedule splits.
        dims: record of the parallel dimensions.
    """

    stages: dict[int, LocalStage]
    owned: ThreadLocalModules
    loss_function: LossFunction | None
    split: tuple[int, ...]
    dims: ParallelDims

    def kept_buffers(self) -> AbstractContextManager[object]:
        """Context of a step: split backwards go twice through functions that the user compiled."""
        return keeps_buffers() if self.split else nullcontext()

    def leave_others(self, model: PartitionedModel, ranks: Sequence[int]) -> None:
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
            with streams.turn():  # torch's compiler is not imported by several threads at once
                name = "inductor" if how is True else how
                for number, stage in self.stages.items():
                    stage.compile(Backend(name, splits=number in self.split))

    def capture(self, execution: Execution) -> None:
        """Let the stages capture their passes, if the options ask for it.

        Raises:
            ConfigError: another option runs the stages in a way that cannot be captured.
        """
        if not execution.capture:
            return
        for conflict, reason in (
            (execution.compile, "compile runs code that is no operator of torch; leave one of them out"),
            (execution.overlap_experts, "overlap_experts interrupts a stage; leave one of them out"),
        ):
            if conflict:
                raise ConfigError(f"capture: {reason}")
        for stage in self.stages.values():
            stage.captures = Captures(stage)


def local_stages(
    model: PartitionedModel,
    user_model: Model,
    loss_function: LossFunction | None,
    execution: Execution,
    streams: RandomStreams,
    *,
    batching: Batching,
    mesh: RankMesh,
    transport: Transport,
    parallelize: Parallelize | None,
    further: DeviceMesh | None,
) -> LocalStages:
    """Make a worker's stages, and let the user shard their weights; all workers call it.

    Args:
        model: the model in stages.
        user_model: the model as the user passed it.
        loss_function: the loss function as the user passed it.
        execution: options of the run.
        streams: streams of random draws.
        batching: options of the mini-batches.
        mesh: coordinates of all ranks.
        transport: transport to the other workers.
        parallelize: the user's function that shards; None: nothing is sharded.
        further: further dimensions of the mesh.

    Raises:
        ConfigError: a layer cannot be trained here, or options do not go together.
    """
    schedule, dims = model.schedule, ParallelDims(mesh)
    roots = [layer.module for layers in model.layers for layer in layers]
    named = ((f"{n} of layer {i}", p) for i, root in enumerate(roots) for n, p in root.named_parameters())
    refuse_other_seeds(named, transport)
    stage_numbers = sorted(
        {stage for _, stage in schedule.placement.stages_on(mesh.coordinates(transport.rank)[WORKER])}
    )
    last = schedule.stages - 1
    layers = [layer for stage in stage_numbers for layer in model.layers[stage]]
    if model.loss is not None and last in stage_numbers:
        layers.append(model.loss)
    if execution.deferred_batch_norm and not schedule.synchronous:
        raise ConfigError(
            f"deferred_batch_norm: {schedule.scheme} begins a mini-batch before the one before has "
            "ended, so that both would be in one sum; omit it, or take a synchronous scheme"
        )
    if any(isinstance(m, TokenBalance) for layer in layers for m in layer.module.modules()):
        _refuse_balances(schedule, execution)
    if schedule.workload.slices > 1:
        _refuse_slices(schedule, execution)
    precision = precision_of(execution, transport.device, shards=bool(dims.further))
    for layer in layers:
        refuse_remote(layer.index, layer.module)
    owned = ThreadLocalModules(
        [(place_of(layer), layer.module) for layer in layers], model.modules(user_model), transport
    )
    trained = zip(layers, owned.modules, strict=True)
    divides_experts = further is not None and getattr(parallelize, "divides_experts", False)
    divided = {
        module.get_parameter(name)
        for root in (owned.modules if divides_experts else ())
        for module, names in expert_modules(root)
        for name in names
    }
    with owned.rebinding():
        layers_here = materialised(
            [replace(layer, module=module) for layer, module in trained], transport.device, streams, divided
        )
    if execution.deferred_batch_norm:
        defer(layer.module for layer in layers_here)
    for carry in (carry for layer in layers_here for carry in carries_in(layer.module)):
        carry.expect_slices(expected=schedule.workload.slices > 1)
    by_index = {layer.index: layer for layer in layers_here}
    loss = by_index.get(LOSS)
    if loss is not None:
        loss_function = loss.module
    stages = {
        stage: LocalStage(
            stage,
            [by_index[layer.index] for layer in model.layers[stage]],
            streams,
            execution.recompute,
            loss=loss if stage == last else None,
            last=stage == last,
            precision=precision,
            skips=model.skips[stage],
            means=_means(model, loss_function, batching) if stage == last else UNWATCHED,
        )
        for stage in stage_numbers
    }
    split = _split(schedule, stages)
    broadcast_initial_weights(stages, model.names, model.holders, dims, transport)
    if parallelize is not None and further is not None:
        with owned.rebinding():
            dims = _sharded(
                stages,
                split,
                model,
                execution,
                parallelize=parallelize,
                further=further,
                mesh=mesh,
                transport=transport,
            )
    return LocalStages(stages, owned, loss_function, split, dims)


def _refuse_balances(schedule: Schedule, execution: Execution) -> None:
    if not (schedule.synchronous and execution.barrier):
        raise ConfigError(
            "a TokenBalance moves its bias once an update, by the tokens of one mini-batch, and here a "
            "mini-batch begins before the one before has ended; take a synchronous scheme with a barrier"
        )


def _refuse_slices(schedule: Schedule, execution: Execution) -> None:
    slices = f"{schedule.scheme} in {schedule.workload.slices} slices"
    if execution.deferred_batch_norm:
        raise ConfigError(
            f"deferred_batch_norm: {slices} would normalise each slice by its own mean, where one process "
            "takes that of all positions; omit one of them"
        )


def _split(schedule: Schedule, stages: dict[int, LocalStage]) -> tuple[int, ...]:
    split = {op.stage for op in schedule.ops() if op.kind.rest is not None}
    numbers = tuple(stage for stage, local_stage in stages.items() if stage in split and local_stage.trains)
    for stage in numbers:
        stages[stage].split()
    return numbers


def _means(
    model: PartitionedModel, loss_function: LossFunction | None, batching: Batching
) -> MeanLossDetector:
    synchronous, insists = model.schedule.synchronous, batching.per_micro_batch_loss
    if insists and not synchronous:
        return UNWATCHED
    layer = LOSS if loss_function is not None else model.layers[-1][-1].index
    return MeanLossDetector(layer, divides=synchronous, compares=not insists)


def _sharded(
    stages: dict[int, LocalStage],
    split: tuple[int, ...],
    model: PartitionedModel,
    execution: Execution,
    *,
    parallelize: Parallelize,
    further: DeviceMesh,
    mesh: RankMesh,
    transport: Transport,
) -> ParallelDims:
    schedule = model.schedule
    if execution.max_norm is not None and not schedule.synchronous:
        raise ConfigError(
            f"{schedule.scheme} clips each stage by its own norm, of which each position of the "
            "mesh knows its part; omit clip_norm, or take a synchronous scheme"
        )
    lengths = schedule.workload.lengths
    modules = [StageModule(stage, local_stage.layers, lengths) for stage, local_stage in stages.items()]
    reduced = parallelize_stages(modules, parallelize, further, mesh)
    for module in modules:
        skips = model.skips[module.number] is not None
        if module.sums_each_backward and skips and fsdp_modules(module):
            raise ConfigError(
                "fully_shard sums a module's gradients when those of its inputs are there, and what comes "
                "by a Skip is none; omit sums_each_backward, or pass it on through the layers between"
            )
        if module.fsdp_sum is not None:
            module.fsdp_sum.gathers = skips
        if module.sums_each_backward and module.number in split and fsdp_modules(module):
            raise ConfigError(
                f"stage {module.number} sums in each backward (sums_each_backward), and {schedule.scheme} "
                "makes gradients of weights after it; omit sums_each_backward, or take a scheme "
                "whose backwards are whole"
            )
        stages[module.number].attach_module(module)
    tensors = (
        (name, tensor)
        for local_stage in stages.values()
        for name, tensor in (
            *named_parameters(local_stage, model.names).items(),
            *(pair for pair in named_buffers(local_stage) if is_dtensor(pair[1])),
        )
    )
    names = further.mesh_dim_names or ()
    dims = agreed_dims(
        mesh, tensors, reduced, transport, names,
        experts=expert_dims(modules, mesh), contexts=context_dims(modules, mesh),
        same_tokens=same_token_dims(modules, mesh),
    )  # fmt: skip
    if any(module.divides_experts for module in modules) and not dims.has_experts:
        raise ConfigError(
            "cf.ExpertParallel found no experts in the model: give a module that calls cf.dispatch the "
            "attribute expert_parameters, names of its parameters [experts, ...]"
        )
    if any(module.divides_features for module in modules) and not dims.divides_features:
        raise ConfigError(
            "cf.TensorParallel found nothing to divide in the model: give modules the attribute "
            "tensor_parallel_plan, such as {'up': 'colwise', 'down': 'rowwise'}"
        )
    if dims.in_lockstep and not schedule.synchronous:
        raise ConfigError(
            f"{schedule.scheme} keeps several versions of its weights, and those that fully_shard gathers, "
            "or that other positions' tokens meet, are the last ones; take a synchronous scheme, or tensor "
            "parallelism"
        )
    for stage in stages.values():
        stage.runs_empty = dims.in_lockstep
    return dims


def refuse_embeddings(model: PartitionedModel, execution: Execution, replicas: int) -> None:
    """Refuse embeddings that would train to other numbers in stages; errors as of ``Setting.refuse``."""
    Setting(
        model.schedule.scheme,
        flushes=model.schedule.synchronous,
        copies=[len(holders) * replicas for holders in model.holders],
        tied=shared_names(model.names),
        compute_dtype=execution.compute_dtype,
    ).refuse(model.layers)
