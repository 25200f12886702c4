"""A gradient that there is not, in a message of known shapes: a not-a-number that nobody computes.

Invariant: what was made by arithmetic is never taken for it, whatever its values; so None crosses from stage
to stage as in one process, and zeros stay zeros.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .values import TensorSpec

_BITS = {2: (torch.int16, 0x7FED), 4: (torch.int32, 0x7FEDC0DE), 8: (torch.int64, 0x7FFEDC0DE1234567)}
"""By the bytes of a real number: integers as long, and the bits of a not-a-number with a payload."""

_INTEGERS = {2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


def absent(spec: TensorSpec, device: torch.device) -> Tensor:
    """What stands for a gradient of some shape that there is not."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    bits, pattern = _bits(tensor)
    bits.fill_(pattern)
    return tensor


def is_absent(tensor: Tensor) -> bool:
    """Whether a tensor in the host's memory stands for one that there is not; reads little.

    >>> import torch
    >>> spec = TensorSpec(torch.Size([3]), torch.float32, False)
    >>> is_absent(absent(spec, torch.device("cpu"))), is_absent(torch.full((3,), float("nan")))
    (True, False)
    """
    size = tensor.element_size() >> tensor.is_complex()
    if size not in _BITS or not tensor.numel():
        return False
    pattern = _BITS[size][1]
    if _INTEGERS[size].from_address(tensor.data_ptr()).value != pattern:
        return False  # seen without a walk through torch, which every message would cost
    bits, _ = _bits(tensor)
    return bool((bits == pattern).all())


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind, pattern = _BITS[real.element_size()]
    return real.reshape(-1).view(kind), pattern
