"""What a traced run of a model would compute, in operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .torch_private import TorchDispatchMode


class OperationCounter(TorchDispatchMode):
    """Counts operations: those of matrix products and convolutions, and one for each computed number.

    Args:
        note: takes the operations of each call.
    """

    def __init__(self, note: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call of torch, and count it."""
        del types
        found = func(*args, **(kwargs or {}))
        cost = 0.0
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            try:
                cost += size_of(flop_registry[packet](*args, **(kwargs or {}), out_val=found))
            except Exception:  # other operators count by their results
                cost += 0.0
        if not getattr(func, "is_view", False):
            cost += sum(
                numbers_in(leaf.shape) for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)
            )
        self._note(cost)
        return found


def size_of(found: Any) -> int:
    """A size for the example; a symbol without a value counts as 0."""
    if isinstance(found, (torch.SymInt, torch.SymFloat)):
        hint = found.node.hint
        return 0 if hint is None else int(hint)
    return int(found)


def numbers_in(shape: Iterable[Any]) -> int:
    """How many numbers a tensor of a shape has."""
    return math.prod(map(size_of, shape))
