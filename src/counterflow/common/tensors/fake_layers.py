"""Copies of layers and of their input without memory, on which layers run without computing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from counterflow.common.tensors.torch_private import keeps_statistics
from counterflow.common.trees import mapped

_GROUPED_PRODUCT = "aten::_grouped_mm"
"""Operator of ``torch.nn.functional.grouped_mm``."""


class ShapeMode(FakeTensorMode):
    """Mode of fake tensors.

    Shapes of ``torch.nn.functional.grouped_mm`` are those in bfloat16: torch knows no others without values,
    and computes all dtypes with them.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Result of an operator on fake tensors."""
        if func.name() != _GROUPED_PRODUCT:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        named = dict(kwargs or {})
        dtype = named.pop("out_dtype", None) or args[0].dtype
        factors = [factor.to(torch.bfloat16) for factor in args[:2]]
        result: Any = super().__torch_dispatch__(func, types, (*factors, *args[2:]), named)
        return result.to(dtype)


@contextmanager
def silent_fake_tensors() -> Iterator[None]:
    """Silence torch's log of each failed attempt; several threads may do so at once."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def refuse(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Context in which fake layers run, and save tensors for a backward, without values."""
    mode = ShapeMode(allow_non_fake_inputs=True)
    with silent_fake_tensors(), mode, torch.inference_mode(mode=False), torch.enable_grad():
        yield


class FakeLayers(NamedTuple):
    """Layers without memory.

    Attributes:
        layers: copies of the layers, which share tensors as these do.
        value: input of the first one.
        tensors: weights and buffers.
    """

    layers: list[nn.Module]
    value: Any
    tensors: list[Tensor]


def fake_layers(
    layers: Sequence[nn.Module], inputs: Any, device: torch.device, dtype: torch.dtype | None = None
) -> FakeLayers:
    """Copy layers and their input; called, and the copies run, within ``shapes_alone``.

    Args:
        layers: the layers, on any device.
        inputs: input of the first one.
        device: device that the copies report.
        dtype: precision to which weights are cast while layers run; None: their own.
    """

    def like(tensor: Tensor, cast: torch.dtype | None) -> Tensor:
        kind = cast if cast is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device=device)

    memo: dict[int, Any] = {}
    for module in (module for layer in layers for module in layer.modules()):
        cast = None if keeps_statistics(module) else dtype
        for weight in module.parameters(recurse=False):
            fake = like(weight, cast)
            memo.setdefault(id(weight), nn.Parameter(fake, weight.requires_grad))
        for buffer in module.buffers(recurse=False):
            memo.setdefault(id(buffer), like(buffer, None))
    tensors = list(memo.values())
    copies = [copy.deepcopy(layer, memo) for layer in layers]
    return FakeLayers(copies, mapped(lambda tensor: like(tensor, dtype), inputs), tensors)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages by their identity, which is theirs as long as they are in the result."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}  # noqa: SLF001


@contextmanager
def saved_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Context of a forward, with the storages that autograd saves, as ``storages_of`` gives them."""
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storages.update(storages_of([tensor]))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield storages
