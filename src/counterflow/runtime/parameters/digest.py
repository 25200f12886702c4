"""A digest of some tensors' contents, computed on their device.

The digest is a sum of products of bits and fixed random factors, in 64-bit integers that wrap around: exact
in any order of addition, so equal on every device. At most 32 bits of a value are read at a time, so zero and
negative zero differ, and a NaN is handled like a number. Each place has its own factor, so swapped values and
equal changes in several places are detected too (exclusive or, as in ``torch.hash_tensor``, returns 0 for any
tensor of equal values). Two different contents have equal digests with a probability of at most one in 2**33.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from counterflow.common.tensors.dtensors import local
from counterflow.common.tensors.unknown_values import values_unknown

_WIDTH = 2**16
"""Values of a row, with a factor each; a worker's cache holds them."""

_ROWS = 64
"""Rows that a device works on at once: more are fewer launches, and more memory."""

_BITS_LOST = 11
"""The uppermost 53 bits go into a float64, as numbers are gathered."""

_TENSORS = 16
"""The level of the factors of whole tensors, above those of rows, rows of rows and so on."""


def digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The number of what this rank holds of some tensors, a float64 on a device; nobody waits for it.

    >>> one, other = torch.zeros(3), torch.ones(2, 2)
    >>> cpu = torch.device("cpu")
    >>> bool(digest([one, other], cpu) == digest([one.clone(), other.clone()], cpu))
    True
    >>> bool(digest([one, other], cpu) == digest([-one, other], cpu))
    False
    """
    if values_unknown():
        return torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        sums = [_sum(_words(local(tensor).detach())).to(device) for tensor in tensors]
        total = (
            _sum(torch.stack(sums), _TENSORS) if sums else torch.zeros((), dtype=torch.int64, device=device)
        )
        return (total >> _BITS_LOST).double()


def _words(tensor: Tensor) -> Tensor:
    # The memory of a conjugate or negative view contains other values than it has.
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.element_size() == 1:
        return flat.view(torch.uint8)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)


def _sum(words: Tensor, level: int = 0) -> Tensor:
    factors = _factors(level, words.device)
    if words.numel() <= _WIDTH:
        return (words * factors[: words.numel()]).sum()
    sums = []
    rows = 1 if words.device.type == "cpu" else _ROWS
    for block in words.split(_WIDTH * rows):
        length = block.numel() // _WIDTH * _WIDTH
        if length:
            sums.append((block[:length].view(-1, _WIDTH) * factors).sum(1))
        if length < block.numel():
            sums.append((block[length:] * factors[: block.numel() - length]).sum().view(1))
    return _sum(torch.cat(sums), level + 1)


@cache
def _factors(level: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(level)
    least, most = -(2**63), 2**63 - 1
    numbers = torch.randint(least, most, (_WIDTH,), generator=generator, dtype=torch.int64, device="cpu")
    return (numbers | 1).to(device)  # odd, so one value that differs always differs in its product
