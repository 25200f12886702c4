"""Dtypes by name and of sums of gradients, and complex numbers as real ones."""

from __future__ import annotations

from typing import cast

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


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype with a name, as an ``Execution`` has it; None: there is none."""
    return None if name is None else cast("torch.dtype", getattr(torch, name))
