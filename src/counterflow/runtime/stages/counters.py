"""Buffers to which a forward adds, and which copies of a stage add up.

A buffer that a forward changes is each copy's own, and what would become of several nobody knows. Of a
counter it is known: what a mini-batch adds to it on one copy and on another has to be added together.
"""

from __future__ import annotations

import torch
from torch import nn

from counterflow.errors import ConfigError

_SUMMED = "_summed_over_copies"


def sum_over_copies(module: nn.Module, *names: str) -> None:
    """Declare buffers of a module as counters: in training its forward adds to them and nothing else.

    Where a stage has copies (two directions, replicas), what a mini-batch adds on each is added up when it
    ends: the numbers of one process that runs the micro-batches one after another. What is added must not
    depend on what is there. Elsewhere a declaration changes nothing.

    Args:
        module: whose buffers.
        names: of buffers of its own, of integers or floats.

    Raises:
        ConfigError: there is no such buffer, or it is of no numbers.

    >>> module = nn.Module()
    >>> module.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    >>> sum_over_copies(module, "seen")
    """
    own = dict(module.named_buffers(recurse=False))
    for name in names:
        if name not in own:
            raise ConfigError(f"{type(module).__name__} has no buffer {name!r}; register it before")
        dtype = own[name].dtype
        if dtype is torch.bool or dtype.is_complex:
            raise ConfigError(
                f"buffer {name!r} of {type(module).__name__} is {dtype}; count in integers or floats"
            )
    setattr(module, _SUMMED, summed(module) | {*names})


def summed(module: nn.Module) -> frozenset[str]:
    """The buffers of a module that were declared as counters."""
    found: frozenset[str] = getattr(module, _SUMMED, frozenset())
    return found
