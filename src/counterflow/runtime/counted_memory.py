"""Memory of a pipeline that is not made yet, by worker and part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

from torch import nn

from counterflow.execution import Batching, Execution, Flat, records
from counterflow.schedule.ir import Schedule
from counterflow.schedule.registry import schedule_of

from .assembly.pipeline_arguments import PipelineArguments
from .footprint.available import WORKER_BYTES, available_bytes_here, available_bytes_on, worker_limit
from .footprint.count import MemorySubject, count_memory
from .footprint.footprint import Memory, shortage
from .footprint.virtual_model import virtual_batch
from .mini_batch.loss_output import LossFunction
from .parameters.optimizers import MakeOptimizer
from .pipeline import PARAMETERS, Pipeline

__all__ = [
    "WORKER_BYTES",
    "Memory",
    "available_bytes_here",
    "available_bytes_on",
    "memory",
    "shortage",
    "worker_limit",
]


def memory(
    model: nn.Module | Sequence[nn.Module],
    loss_function: LossFunction | None,
    schedule: Schedule | str,
    inputs: Any = None,
    targets: Any = None,
    *,
    optimizer: MakeOptimizer,
    kwargs: Mapping[str, Any] | None = None,
    micro_batches: Iterable[Sequence[Any]] | None = None,
    samples: Sequence[int] | None = None,
    replicas: int = 1,
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    example: Any = None,
    cuts: Sequence[int] | str | None = None,
    costs: Sequence[float] | None = None,
    available_bytes: int | None = None,
    execution: Execution | None = None,
    batching: Batching | None = None,
    **options: Unpack[Flat],
) -> Memory:
    """Count the memory of each worker of a pipeline, without the workers and without a step.

    The engine runs a few steps of all workers, as threads, on tensors whose memory nobody touches. So it
    counts what a step allocates, whatever the options, and a model may be larger than this machine. The model
    and its weights stay as they are.

    Args:
        model: as of ``Pipeline``; its weights may be on the meta device.
        loss_function: as of ``Pipeline``.
        schedule: as of ``Pipeline``.
        inputs: a replica's mini-batch, as ``Pipeline.step`` takes it; of numbers only the shapes count, so
            its tensors may be on the meta device.
        targets: as of ``Pipeline.step``.
        optimizer: as of ``Pipeline``.
        kwargs: as of ``Pipeline.step``.
        micro_batches: as of ``Pipeline.step``.
        samples: as of ``Pipeline.step``.
        replicas: copies of the pipeline.
        list_layers: as of ``Pipeline``.
        example: as of ``Pipeline``; None: layers of a plain module are found by ``inputs``.
        cuts: as of ``Pipeline``.
        costs: as of ``Pipeline``.
        available_bytes: memory of a worker; None: that of this machine's GPU, or a worker's share of the
            memory that is free here.
        execution: as of ``Pipeline``.
        batching: as of ``Pipeline``.
        options: fields of ``Execution`` and ``Batching``.

    Raises:
        ConfigError: the pipeline cannot be made so, or its memory depends on values.

    >>> import torch
    >>> layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> loss, batch = torch.nn.functional.mse_loss, torch.empty(32, 64, device="meta")
    >>> schedule = "1f1b(stages=2, micro_batches=4)"
    >>> counted = memory(layers, loss, schedule, batch, batch, optimizer=torch.optim.AdamW)
    >>> [worker.optimizer // worker.gradients for worker in counted.workers]
    [2, 2]
    """
    execution, batching = records(execution, batching, options, PARAMETERS)
    listed = list_layers is not None or isinstance(model, (nn.Sequential, nn.ModuleList, Sequence))
    if example is None and not listed:
        example = virtual_batch(inputs)
    arguments = PipelineArguments(
        model,
        loss_function,
        schedule_of(schedule, {}),
        execution,
        batching,
        optimizer=optimizer,
        scheduler=None,
        list_layers=list_layers,
        example=example,
        cuts=cuts,
        costs=costs,
        mesh=None,
        parallelize=None,
        transport=None,
        device=None,
    ).checked()
    batch = {
        "inputs": inputs,
        "targets": targets,
        "kwargs": kwargs,
        "micro_batches": None if micro_batches is None else [*micro_batches],
        "samples": samples,
    }
    subject = MemorySubject(arguments, batch, replicas)
    if available_bytes is None:
        available_bytes = available_bytes_here(arguments.schedule.workers * replicas)
    return count_memory(Pipeline, subject, available_bytes)
