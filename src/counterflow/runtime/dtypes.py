"""Which dtype gradients are added up in."""

from __future__ import annotations

import torch

_LOW = torch.bfloat16, torch.float16
"""Dtypes in which many gradients do not add up: 256 and 1 are 256 in bfloat16."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the gradients of parameters of a dtype are added up in."""
    return torch.float32 if dtype in _LOW else dtype
