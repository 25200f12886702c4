"""Dtypes of sums of gradients, and complex numbers as real ones."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = torch.bfloat16, torch.float16
"""Dtypes in which many gradients do not add up: 256 and 1 are 256 in bfloat16."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of parameters of a dtype are summed."""
    return torch.float32 if dtype in _LOW else dtype


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones: sums and norms are the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
