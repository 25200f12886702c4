"""Tensors of which a rank holds a part: torch's DTensors, and what torch's collectives have not filled yet.

torch's module of DTensors takes as long to import as all else here, so that it is asked for only where
somebody imported it before: without it there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .torch_private import is_traceable_wrapper_subclass, local_shape_and_offset, local_tensor

_T = TypeVar("_T")


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory and without a graph; of a plain one, all of it."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; of a DTensor, all who hold a part make the call."""
    return cast("Any", tensor).full_tensor() if is_dtensor(tensor) else tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """A tensor that is laid out as a parameter is, with ``part`` as the memory of what this rank holds."""
    if not is_dtensor(parameter):
        return part
    known = cast("Any", parameter)
    return cast(
        "Tensor",
        type(known.data).from_local(
            part,
            known.device_mesh,
            known.placements,
            run_check=False,
            shape=known.shape,
            stride=known.stride(),
        ),
    )


def part_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a tensor that is laid out as a parameter is; no collective if it is a whole."""
    if not is_dtensor(parameter):
        return tensor
    known = cast("Any", parameter)
    if is_dtensor(tensor):
        return cast("Tensor", cast("Any", tensor).redistribute(placements=known.placements).to_local())
    shape, offset = local_shape_and_offset(known)
    return tensor[tuple(slice(first, first + size) for size, first in zip(shape, offset, strict=True))]


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own in one that wraps others; else the tensor itself."""
    wrapper: Any = tensor
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):  # a DTensor's mesh is among them
            yield from parts(inner)


def is_awaited(value: object) -> bool:
    """Whether a value is a tensor that a collective of torch's may still fill."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(value, module.AsyncCollectiveTensor)


def settled(tensor: Tensor) -> Tensor:
    """The tensor, filled, with its graph."""
    return cast("Tensor", _Settled.apply(tensor)) if is_awaited(tensor) else tensor  # type: ignore[no-untyped-call]


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        del ctx
        return cast("Tensor", tensor.trigger_wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return gradients[0]
