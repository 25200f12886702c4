"""Wire format over torch.distributed: tensors as plain memory, the header that describes them, and tags.

Gloo matches messages by tag. A message's tag is multiplied by the lanes: its parts never match another part's
receive. The tensors of one message share a tag; Gloo matches equal tags in the order in which they were
posted. Nothing here sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import MOST_TAGS

_LANES = 4
assert MOST_TAGS * _LANES < 2**31 - 2
PAYLOAD, HEADER, DESCRIBED, MORE_HEADER = range(_LANES)

BREAK_TAG = 2**31 - 1
"""A tag nothing is ever sent under."""

GATHER_TAG = BREAK_TAG - 1

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
"""A dtype's index here is its number in a header."""

_NATIVE = frozenset(_DTYPES[:6]) | {torch.int8, torch.uint8, torch.bool}
"""Dtypes that every backend sends; the rest are sent as bytes."""


_NEEDS, _ON_HOST = 1, 2


def as_bytes(tensor: Tensor) -> Tensor:
    """View or copy of a tensor that a lane accepts, which reads memory only: contiguous, native dtype."""
    is_native = tensor.dtype in _NATIVE and tensor.is_contiguous() and not tensor.is_neg()
    return tensor if is_native else as_plain(tensor.resolve_neg())


def as_plain(tensor: Tensor) -> Tensor:
    """View or copy of a tensor that the backends accept: contiguous, no gradient, of a native dtype."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.dtype in _NATIVE else tensor.resolve_conj().reshape(-1).view(torch.uint8)


def describe(tensors: Sequence[Tensor]) -> Tensor:
    """Header of tensors: its length and their number; for each its dtype, flags, dimensions and shape.

    The flags are set if a tensor requires a gradient, and if it is on the host.
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
    """Tensors that a header announces.

    Returns:
        Empty tensors, on the host or a device; for each, if it requires a gradient; if it was on the host.
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


def lane_tag(tag: int, lane: int) -> int:
    """Tag of a message's part."""
    assert 0 <= tag < MOST_TAGS, tag
    return tag * _LANES + lane
