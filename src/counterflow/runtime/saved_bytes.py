"""Counts the bytes that autograd saves for backward on one worker, and their peak.

Invariant: a storage counts once however many nodes saved it; weights and buffers of the model do not
count. What a backward frees counts until the backward is over, as in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Kept:
    """A storage that is kept, and how many times."""

    __slots__ = ("alive", "pointer", "size", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.pointer = storage.data_ptr()
        self.size = storage.nbytes()
        self.alive = StorageWeakRef(storage)
        self.users = 0


class SavedBytes:
    """The count. What is kept for one unit is noted in a list; ``release`` lets the list go.

    Args:
        constant: tensors that do not count: parameters and buffers.
    """

    def __init__(self, constant: Iterable[Tensor]) -> None:
        self._constant = {_pointer(tensor) for tensor in constant}
        self._given: set[int] = set()
        self._kept: dict[int, Kept] = {}
        self.current = 0
        self.peak = 0

    def never(self, tensors: Iterable[Tensor]) -> None:
        """These do not count either: new versions of parameters."""
        self._constant |= {_pointer(tensor) for tensor in tensors}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These do not count, but those given before do: the mini-batches under way are the user's."""
        self._given = {_pointer(tensor) for tensor in tensors}

    def watch(self, collected: list[Kept]) -> torch.autograd.graph.saved_tensors_hooks:
        """Within this context what autograd saves is counted and noted in ``collected``."""

        def pack(tensor: Tensor) -> Tensor:
            self.hold(tensor, collected)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, _same)

    def hold(self, tensor: Tensor, collected: list[Kept]) -> None:
        """Count a tensor that is kept for backward."""
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if not pointer or pointer in self._constant or pointer in self._given:
            return
        kept = self._kept.get(pointer)
        # What a running backward freed still counts; its memory may be another storage's by now.
        if kept is None or kept.alive.expired():
            kept = self._kept[pointer] = Kept(storage)
            self.current += kept.size
            self.peak = max(self.peak, self.current)
        kept.users += 1
        collected.append(kept)

    def release(self, collected: list[Kept]) -> None:
        """What was collected is not kept any more."""
        for kept in collected:
            kept.users -= 1
            if not kept.users:
                self.current -= kept.size
                if self._kept.get(kept.pointer) is kept:
                    del self._kept[kept.pointer]
        collected.clear()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
