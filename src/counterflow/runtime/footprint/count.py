"""Counts the memory of all workers in steps on virtual tensors, as threads of this process.

Invariant: the engine that trains is the one that is counted, with the same program, buffers and versions.
"""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from counterflow.common.number_texts import byte_size
from counterflow.common.tensors.unknown_values import unknown_values
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError

from ..assembly.pipeline_arguments import PipelineArguments
from ..mini_batch.refusal import Refusal
from ..parameters.weights import Weights
from ..transport.base import Transport
from ..workers.threads import ThreadLaunch
from ..workers.world import current_transport
from .available import available_bytes_on
from .footprint import Memory, WorkerMemory, worker_memory
from .kernel_memory import KernelMemory
from .ledger import Ledger, Part
from .virtual_mode import SMALL_BYTES, VirtualMode
from .virtual_model import modules_in, virtual_batch, virtual_copy
from .virtual_transport import VirtualHub, VirtualTransport

_LOG = logging.getLogger("counterflow.runtime.pipeline")

_STEPS = 3
"""Steps after the pipeline is full; the first makes states, the last is counted."""

_TIMEOUT_SECONDS = 3600.0


class CountedPipeline(Protocol):
    """A pipeline whose memory is counted."""

    weights: Weights
    replica: int
    worker: int

    @property
    def warm_up_steps(self) -> int:
        """Steps until all steps are alike."""

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Any = None,
        micro_batches: Any = None,
        samples: Any = None,
    ) -> object:
        """Train on a mini-batch."""

    def close(self) -> None:
        """End what is in flight."""


@dataclass(frozen=True, slots=True)
class MemorySubject:
    """Pipeline whose memory is counted.

    Attributes:
        arguments: its arguments.
        batch: arguments of a step, by name; of numbers only the shapes count.
        replicas: copies of the pipeline.
    """

    arguments: PipelineArguments
    batch: dict[str, Any]
    replicas: int


def count_memory(
    make: Callable[..., CountedPipeline], subject: MemorySubject, available_bytes: int | None
) -> Memory:
    """Memory of a pipeline's workers.

    Args:
        make: class of the pipeline.
        subject: the pipeline and its mini-batch.
        available_bytes: memory that a worker can use; None: unknown.

    Raises:
        ConfigError: the pipeline cannot be counted, with the reason.
    """
    arguments = subject.arguments
    _refuse(arguments)
    kernels, batch = KernelMemory(), virtual_batch(subject.batch)
    hub = VirtualHub(arguments.schedule.workers * subject.replicas, timeout_seconds=_TIMEOUT_SECONDS)

    def worker() -> tuple[int, WorkerMemory]:
        return _count_worker(make, arguments, batch, kernels)

    threads = torch.get_num_threads()
    with _quiet():
        try:
            rows = ThreadLaunch(hub, worker, torch.device("cpu"), threads, None).run()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                "memory: the model cannot be run on tensors without numbers: "
                f"{next(iter(str(error).splitlines()), type(error).__name__)}; measure a step"
            ) from error
    gc.collect()
    _refuse_leaks(hub)
    notes = []
    if arguments.execution.compile:
        notes.append("counted without compile, which saves other tensors")
    if kernels.unknown:
        names = ", ".join(sorted(name.removeprefix("aten::") for name in kernels.unknown))
        notes.append(f"not counted: memory of kernels while they run, of {names}")
    return Memory(
        str(arguments.schedule),
        tuple(memory for replica, memory in sorted(rows, key=lambda row: row[1].worker) if not replica),
        available_bytes,
        tuple(notes),
    )


def shared_count(count: Callable[[int | None], Memory], transport: Transport, allocated: int) -> Memory:
    """Memory that the first rank counts, on all ranks; it warns if a worker needs more than is available.

    Args:
        count: counts for a worker's available memory.
        transport: transport to the other ranks; all call it.
        allocated: bytes of the count that this rank has allocated already.

    Raises:
        ConfigError: the first rank could not count.
    """
    here = transport.gather_objects((socket.gethostname(), transport.device.type))
    workers = here.count((socket.gethostname(), transport.device.type))
    own = available_bytes_on(transport.device, workers, allocated)
    known = [cast("int | None", size) for size in transport.gather_objects(own)]
    available = min((size for size in known if size is not None), default=None)
    result: Memory | ConfigError | None = None
    if transport.rank == 0:
        try:
            result = count(available)
        except ConfigError as error:
            result = error
    result = cast("Memory | ConfigError", transport.gather_objects(result)[0])
    if isinstance(result, ConfigError):
        raise Refusal(result)
    if result.shortage is not None and transport.rank == 0:
        _LOG.warning(
            "%s; take fewer samples in a micro-batch, recomputation, or more stages", result.shortage
        )
    return result


def _count_worker(
    make: Callable[..., CountedPipeline],
    arguments: PipelineArguments,
    batch: dict[str, Any],
    kernels: KernelMemory,
) -> tuple[int, WorkerMemory]:
    model, loss = arguments.model, arguments.loss_function
    layers = None if arguments.list_layers is None else [*arguments.list_layers(cast("Any", model))]
    model, layers, loss = virtual_copy((model, layers, loss), modules_in(model, layers, loss))
    ledger = cast("VirtualTransport", current_transport()).ledger
    ledger.exclude(tensors_in(batch))
    with VirtualMode(ledger, kernels), unknown_values():
        pipeline = make(
            model,
            loss,
            arguments.schedule,
            optimizer=arguments.optimizer,
            list_layers=None if layers is None else lambda _: layers,
            cuts=arguments.cuts,
            costs=arguments.costs,
            execution=arguments.execution.but(
                compile=False, digest_every=0, witness_every=0, count_memory_steps=0, timeout_seconds=None
            ),
            batching=arguments.batching.but(per_micro_batch_loss=True),
        )
        _assign(ledger, pipeline.weights)
        for _ in range(pipeline.warm_up_steps + _STEPS):
            ledger.open_window()
            pipeline.step(**batch)
            _assign(ledger, pipeline.weights)
        peak = ledger.peak()
        result = pipeline.replica, worker_memory(pipeline.worker, peak.parts)
        pipeline.close()
    return result


def _assign(ledger: Ledger, weights: Weights) -> None:
    ledger.assign(weights.weight_tensors(), Part.WEIGHTS)
    ledger.assign(weights.gradient_tensors(), Part.GRADIENTS)
    ledger.assign(weights.optimizer_tensors(), Part.OPTIMIZER)


def _refuse(arguments: PipelineArguments) -> None:
    if arguments.parallelize is not None:
        raise ConfigError(
            "memory: weights that parallelize shards are not counted; count the pipeline without it, and "
            "divide weights, gradients and optimizer states by the degree"
        )


def _refuse_leaks(hub: VirtualHub) -> None:
    """Refuse tensors without numbers that outlive the count: later steps would compute with them.

    Raises:
        ConfigError: there are some.
    """
    remaining = sum(ledger.live_bytes for ledger in hub.ledgers)
    if remaining > SMALL_BYTES:
        raise ConfigError(
            f"memory: the model's code keeps {byte_size(remaining)} of tensors beyond the pipeline, in a "
            "global variable or a functools.cache, and they have no numbers: clear that before anything uses "
            "it, or count in a process of its own"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("counterflow")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
