"""Memory of received messages: on each device a block, in which the layout of a list gives each its region.

Invariant: a region that ``take`` returns shares memory with nothing that a layer or a hook saved. If other
code still refers to memory of it, the message is received in memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from counterflow.common.tensors.torch_private import storage_uses
from counterflow.program.communication.buffer_layout import BufferLayout

from .values import TensorSpec

_ALIGNMENT = 256
"""Bytes to which the tensors of a message are aligned, as the allocator of CUDA aligns twice as coarsely."""

_MOST_LAYOUTS = 16
"""Layouts that share a block: irregular batches have ever other ones, whose regions overlap."""


def message_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a message in memory."""
    return sum(map(_aligned_bytes, specs))


def _aligned_bytes(spec: TensorSpec) -> int:
    return -(-spec.shape.numel() * spec.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class Region:
    """A message's part of a block.

    Args:
        begin: its first byte.
        end: the byte after its last one.
        layout: the layout that it is of.
    """

    __slots__ = ("begin", "buffer", "end", "layout")

    def __init__(self, begin: int, end: int, layout: BufferLayout) -> None:
        self.begin, self.end, self.layout = begin, end, layout
        self.buffer: _Buffer | None = None
        """Its buffer; None: it was never needed."""


class ReceiveMemory:
    """Blocks of memory by device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.blocks: dict[torch.device, _Block] = {}
        self.allocations = 0
        """Number of times that memory was allocated."""

    def take(self, region: Region, specs: Sequence[TensorSpec], end_ops: Callable[[], None]) -> list[Tensor]:
        """Get the tensors of a message; their content is arbitrary.

        Args:
            region: its part of the block.
            specs: specs of the tensors.
            end_ops: drops what the last op needed; called if that refers to the region.
        """
        buffer = region.buffer
        if buffer is None or buffer.block.replaced:
            buffer = region.buffer = self._buffer(region, specs[0].place(self._device))
        if not buffer.is_free():
            end_ops()
            if not buffer.is_free():
                buffer = self._spare(buffer)
        return buffer.tensors(specs)

    def _buffer(self, region: Region, device: torch.device) -> _Buffer:
        block, layout = self.blocks.get(device), region.layout
        size = layout.size
        if block is None or not block.has_place(layout):
            if block is not None:
                block.replaced = True
                size = max(size, block.memory.nbytes)
            self.allocations += 1
            block = self.blocks[device] = _Block(_bytes(size, device))
        return block.buffer(region)

    def _spare(self, buffer: _Buffer) -> _Buffer:
        # for a message that comes while another part of the program refers to its buffer
        if buffer.spare is None or not buffer.spare.is_free():
            self.allocations += 1
            buffer.spare = _Buffer(_bytes(buffer.memory.nbytes, buffer.memory.device), buffer.block)
        return buffer.spare


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


class _Block:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.replaced = False
        self._by_place: dict[tuple[int, int], _Buffer] = {}
        self._layouts: set[BufferLayout] = set()

    def has_place(self, layout: BufferLayout) -> bool:
        has_room = layout.size <= self.memory.nbytes and len(self._layouts) < _MOST_LAYOUTS
        return has_room or layout in self._layouts

    def buffer(self, region: Region) -> _Buffer:
        begin, end, layout = region.begin, region.end, region.layout
        self._layouts.add(layout)
        buffer = self._by_place.get((begin, end))
        if buffer is None:
            # A storage of its own: only so is it known which part of the block is in use.
            storage = self.memory.untyped_storage()[begin:end]
            buffer = _Buffer(_bytes(0, self.memory.device).set_(storage), self)
            for (first, stop), neighbour in self._by_place.items():
                if first < end and begin < stop:
                    buffer.overlapping.append(neighbour)
                    neighbour.overlapping.append(buffer)
            self._by_place[begin, end] = buffer
        return buffer


class _Buffer:
    def __init__(self, memory: Tensor, block: _Block) -> None:
        self.memory, self.block = memory, block
        self.overlapping = [self]
        """Buffers with bytes of this one, itself among them."""
        self.spare: _Buffer | None = None
        self._specs: Sequence[TensorSpec] = ()
        self.contents: list[Tensor] = []

    def is_free(self) -> bool:
        """True if no other code refers to any byte of the buffer: one use is for asking."""
        for buffer in self.overlapping:  # noqa: SIM110 - a loop is faster, for each message
            if storage_uses(buffer.memory) > len(buffer.contents) + 2:
                return False
        return True

    def tensors(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Tensors in the memory. They are no views: changing one does not count as changing another."""
        if specs is not self._specs:
            storage, offset = self.memory.untyped_storage(), 0
            self.contents = []
            for spec in specs:
                tensor = torch.empty(0, dtype=spec.dtype, device=self.memory.device)
                strides = [math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
                first = offset // spec.dtype.itemsize
                self.contents.append(tensor.set_(storage, first, spec.shape, strides))
                offset += _aligned_bytes(spec)
            self._specs = specs
        return self.contents
