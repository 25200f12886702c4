"""Receive buffers with fixed places in memory, each for one message at a time.

Invariant: a buffer that ``take`` returns shares memory with nothing that a layer or a hook saved. If other
code still refers to a buffer that is needed again, that code owns it from then on, and a new one is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from counterflow.common.tensors.torch_private import storage_uses

from .values import TensorSpec

_ALIGNMENT = 256
"""Bytes to which the tensors of a message are aligned, as the allocator of CUDA aligns twice as coarsely."""


def message_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a buffer for a message."""
    return sum(map(_aligned_bytes, specs))


def _aligned_bytes(spec: TensorSpec) -> int:
    return -(-spec.shape.numel() * spec.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class SlotBuffers:
    """Receive buffers by slot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self.allocations = 0
        """Number of buffers that were allocated."""

    def take(
        self, slot: int, size: int, specs: Sequence[TensorSpec], end_ops: Callable[[], None]
    ) -> list[Tensor]:
        """Get the tensors of a slot; their content is arbitrary.

        Args:
            slot: number of the slot.
            size: its size in bytes, of its largest message.
            specs: specs of the tensors.
            end_ops: drops what the last op needed; called if that refers to the slot's memory.
        """
        buffer = self._slots.get(slot)
        if buffer is not None and buffer.memory.nbytes >= size:
            if not buffer.is_free():
                end_ops()
            if buffer.is_free():
                return buffer.tensors(specs)
        self.allocations += 1
        memory = torch.empty(size, dtype=torch.uint8, device=specs[0].place(self._device))
        buffer = self._slots[slot] = _Slot(memory)
        return buffer.tensors(specs)


class _Slot:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._specs: Sequence[TensorSpec] = ()
        self._tensors: list[Tensor] = []

    def is_free(self) -> bool:
        """True if no other code refers to the memory: one use is for asking."""
        return storage_uses(self.memory) <= len(self._tensors) + 2

    def tensors(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Tensors in the memory. They are no views: changing one does not count as changing another."""
        if specs is not self._specs:
            storage, offset = self.memory.untyped_storage(), 0
            self._tensors = []
            for spec in specs:
                tensor = torch.empty(0, dtype=spec.dtype, device=self.memory.device)
                strides = [math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
                first = offset // spec.dtype.itemsize
                self._tensors.append(tensor.set_(storage, first, spec.shape, strides))
                offset += _aligned_bytes(spec)
            self._specs = specs
        return self._tensors
