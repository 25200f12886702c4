"""Copies of layers and of their input without memory, on which layers run without computing."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from counterflow.common.tensors.torch_private import keeps_statistics
from counterflow.common.trees import mapped


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
    """Copy layers and their input; called, and the copies run, within a ``FakeTensorMode``.

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
