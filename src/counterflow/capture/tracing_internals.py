"""Private parts of torch that automatic layers use, with the alternative to each.

``torch.export`` is the public way to run a model without values; it returns operators instead of modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from counterflow.common.tensors.fake_layers import ShapeMode

from .output_hooks import is_output_hook

__all__ = ["FakeTensor", "FakeTensorMode", "RecordingMode", "ShapeEnv", "TorchDispatchMode"]


if torch.__version__ < "2.13":
    with FakeTensorMode():  # its first two uses at once, in threads, end a CUDA build without a GPU
        pass


class RecordingMode(ShapeMode):
    """Mode of the tensors of recordings, of which none is left after these."""


# FakeTensorMode: tensors with shapes but no values that report a device. Without it: the
# meta device, whose tensors report that device.
# ShapeEnv: lets a fake tensor have a size that depends on its values. Without it: modules that need one fail.
# TorchDispatchMode: intercepts every operator, as torch's notes on extending describe. Without it: no costs.


def memory_of(tensor: Tensor) -> int:
    """A number of a tensor's memory, which views share. Without it: ``untyped_storage().data_ptr()``."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else NO_MEMORY


NO_MEMORY = -1
"""In place of the number of the memory of a tensor that is not strided."""


def changes_saved_tensors() -> bool:
    """Tell whether hooks change what autograd saves. Without it: such hooks of a forward are left out.

    Those of torch (checkpoints, tensors saved on the CPU) give back the same numbers.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not getattr(hooks[0], "__module__", "").startswith("torch.")


@contextmanager
def saved_without_hooks() -> Iterator[None]:
    """Let autograd save tensors without hooks, which may hold outputs with their graphs for ever.

    Without it: tensors of recordings within ``torch.autograd.graph.save_on_cpu`` are never freed.
    """
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Check for hooks of a module. Without it: modules with hooks are not opened."""
    hooks = chain.from_iterable(vars(module).get(name, {}).values() for name in _HOOKS)
    return not all(map(is_output_hook, hooks))


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Hooks of a module's forward and backward. Without it: hooks that are registered later are not seen."""
    return [table for name in _HOOKS if (table := vars(module).get(name)) is not None]


def parameter_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and buffers. Without it: those that are replaced later are not seen."""
    return module._parameters, module._buffers


def transient_buffers_of(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that its state does not contain. Without it: ``state_dict``."""
    return module._non_persistent_buffers_set


def drop_hooks(module: nn.Module) -> None:
    """Remove a module's hooks. Without it: a user's hooks see tensors without values."""
    for name in _HOOKS:
        hooks = vars(module).get(name, {})
        for number in [number for number, hook in hooks.items() if not is_output_hook(hook)]:
            del hooks[number]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own tensors and attributes. Without it: ``named_parameters`` and ``named_buffers``."""
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return attributes | module._buffers | module._parameters


OF_TORCH = (frozenset(vars(nn.Module())) | frozenset(dir(nn.Module))) - {"training", "forward"}
"""Attributes that every module has, besides its mode and its forward."""


def state_of(module: nn.Module) -> dict[str, Any]:
    """Attributes that a module's forward may depend on, besides tensors. Without it: ``attributes_of``."""
    attributes = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
    hooks = {name: len(vars(module).get(name, ())) for name in _HOOKS}
    weights = {f"{WEIGHT}{name}": tensor for name, tensor in (module._buffers | module._parameters).items()}
    return attributes | hooks | weights


WEIGHT = "weight: "
"""Prefix of the names of parameters and buffers in ``state_of``."""


def is_of_transform(tensor: Tensor) -> bool:
    """Tell whether a transform of ``torch.func`` made a tensor. Without it: its results are constants."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
