"""Operators of a layer as a digest, which says what the layer's costs depend on without computing.

Invariant: equal blocks have equal digests wherever they are in a model. So numbers beside tensors, such as a
scale by the number of a layer, do not count; shapes, types, lists of sizes and switches do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.common.tensors.torch_private import TorchDispatchMode


class OperatorRecorder(TorchDispatchMode):
    """Digest of the operators within its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Digest of the operators, in order."""
        return self._digest.hexdigest()

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = kwargs or {}
        values = (*args, *options.values()) if options else args
        self._digest.update(f"{func}{[*map(_shown, values)]}".encode())
        return func(*args, **options)


def _shown(value: Any) -> object:
    if isinstance(value, Tensor):
        return *value.shape, value.dtype
    if isinstance(value, list | tuple):
        return [item if isinstance(item, int) else _shown(item) for item in value]
    return value if isinstance(value, bool | str | torch.dtype) else type(value).__name__


def detached(value: Any) -> tuple[Any, list[Tensor]]:
    """A value with no graph, and its tensors that have gradients; it may be changed in place."""
    leaves: list[Tensor] = []

    def start(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor.detach()
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1].clone()  # a leaf cannot be changed in place

    return pytree.tree_map_only(Tensor, start, value), leaves


def differentiate(output: Any, inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> None:
    """Run a backward of an output to inputs and weights, as far as it is possible without values."""
    ends = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    starts = [*inputs, *(weight for weight in weights if weight.requires_grad)]
    if not ends or not starts:
        return
    with suppress(Exception):  # operators until then count
        torch.autograd.grad(ends, starts, [torch.ones_like(end) for end in ends], allow_unused=True)
