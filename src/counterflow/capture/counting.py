"""Counter of the operations of a traced run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .tracing_internals import TorchDispatchMode


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
        result = func(*args, **(kwargs or {}))
        cost = 0.0
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            try:
                cost += size_of(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
            except Exception:  # other operators count by their results
                cost += 0.0
        if not getattr(func, "is_view", False):
            cost += sum(
                numbers_in(leaf.shape) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)
            )
        self._note(cost)
        return result


def size_of(number: Any) -> int:
    """A size for the example; a symbol without a value counts as 0."""
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        hint = number.node.hint
        return 0 if hint is None else int(hint)
    return int(number)


def numbers_in(shape: Iterable[Any]) -> int:
    """Number of elements of a tensor of a shape."""
    return math.prod(map(size_of, shape))
