"""Memory of devices, and what the workers on each need of it in a step."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from counterflow.common.number_texts import byte_size

from ..execution.step import Workers
from ..parameters.weights import Weights
from .available import free_bytes_on, future_state_bytes, worker_limit
from .footprint import WorkerMemory
from .ledger import Part


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Memory of a rank before its first step.

    Attributes:
        replica: its replica.
        worker: its number there.
        device: host, and "cpu" or the name of another device, whose memory it has.
        process: its process, which other ranks may share.
        free: free bytes of the device; None: unknown.
        allocated: bytes there that are not free because of the rank: its tensors, or what torch has reserved
            for its process on a GPU.
        limit: bytes that the rank may use; None: no limit of its own.
        weights: bytes of weights and buffers.
        gradients: bytes of gradients.
        optimizer: bytes of the optimizer's states after the first update.
        inputs: bytes of the mini-batch's inputs; None: it reads none.
    """

    replica: int
    worker: int
    device: tuple[str, str]
    process: int
    free: int | None
    allocated: int
    limit: int | None
    weights: int
    gradients: int
    optimizer: int
    inputs: int | None

    @classmethod
    def of(cls, workers: Workers, weights: Weights, inputs: int | None) -> Self:
        """The state of this rank.

        Args:
            workers: its place.
            weights: its weights.
            inputs: bytes of the mini-batch's inputs; None: it reads none.
        """
        device = workers.transport.device
        tensors = weights.weight_tensors(), weights.gradient_tensors(), weights.optimizer_tensors()
        weight, gradient, states = (sum(tensor.nbytes for tensor in part) for part in tensors)
        name, allocated = str(device), weight + gradient + states
        if device.type == "cuda":
            name = str(torch.cuda.get_device_properties(device).uuid)
            allocated = torch.cuda.memory_reserved(device)
        return cls(
            workers.replica,
            workers.worker,
            (socket.gethostname(), name),
            os.getpid(),
            free_bytes_on(device),
            allocated,
            worker_limit(device),
            weight,
            gradient,
            states + future_state_bytes(weights.optimizers.values()),
            inputs,
        )

    @property
    def parts(self) -> tuple[int, int, int]:
        """Bytes that do not depend on the mini-batch: weights, gradients and states."""
        return self.weights, self.gradients, self.optimizer


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that some ranks share, of a GPU or of a machine; or that one rank may use at most.

    Attributes:
        ranks: their numbers.
        states: their states.
        available: bytes that they can use together, with what they have allocated; None: unknown.
    """

    ranks: tuple[int, ...]
    states: tuple[WorkerState, ...]
    available: int | None

    @classmethod
    def of(cls, states: Sequence[WorkerState]) -> list[Self]:
        """The memory of all ranks, each at least once."""
        by_device: dict[tuple[str, str], list[int]] = {}
        for rank, state in enumerate(states):
            by_device.setdefault(state.device, []).append(rank)
        shared = []
        for ranks in by_device.values():
            group = tuple(states[rank] for rank in ranks)
            shared.append(cls(tuple(ranks), group, _together(group)))
        limits = ((rank, state) for rank, state in enumerate(states) if state.limit is not None)
        return [*(cls((rank,), (state,), state.limit) for rank, state in limits), *shared]

    def share(self, needs: Sequence[int]) -> float:
        """Needs of the ranks per available byte; 0 if these are unknown."""
        return 0.0 if self.available is None else sum(needs) / max(1, self.available)

    def shortage(self, needs: Sequence[WorkerMemory], bound: str, replicas: int) -> str:
        """Sentence about ranks that need more in a step than is available.

        Args:
            needs: bytes of each of them.
            bound: words before the bytes.
            replicas: number of replicas.
        """
        word, numbers = ("worker", [state.worker for state in self.states])
        if replicas > 1:
            word, numbers = "rank", list(self.ranks)
        first, last = min(numbers), max(numbers)
        names = f"{word} {first} needs" if first == last else f"{word}s {first} to {last} need"
        pronoun = "it" if first == last else "them"
        sizes = {part: sum(getattr(need, part.value) for need in needs) for part in Part}
        parts = ", ".join(
            f"{part.value} {byte_size(size, digits=3)}"
            for part, size in sorted(sizes.items(), key=lambda row: -row[1])
            if size
        )
        fixed = sum(sizes[part] for part in (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER))
        advice = "fewer samples in a micro-batch, recomputation, or more stages"
        if 2 * fixed > sum(sizes.values()):
            advice = "more stages, zero_stage=1, or an optimizer with fewer states"
        return (
            f"{names} {bound}{byte_size(sum(sizes.values()))} in a step ({parts}), and "
            f"{byte_size(self.available or 0)} are available to {pronoun}; take {advice}; "
            "pipeline.memory(inputs, targets) shows the memory of each worker"
        )


def _together(states: Sequence[WorkerState]) -> int | None:
    known = [state.free for state in states if state.free is not None]
    if len(known) < len(states):
        return None
    if states[0].device[1] == "cpu":
        return min(known) + sum(state.allocated for state in states)
    return min(known) + sum({state.process: state.allocated for state in states}.values())  # the process's
