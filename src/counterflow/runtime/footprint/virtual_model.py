"""Copies of a user's model and mini-batch with virtual tensors: memory is reserved and never touched.

Invariant: the user's objects stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import buffers_of, parameters_of
from counterflow.errors import ConfigError

from .virtual_mode import SMALL_BYTES

_T = TypeVar("_T")


def virtual_copy(value: _T, roots: Iterable[nn.Module]) -> _T:
    """Copy of models, lists of layers and losses, whose large weights have no numbers.

    Args:
        value: objects to copy.
        roots: all modules among them.

    Raises:
        ConfigError: a module cannot be copied, or its weights are sharded or have no shapes yet.
    """
    memo: dict[int, Any] = {}
    for root in roots:
        for module in root.modules():
            for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
                if tensor is None or id(tensor) in memo:
                    continue
                if is_dtensor(tensor) or is_lazy(tensor):
                    raise ConfigError(
                        f"memory: {name} of a {type(module).__name__} is sharded, or has no shape yet; count "
                        "before it is sharded, or after a first forward"
                    )
                memo[id(tensor)] = _weight(tensor)
            for attribute in vars(module).values():
                if isinstance(attribute, Tensor) and not attribute.is_leaf:
                    memo[id(attribute)] = attribute.detach().clone()
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise ConfigError(
            f"memory: the model cannot be copied ({type(error).__name__}: {error}); keep iterators, locks "
            "and open files out of its attributes"
        ) from error


def _weight(tensor: Tensor) -> Tensor:
    reserved = virtual_tensor(tensor)
    if not isinstance(tensor, nn.Parameter):
        return reserved
    parameter = nn.Parameter(reserved, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def virtual_tensor(tensor: Tensor) -> Tensor:
    """Tensor of the same shape on the CPU; a small one has the same numbers, or zeros if it has none."""
    reserved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if reserved.untyped_storage().nbytes() <= SMALL_BYTES:
        if tensor.is_meta:
            reserved.zero_()
        else:
            reserved.copy_(tensor.detach())
    return reserved


def virtual_batch(value: Any) -> Any:
    """Mini-batch with the same shapes."""
    return pytree.tree_map_only(Tensor, virtual_tensor, value)


def modules_in(*values: Any) -> list[nn.Module]:
    """Modules among some values and their lists."""
    modules: list[nn.Module] = []
    for value in values:
        if isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(value, Sequence):
            modules += modules_in(*value)
    return modules
