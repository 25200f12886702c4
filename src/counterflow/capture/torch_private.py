"""What finding layers uses of torch that has no public name, with what replaces each.

``torch.export`` is the public way to run a model without numbers; it gives operators in place of modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "ShapeEnv", "TorchDispatchMode"]

# FakeTensorMode: tensors that have shapes and no numbers, and say that they are on a device. Without: the
# meta device, whose tensors say that they are there.
# ShapeEnv: lets a fake tensor have a size that its numbers tell. Without: modules that ask for one fail.
# TorchDispatchMode: sees every operator; torch's notes on extending describe it. Without: no costs.


def memory_of(tensor: Tensor) -> int:
    """A number of a tensor's memory, of which views have one. Without: ``untyped_storage().data_ptr()``."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -1


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as torch counts it."""
    return tensor._version


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own. Without: nobody opens a module that has some."""
    return any(vars(module).get(name) for name in _HOOKS)


def drop_hooks(module: nn.Module) -> None:
    """Take a module's hooks off. Without: a user's hooks see tensors without numbers."""
    for name in _HOOKS:
        vars(module).get(name, {}).clear()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own tensors and attributes. Without: ``named_parameters`` and ``named_buffers``."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return own | module._buffers | module._parameters
