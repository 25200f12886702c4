"""Warning before the first step if a worker's memory does not suffice for it.

Weights, gradients, the optimizer's states and what a forward without memory saves are a bound below. If that
comes near to the memory, the step is counted as ``memory`` counts.

Invariant: all workers make the same calls, and the step is the same as without the check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from counterflow.errors import ConfigError, WorkerError
from counterflow.execution import Execution
from counterflow.schedule.ir import Schedule

from ..execution.step import Workers
from ..messages.values import Keyworded
from ..mini_batch.batch import Batch
from ..mini_batch.prefetcher import MicroBatchPrefetcher
from ..parameters.weights import Weights
from .footprint import Memory, WorkerMemory
from .memory_limits import DeviceMemory, WorkerState
from .saved_in_stages import saved_by_worker, saved_in_stages
from .virtual_model import virtual_batch

_LOG = logging.getLogger("counterflow.runtime.pipeline")

_LEAST_SHARE = 1 / 100
"""Share of the memory from which activations are looked at."""

_INPUT_FACTOR = 20
"""Factor of the inputs in place of the activations that follow from them, which are not known yet."""

_NEAR = 0.2
"""Share of the memory from which a step is counted."""

_MOST_LAYER_RUNS = 512
"""Maximum forwards of layers in the steps of a count: about ten seconds."""

_COUNTED_STEPS = 3


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A pipeline's first step.

    Attributes:
        schedule: schedule of the pipeline.
        execution: options of the run.
        workers: place of this worker.
        weights: the worker's weights.
        stages: layers of each stage, on any device; empty: they cannot run alone.
        count: counts the memory of a step, of ready micro-batches and the samples of each.
    """

    schedule: Schedule
    execution: Execution
    workers: Workers
    weights: Weights
    stages: Sequence[Sequence[nn.Module]]
    count: Callable[[list[Any], Sequence[int]], Memory]

    def check(self, batch: Batch) -> None:
        """Warn if the memory does not suffice for the step; all workers call it.

        Args:
            batch: the mini-batch of the step.
        """
        batch.agree()
        transport, feed = self.workers.transport, batch.inputs
        inputs = None if feed is None else sum(tensor.nbytes for tensor in feed.tensors())
        state = WorkerState.of(self.workers, self.weights, inputs)
        states = cast("list[WorkerState]", transport.gather_objects(state))
        devices = DeviceMemory.of(states)
        amounts = (
            [sum(s.parts) + _INPUT_FACTOR * (s.inputs or 0) for s in device.states] for device in devices
        )
        if all(device.share(row) < _LEAST_SHARE for device, row in zip(devices, amounts, strict=True)):
            return
        readers = [rank for rank, state in enumerate(states) if state.inputs is not None]
        counter, counts = readers[0] if readers else 0, False
        if transport.rank == counter:
            counts = self._compare(devices, self._saved(batch))
        if transport.gather_objects(counts)[counter]:
            self._count(batch, devices, counter)

    def _compare(self, devices: Sequence[DeviceMemory], saved: Sequence[int]) -> bool:
        """Warn if the bound exceeds a device; True if the step is to be counted."""
        needs = [
            [WorkerMemory(s.worker, *s.parts, saved[s.worker], 0, 0) for s in device.states]
            for device in devices
        ]
        share = self._warn(devices, needs, "at least ")
        layers = sum(map(len, self.stages))
        runs = layers * self.schedule.micro_batches * self.workers.replicas * _COUNTED_STEPS
        return _NEAR < share <= 1 and any(saved) and runs <= _MOST_LAYER_RUNS

    def _warn(
        self, devices: Sequence[DeviceMemory], needs: Sequence[Sequence[WorkerMemory]], bound: str = ""
    ) -> float:
        """Warn of the device that lacks most; return what it needs per available byte."""
        shares = [
            device.share([need.total for need in row]) for device, row in zip(devices, needs, strict=True)
        ]
        most = max(range(len(devices)), key=shares.__getitem__)
        if shares[most] > 1:
            _LOG.warning("%s", devices[most].shortage(needs[most], bound, len(self.workers.ranks)))
        return shares[most]

    def _saved(self, batch: Batch) -> list[int]:
        stages = None
        # Casts and fusions save other tensors.
        if not (self.execution.compile or self.execution.autocast) and batch.inputs is not None:
            largest = max(range(len(batch.samples)), key=batch.samples.__getitem__)
            stages = saved_in_stages(self.stages, batch.inputs.pieces[largest], self.execution)
        if stages is None:
            return [0] * self.schedule.workers
        return saved_by_worker(self.schedule, stages, self.execution.recompute)

    def _count(self, batch: Batch, devices: Sequence[DeviceMemory], counter: int) -> None:
        transport = self.workers.transport
        rows = transport.gather_objects((_virtual(batch.inputs), _virtual(batch.targets)))
        if transport.rank != counter:
            return
        sides = zip(*cast("list[tuple[list[Any] | None, list[Any] | None]]", rows), strict=True)
        inputs, targets = (next((side for side in of_ranks if side is not None), None) for of_ranks in sides)
        assert inputs is not None
        pieces = zip(inputs, targets or [None] * len(inputs), strict=True)
        try:
            memory = self.count([_piece(*piece) for piece in pieces], batch.samples)
        except (ConfigError, WorkerError) as error:
            _LOG.debug("the first step is not counted: %s", error)
            return
        self._warn(devices, [[memory.workers[s.worker] for s in device.states] for device in devices])


def _virtual(feed: MicroBatchPrefetcher | None) -> list[Any] | None:
    return None if feed is None else [virtual_batch(piece) for piece in feed.pieces]


def _piece(inputs: Any, target: Any) -> tuple[Any, ...]:
    if type(inputs) is Keyworded:
        return inputs.positional, target, inputs.kwargs
    return inputs, target
