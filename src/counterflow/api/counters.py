"""Counters: buffers to which a forward adds, summed over the copies of a stage.

A buffer that a forward changes differs between copies, and in general no rule combines them. A counter has
one: the increments of a mini-batch on all copies are added.
"""

from __future__ import annotations

import torch
from torch import nn

from counterflow.errors import ConfigError

_SUMMED = "_summed_over_copies"


def sum_over_copies(module: nn.Module, *names: str) -> None:
    """Declare buffers of a module as counters: in training its forward adds to them and nothing else.

    If a stage has copies (two directions, replicas), the increments of a mini-batch on all copies are summed
    when it ends: the numbers of one process that runs the micro-batches in sequence. An increment must not
    depend on the counter. Without copies a declaration changes nothing.

    Args:
        module: module with the buffers.
        names: names of its direct buffers, of integers or floats.

    Raises:
        ConfigError: there is no such buffer, or its dtype is bool or complex.

    >>> module = nn.Module()
    >>> module.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    >>> sum_over_copies(module, "seen")
    """
    buffers = dict(module.named_buffers(recurse=False))
    for name in names:
        if name not in buffers:
            raise ConfigError(f"{type(module).__name__} has no buffer {name!r}; register it before")
        dtype = buffers[name].dtype
        if dtype is torch.bool or dtype.is_complex:
            raise ConfigError(
                f"buffer {name!r} of {type(module).__name__} is {dtype}; count in integers or floats"
            )
    setattr(module, _SUMMED, summed(module) | {*names})


def summed(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's buffers that were declared as counters."""
    names: frozenset[str] = getattr(module, _SUMMED, frozenset())
    return names
