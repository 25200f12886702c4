"""Memory blocks of one worker, in the order in which they are allocated and freed.

Invariant: a block is counted from the operator that makes its storage to the end of the storage, however many
tensors share it. A storage of a part of another's memory (``storage[begin:end]``) is counted with that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor


class Part(StrEnum):
    """Parts of a worker's memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    MESSAGES = "messages"
    WORKSPACE = "workspace"


class _Block:
    __slots__ = ("address", "part", "reference", "size")

    def __init__(self, size: int, part: Part, address: int = 0) -> None:
        self.size, self.part, self.address = size, part, address
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


_MARK = _Block(0, Part.WORKSPACE)
"""Begin or end of an op."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory at its maximum, in bytes by part."""

    total: int
    parts: dict[Part, int]


class Ledger:
    """Blocks of one worker."""

    def __init__(self) -> None:
        self._live: dict[int, _Block] = {}
        self._events: list[tuple[_Block, int]] = []
        """Blocks since the window was opened; 1: allocated, -1: freed, 0: an op begins or ends."""
        self._before: list[_Block] = []
        self._excluded: set[int] = set()

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of tensors that outlive the count: the mini-batch is the user's."""
        self._excluded |= {tensor.untyped_storage()._cdata for tensor in tensors}  # noqa: SLF001 - its identity

    def add(self, tensor: Tensor, part: Part = Part.ACTIVATIONS) -> None:
        """Count the storage of a tensor, unless it is counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - its identity
        if key in self._excluded or not storage.nbytes() or self._block(storage) is not None:
            return
        block = _Block(storage.nbytes(), part, storage.data_ptr())
        block.reference = weakref.ref(storage, partial(self._free, key))
        self._live[key] = block
        self._events.append((block, 1))

    def _block(self, storage: torch.UntypedStorage) -> _Block | None:
        # the block of the storage, or the one whose memory it is a part of
        block = self._live.get(storage._cdata)  # noqa: SLF001 - its identity
        if block is None and not storage.resizable():
            address = storage.data_ptr()
            live = self._live.values()
            return next((b for b in live if 0 <= address - b.address < b.size), None)
        return block

    def _free(self, key: int, _: object) -> None:
        self._events.append((self._live.pop(key), -1))

    def assign(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Assign the storages of tensors to a part; those that no operator made are counted from now on."""
        for tensor in tensors:
            self.add(tensor, part)
            block = self._block(tensor.untyped_storage())
            if block is not None:
                block.part = part

    def pulse(self, size: int) -> None:
        """Count memory that a kernel allocates and frees."""
        if size:
            block = _Block(size, Part.WORKSPACE)
            self._events += ((block, 1), (block, -1))

    def mark(self) -> None:
        """Note that an op begins or ends."""
        self._events.append((_MARK, 0))

    @property
    def live_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in [*self._live.values()])

    def open_window(self) -> None:
        """Begin a window, whose maximum ``peak`` returns."""
        self._before = [*self._live.values()]
        self._events = []

    def peak(self) -> Peak:
        """Maximum of the window.

        What is allocated and freed within the op of the maximum is workspace.
        """
        events = self._events
        current = most = sum(block.size for block in self._before)
        at = 0  # events up to the maximum
        for number, (block, sign) in enumerate(events, 1):
            current += sign * block.size
            if current > most:
                most, at = current, number
        live = {id(block): block for block in self._before}
        began: set[int] = set()  # of this op
        for block, sign in events[:at]:
            if not sign:
                began.clear()
            elif sign > 0:
                live[id(block)] = block
                began.add(id(block))
            else:
                live.pop(id(block), None)
                began.discard(id(block))
        ended: set[int] = set()
        for block, sign in events[at:]:
            if not sign:
                break
            if sign < 0:
                ended.add(id(block))
        parts = dict.fromkeys(Part, 0)
        for key, block in live.items():
            passing = key in began and key in ended and block.part is Part.ACTIVATIONS
            parts[Part.WORKSPACE if passing else block.part] += block.size
        return Peak(most, parts)
