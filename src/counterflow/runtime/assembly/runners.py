"""Runners of a schedule on this worker: its proved lists, their interpreters, the maker of mini-batches."""

from __future__ import annotations

import threading
from functools import lru_cache, partial

from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution, unskippable
from counterflow.program.checker import checked_program
from counterflow.program.lowering import Ends, Shared, lower_evaluation
from counterflow.program.segments import Segments, segments, steps
from counterflow.schedule.modes import Sync

from ..execution.evaluation import EvaluationRunner
from ..execution.interpreter import Interpreter
from ..execution.runner import Runner
from ..execution.step import Workers
from ..mesh.parallel_dims import ParallelDims
from ..messages.compression import Compression
from ..mini_batch.agreement import Peers
from ..mini_batch.batches import Batches, Role
from ..mini_batch.prefetcher import CopyStream, order_of_use
from ..parameters.shared_buffers import SharedBuffers
from ..parameters.shared_state import SharedState
from ..parameters.weights import Weights
from ..stages.named_layer import LOSS
from ..stages.saved_bytes import SavedBytes
from ..stages.sharing.reach import Root
from ..stages.sharing.watch import ObjectWatch
from ..transport.base import Transport
from .local_stages import LocalStages
from .partition import PartitionedModel

_PROVING = threading.Lock()
"""Workers that are threads wait for the first of them to make and prove the lists of all."""
_proved = lru_cache(maxsize=8)(checked_program)
_cut = lru_cache(maxsize=8)(segments)
_forwards = lru_cache(maxsize=8)(lower_evaluation)


def runners_of(
    model: PartitionedModel,
    local: LocalStages,
    execution: Execution,
    *,
    workers: Workers,
    weights: Weights,
    compression: Compression | None,
) -> tuple[Runner, EvaluationRunner]:
    """Make the runner that trains, with its lists as they are proved, and the one that evaluates.

    Args:
        model: in stages.
        local: what this worker holds of it.
        execution: how it is executed.
        workers: where this worker is.
        weights: this worker's.
        compression: makes messages smaller; None: they go as they are.

    Raises:
        ConfigError: the schedule does not go with the options or the weights.
        ScheduleError: the checker does not accept it.
    """
    transport = workers.transport
    make = partial(
        Interpreter,
        worker=workers.worker,
        ranks=workers.ranks[workers.replica],
        transport=transport,
        stages=local.stages,
        loss_function=local.loss_function,
        compression=compression,
        saved=SavedBytes(tensor for stage in local.stages.values() for tensor in stage.constant()),
    )
    exact, flushes = model.runs_in_order, model.schedule.synchronous
    buffers = SharedBuffers(model.shared_buffers, local.stages, exact=exact)
    objects = ObjectWatch(model.shared_objects, _roots(local), transport, exact=exact)
    shared = SharedState(buffers, objects, flushes=flushes)
    lists = _segments(model, execution, workers, weights)
    runner = Runner(lists, make, workers, weights, execution, shared=shared)
    with _PROVING:
        forwards = _forwards(model.schedule, matching=transport.matching)
    return runner, EvaluationRunner(forwards, make, local.stages, workers, shared)


def _roots(local: LocalStages) -> dict[int, list[Root]]:
    roots: dict[int, list[Root]] = {}
    for stage, local_stage in local.stages.items():
        roots[stage] = [(layer.index, layer.module) for layer in local_stage.layers]
        if local_stage.last and local.loss_function is not None:
            roots[stage].append((LOSS, local.loss_function))
    return roots


def _segments(model: PartitionedModel, execution: Execution, workers: Workers, weights: Weights) -> Segments:
    schedule, transport = model.schedule, workers.transport
    shared = Shared(weights.ties, model.statistics)
    if schedule.synchronous:
        ends = Ends(execution.barrier, execution.waits_for_norm, weights.hooked)
        times = execution.op_times and tuple(map(tuple, execution.op_times))
        sync = when_summed(execution.sync, transport)
        with _PROVING:
            program = _proved(
                schedule,
                replicas=workers.replicas,
                sync=sync,
                times=times,
                matching=transport.matching,
                shared=shared,
                ends=ends,
            )
        return steps(program, ends)
    if execution.skips_updates:
        raise ConfigError(f"{schedule.scheme} {unskippable(execution)}")
    with _PROVING:
        lists = _cut(schedule, replicas=workers.replicas, matching=transport.matching, shared=shared)
    if weights.shared:
        raise ConfigError(
            f"{schedule.scheme} updates each stage at its own time, and {weights.shared[0]} is a weight "
            "of several stages; do not tie them, or take a synchronous scheme"
        )
    return lists


def when_summed(sync: Sync, transport: Transport) -> Sync:
    """Place of gradient sums in the lists: last, if a launched sum would hold others."""
    return Sync.END if transport.launches_hold else sync


def batches_of(
    model: PartitionedModel,
    local: LocalStages,
    execution: Execution,
    batching: Batching,
    *,
    dims: ParallelDims,
    workers: Workers,
) -> Batches:
    """Builder of a worker's mini-batches.

    Args:
        model: in stages.
        local: what this worker holds of it.
        execution: how it is executed.
        batching: how mini-batches are cut.
        dims: record of the parallel dimensions.
        workers: where this worker is.
    """
    transport, schedule = workers.transport, model.schedule
    role = Role(
        worker=workers.worker,
        takes_inputs=0 in local.stages,
        takes_targets=schedule.stages - 1 in local.stages,
        has_loss_function=local.loss_function is not None,
        reports_loss=dims.reports_loss(transport.rank),
        dims=dims,
    )
    peers = Peers(dims.same_samples, workers.replica, transport, dims.same_sequences)
    copies = CopyStream(transport.device, order_of_use(schedule, workers.worker))
    return Batches(schedule, execution, batching, role=role, peers=peers, copies=copies)
