"""What travels between stages: a tensor or a tuple of tensors."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Value = Tensor | tuple[Tensor, ...]
"""What a stage takes and gives."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver has to know of a tensor before it comes."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)


class Unit(NamedTuple):
    """What one backward computes: a micro-batch, or one of the ``parts`` it is halved into.

    ``slot`` tells the mini-batches apart that are under way at once, of which ``micro_batch`` is one.
    """

    micro_batch: int
    part: int = 0
    parts: int = 1
    slot: int = 0

    @property
    def shape(self) -> Unit:
        """The unit in whose shapes this one's messages come: that of the first slot."""
        return self if not self.slot else self._replace(slot=0)

    def rows(self, samples: int) -> slice:
        """Its samples among the ``samples`` of its micro-batch."""
        return slice(samples * self.part // self.parts, samples * (self.part + 1) // self.parts)


def tensors_of(value: object, place: str) -> list[Tensor]:
    """The tensors of a stage's output.

    Raises:
        TypeError: it is neither a tensor nor a tuple of two or more.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)) and len(value) > 1 and all(isinstance(v, Tensor) for v in value):
        return list(value)
    shown = type(value).__name__
    if isinstance(value, (tuple, list)):
        shown = f"{shown} of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    raise TypeError(f"{place} gives a {shown}; stages hand on a tensor, or a tuple of two or more tensors")


def value_of(tensors: Sequence[Tensor]) -> Value:
    """What a stage takes: the one tensor, or the tuple."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def number_of(*parts: object) -> int:
    """A number below 2**52 that tells ``parts`` from others, the same in every process."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 12


def signature(tree: object, *more: Any) -> int:
    """A number that tells the shapes and dtypes of a mini-batch from others (a float64 holds it)."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return 1 + number_of(*[(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves], *more)


_TRIES = 3
"""A buffer that is still shared when it has been looked at so often is not waited for."""


class BufferPool:
    """Receive buffers that are used again.

    Invariant: what is taken is in nobody's hands, whatever a layer or a hook kept of it. All buffers, in use
    or free, are together never more bytes than were once in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[torch.Size, torch.dtype], deque[tuple[Tensor, int]]] = {}
        self._free_bytes = self._used_bytes = self._most_bytes = 0
        self.made = 0
        """Buffers that were allocated."""

    def take(self, spec: TensorSpec) -> Tensor:
        """A buffer nobody else has; its content is left over from its last use."""
        free = self._free.get((spec.shape, spec.dtype))
        buffer = self._unshared(free) if free else None
        if buffer is None:  # what is left of the free ones is shared: in use
            self.made += 1
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            shared = buffer.nbytes * (len(free) if free else 0)
            self._most_bytes = max(self._most_bytes, self._used_bytes + buffer.nbytes + shared)
        self._used_bytes += buffer.nbytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        return buffer

    def _unshared(self, free: deque[tuple[Tensor, int]]) -> Tensor | None:
        for _ in range(len(free)):
            buffer, tries = free.popleft()
            if not _is_shared(buffer):
                self._free_bytes -= buffer.nbytes
                return buffer
            if tries < _TRIES:
                free.append((buffer, tries + 1))
            else:  # it is theirs who keep it
                self._free_bytes -= buffer.nbytes
        return None

    def give(self, buffers: Sequence[Tensor]) -> None:
        """Give buffers back that the engine needs no more; what others have of them may live on."""
        for buffer in buffers:
            key = buffer.shape, buffer.dtype
            self._used_bytes -= buffer.nbytes
            self._free_bytes += buffer.nbytes
            free = self._free.get(key)
            if free is None:
                free = self._free[key] = deque()
            free.append((buffer, 0))
            while self._free_bytes + self._used_bytes > self._most_bytes:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Let a buffer go, of the shape that was first given back."""
        key = next(iter(self._free))
        free = self._free[key]
        if free:
            self._free_bytes -= free.popleft()[0].nbytes
        if not free:
            del self._free[key]


def _is_shared(buffer: Tensor) -> bool:
    """Whether another tensor has the memory: one for the buffer, and one for asking."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > 2  # noqa: SLF001
