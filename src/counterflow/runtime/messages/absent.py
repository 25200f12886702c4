"""A gradient that there is not, in a message of known shapes: a not-a-number that nobody computes.

Invariant: what was made by arithmetic is never taken for it, whatever its values; so None crosses from stage
to stage as in one process, and zeros stay zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .values import TensorSpec

_BITS = {2: (torch.int16, 0x7FED), 4: (torch.int32, 0x7FEDC0DE), 8: (torch.int64, 0x7FFEDC0DE1234567)}
"""By the bytes of a real number: integers as long, and the bits of a not-a-number with a payload."""


def absent(spec: TensorSpec, device: torch.device) -> Tensor:
    """What stands for a gradient of some shape that there is not."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    bits, pattern = _bits(tensor)
    bits.fill_(pattern)
    return tensor


def is_absent(tensor: Tensor) -> bool:
    """Whether a tensor stands for one that there is not; reads its first element, and rarely more.

    >>> import torch
    >>> spec = TensorSpec(torch.Size([3]), torch.float32, False)
    >>> is_absent(absent(spec, torch.device("cpu"))), is_absent(torch.full((3,), float("nan")))
    (True, False)
    """
    if not tensor.numel():
        return False
    first = tensor.reshape(-1)[0].item()
    if first == first:  # noqa: PLR0124 - a number
        return False
    bits, pattern = _bits(tensor)
    return bool((bits == pattern).all())


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind, pattern = _BITS[real.element_size()]
    return real.reshape(-1).view(kind), pattern
