"""How tensors are laid out for torch.distributed: as plain memory, and what a header says of them.

Nothing here sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HEADER_WORDS = 64
"""A header is this many int64; a longer description has the rest in a second message."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""A dtype's place here is its number in a header."""

_NATIVE = frozenset(_DTYPES[:6]) | {torch.int8, torch.uint8, torch.bool}
"""What every backend sends as it is; the others are sent as bytes."""


_NEEDS, _ON_HOST = 1, 2


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor as a lane takes it, which looks at its memory only: contiguous, of a type it knows."""
    as_it_is = tensor.dtype in _NATIVE and tensor.is_contiguous() and not tensor.is_neg()
    return tensor if as_it_is else as_plain(tensor.resolve_neg())


def as_plain(tensor: Tensor) -> Tensor:
    """A tensor as the backends take it: contiguous, no gradient, of a type they know."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.dtype in _NATIVE else tensor.resolve_conj().reshape(-1).view(torch.uint8)


def describe(tensors: Sequence[Tensor]) -> Tensor:
    """The header: its length, how many tensors; of each the dtype, flags, the shape.

    The flags say whether it needs a gradient, and whether it is on the host.
    """
    words = [0, len(tensors)]
    for tensor in tensors:
        words += [_DTYPES.index(tensor.dtype), _flags(tensor), tensor.dim(), *tensor.shape]
    words[0] = len(words)
    words += [0] * (HEADER_WORDS - len(words))
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _flags(tensor: Tensor) -> int:
    return tensor.requires_grad * _NEEDS + (tensor.device.type == "cpu") * _ON_HOST


def announced(
    words: list[int], *, pinned: bool = False, device: torch.device | None = None
) -> tuple[list[Tensor], list[bool], list[bool]]:
    """What a header announces.

    Returns:
        Empty tensors, on the host or a device; which of them need a gradient; which the host had.
    """
    tensors, needing, on_host = [], [], []
    place = 2
    for _ in range(words[1]):
        dtype, flags, dimensions = words[place : place + 3]
        place += 3 + dimensions
        shape = words[place - dimensions : place]
        tensors.append(torch.empty(shape, dtype=_DTYPES[dtype], pin_memory=pinned, device=device))
        needing.append(bool(flags & _NEEDS))
        on_host.append(bool(flags & _ON_HOST))
    return tensors, needing, on_host
