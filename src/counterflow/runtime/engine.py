"""All parts of one worker's pipeline, put together in the order in which they depend on each other.

Invariant: all workers build their engines by the same sequence of collective calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .assembly.local_stages import LocalStages, local_stages, refuse_embeddings
from .assembly.partition import PartitionedModel
from .assembly.pipeline_arguments import PipelineArguments
from .assembly.recordings import Recordings
from .assembly.runners import batches_of, runners_of
from .assembly.weights import weights_of
from .call_guard import CallGuard, TransportUser
from .cut_probe import CutProbe
from .drain import Drain
from .execution.runner import Runner
from .execution.step import Workers, replica_and_worker
from .inference import Inference
from .inspection import Inspection
from .intake import Intake
from .mesh.parallel import further_mesh, refuse_sharded
from .mesh.rank_mesh import WORKER, rank_mesh
from .messages.compression import Compression
from .mini_batch.batches import Batches
from .parameters.compressed_sums import SumCompression
from .parameters.loss_scale import LossScale
from .parameters.weights import Weights
from .stages.listing import Listing
from .stages.randomness import RandomStreams
from .state_dicts import StateDicts
from .training_steps import TrainingSteps
from .transport.base import Transport
from .witness.witness import Witness
from .workers.lease import Lease, open_lease


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """Parts of one worker's pipeline; make it with ``build_engine``.

    Attributes:
        model: the model in stages, with the schedule that runs.
        local: the worker's stages.
        workers: ranks of the pipeline, and this worker among them.
        weights: the worker's weights.
        compression: compression of messages, with the bytes that it sent; None: they are sent in full.
        further_dims: names of the mesh's dimensions beside replica and worker.
        lease: the pipeline's resources of its transport.
        guard: guard of the pipeline's calls.
        runner: runner of the training steps.
        drain: what is in flight.
        witness: comparison with the user's own forward.
    """

    model: PartitionedModel
    local: LocalStages
    workers: Workers
    weights: Weights
    streams: RandomStreams
    compression: Compression | None
    further_dims: Sequence[str]
    lease: Lease[TransportUser]
    guard: CallGuard
    runner: Runner
    batches: Batches
    drain: Drain
    witness: Witness
    training: TrainingSteps
    inference: Inference
    state_dicts: StateDicts
    inspection: Inspection


def build_engine(arguments: PipelineArguments, transport: Transport, owner: TransportUser) -> Engine:
    """Build a worker's engine; all workers call it.

    Args:
        arguments: arguments of the pipeline, checked.
        transport: transport to the other workers.
        owner: the pipeline, as others on the same transport see it.

    Raises:
        ConfigError: the model, the schedule and the workers do not fit together.
        ScheduleError: the checker does not accept the schedule.
    """
    execution, batching = arguments.execution, arguments.batching
    refuse_sharded(arguments.model)
    further = further_mesh(arguments.mesh, arguments.parallelize, transport)
    mesh = rank_mesh(transport.rank, transport.world_size, arguments.schedule, arguments.mesh)
    streams = RandomStreams(
        execution.seed,
        transport.device,
        shared=transport.shares_process,
        timeout_seconds=transport.timeout_seconds,
    )
    model = arguments.partition(transport)
    local = local_stages(
        model,
        arguments.model,
        arguments.loss_function,
        execution,
        streams,
        batching=batching,
        mesh=mesh,
        transport=transport,
        parallelize=arguments.parallelize,
        further=further,
    )
    ranks = local.dims.replica_ranks(transport.rank)
    workers = Workers(
        ranks,
        replica_and_worker(ranks, transport.rank)[0],
        mesh.coordinates(transport.rank)[WORKER],
        transport,
    )
    refuse_embeddings(model, execution, workers.replicas)
    lease: Lease[TransportUser] = open_lease(transport, owner)
    sum_form = execution.gradient_compression
    weights = weights_of(
        local.stages,
        names=model.names,
        aliases=model.aliases,
        extra_state=model.extra_state,
        holders=model.holders,
        dims=local.dims,
        transport=transport,
        optimizer=arguments.optimizer,
        scheduler=arguments.scheduler,
        streams=streams,
        sharded=execution.zero_stage > 0,
        compression=None if sum_form is None else SumCompression(sum_form),
        loss_scale=LossScale.of(execution),
    )
    local.compile(execution.compile, streams)
    local.capture(execution)
    compression = Compression(transport.device) if execution.compress else None
    runner, evaluation = runners_of(
        model, local, execution, workers=workers, weights=weights, compression=compression
    )
    guard = CallGuard(workers.worker, transport, runner, lease)
    lease.groups = weights.groups
    transport.connect(runner.peers | evaluation.peers, weights.groups)
    local.leave_others(model, ranks[workers.replica])
    recordings = Recordings.of(model, local, transport)
    batches = batches_of(model, local, execution, batching, dims=local.dims, workers=workers)
    witness = Witness(
        arguments.model,
        model.layers,
        model.schedule,
        local.stages,
        workers,
        streams=streams,
        loss_function=local.loss_function,
        execution=execution,
        sharded=bool(local.dims.further),
    )
    drain = Drain(
        guard,
        runner,
        evaluation,
        batches=batches,
        weights=weights,
        owned=local.owned,
        streams=streams,
        compares=execution.digest_every > 0,
    )
    intake = Intake(
        guard,
        model,
        Listing(
            arguments.model,
            arguments.list_layers,
            [layer for local_stage in local.stages.values() for layer in local_stage.with_weights],
        ),
        recordings,
        batches=batches,
        runner=runner,
        drain=drain,
        cut_probe=CutProbe(model.schedule, workers, evaluation, batches.probe),
    )
    inference = Inference(
        guard,
        drain,
        intake,
        evaluation,
        schedule=model.schedule,
        batches=batches,
        stages=local.stages,
        last_holders=len(model.holders[-1]),
        workers=workers,
        owned=local.owned,
        witness=witness,
        output_dims=batching.output_dims,
    )
    inspection = Inspection(
        guard,
        local.stages,
        local.split,
        interpreter=runner.interpreter,
        ranks=ranks,
        transport=transport,
    )
    training = TrainingSteps(
        guard,
        intake,
        runner,
        schedule=model.schedule,
        batches=batches,
        weights=weights,
        local=local,
        streams=streams,
        witness=witness,
        inference=inference,
        inspection=inspection,
        counted_steps=execution.count_memory_steps + runner.warm_up_steps,
    )
    state_dicts = StateDicts(
        guard,
        drain,
        weights,
        weights.state,
        streams=streams,
        transport=transport,
        order=model.order,
        forget=batches.forget,
    )
    return Engine(
        model=model,
        local=local,
        workers=workers,
        weights=weights,
        streams=streams,
        compression=compression,
        further_dims=() if further is None else further.mesh_dim_names or (),
        lease=lease,
        guard=guard,
        runner=runner,
        batches=batches,
        drain=drain,
        witness=witness,
        training=training,
        inference=inference,
        state_dicts=state_dicts,
        inspection=inspection,
    )
