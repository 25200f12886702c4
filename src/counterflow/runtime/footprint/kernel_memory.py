"""Memory that kernels allocate while they run, measured on tensors of the same shapes.

Invariant: a kernel that cannot run alone, or is too large to try, counts as none and is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.tensors.torch_private import allocations, errors_alone, start_allocations

_MOST_BYTES = 2**28
"""Maximum size of the arguments of a kernel that is tried."""

_MOST_PRODUCT_BYTES = 2**22
"""Maximum size of the arguments of a matrix product that is tried."""

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
"""Matrix products, whose libraries have memory of their own; large ones are slow to try."""


_COPIES = {
    *("aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::full_like", "aten::clone"),
    *("aten::_to_copy", "aten::cat", "aten::stack", "aten::new_empty", "aten::new_zeros"),
    "aten::new_empty_strided",
}
"""Operators whose kernels fill their output and nothing else."""


class KernelMemory:
    """Measured kernels; threads share it."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        self.unknown: dict[str, None] = {}
        """Operators whose kernels were not measured."""

    def size(self, key: Hashable, operator: Any, args: Any, kwargs: Any, output_bytes: int) -> int:
        """Return the bytes that a call's kernel allocates beside its outputs.

        Args:
            key: equal for calls whose kernels allocate the same.
            operator: overload of the operator.
            args: arguments, of which the shapes count.
            kwargs: arguments by name.
            output_bytes: size of the outputs.
        """
        if torch.Tag.pointwise in operator.tags or operator.name().partition(".")[0] in _COPIES:
            return 0
        with self._lock:
            if key not in self._sizes:
                self._sizes[key] = self._measured(operator, args, kwargs, output_bytes)
            return self._sizes[key]

    def _measured(self, operator: Any, args: Any, kwargs: Any, output_bytes: int) -> int:
        name = str(operator.name()).partition(".")[0]
        sizes = [leaf.nbytes for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _PRODUCTS and sum(sizes) > _MOST_PRODUCT_BYTES:
            return 0
        if sum(sizes) > _MOST_BYTES:
            self.unknown[name] = None
            return 0
        real_args, real_kwargs = pytree.tree_map_only(Tensor, _filled, (args, kwargs))
        with torch.no_grad(), errors_alone():
            start_allocations()
            try:
                outputs = operator(*real_args, **real_kwargs)
            except Exception:
                outputs = None
            finally:
                sizes = [*allocations()]
        if outputs is None:
            self.unknown[name] = None
            return 0
        current = peak = 0
        for size in sizes:
            current += size
            peak = max(peak, current)
        return max(0, peak - output_bytes)


def _filled(tensor: Tensor) -> Tensor:
    filled = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    # Numbers that every kernel accepts.
    return filled.fill_(0.5 if tensor.is_floating_point() else 0)
