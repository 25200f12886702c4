"""Tensors of which a rank holds a part: torch's DTensors, and results of torch's collectives in flight.

torch's module of DTensors takes as long to import as the rest of the engine, so it is used only if it is
imported
already: otherwise there are no DTensors.
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
    """True if a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Part of a tensor on this rank, in the same memory and without a graph; of a plain tensor, all of it."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor; for a DTensor, all ranks that hold a part make the call."""
    return cast("Any", tensor).full_tensor() if is_dtensor(tensor) else tensor


def like(parameter: Tensor, part: Tensor, full: Tensor | None = None) -> Tensor:
    """Make a tensor of the layout of a parameter, with ``part`` as the memory of this rank's part.

    Args:
        parameter: the parameter.
        part: this rank's part.
        full: tensor with the shape and strides of all parts; None: those of the parameter.
    """
    if not is_dtensor(parameter):
        return part
    known, sizes = cast("Any", parameter), parameter if full is None else full
    return cast(
        "Tensor",
        type(known.data).from_local(
            part,
            known.device_mesh,
            known.placements,
            run_check=False,
            shape=sizes.shape,
            stride=sizes.stride(),
        ),
    )


def part_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Part of a tensor on this rank, in the layout of a parameter; no collective if the tensor is full."""
    if not is_dtensor(parameter):
        return tensor
    known = cast("Any", parameter)
    if is_dtensor(tensor):
        return cast("Tensor", cast("Any", tensor).redistribute(placements=known.placements).to_local())
    shape, offset = local_shape_and_offset(known)
    return tensor[tuple(slice(first, first + size) for size, first in zip(shape, offset, strict=True))]


def has_blocks(tensor: Tensor) -> bool:
    """True if each rank has some rows of a DTensor, or all, and nothing is divided within a row."""
    placements = cast("Any", tensor).placements
    return all(place.is_replicate() or getattr(place, "dim", None) == 0 for place in placements)


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
    """True if a value is a tensor that a collective of torch's may still fill."""
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
