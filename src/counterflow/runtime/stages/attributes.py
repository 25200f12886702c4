"""Attributes of modules, restored after a run whose effects are discarded.

Invariant: attributes and hooks are those of before, and so is what is in lists, dicts, sets and tensors among
them. Objects that the user's modules reach otherwise stay as the run left them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.capture.python_state import DictEntries, Items
from counterflow.common.tensors.torch_private import module_hook_tables
from counterflow.common.trees import version_of

_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes that belong to torch: parameters, buffers, submodules, hooks, modes."""

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def restored_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore, at the end of this context, the attributes and hooks that modules' forwards set in it."""
    modules = list(modules)
    before = [(vars(module), _attributes(vars(module))) for module in modules]
    hooks = [(table, dict(table)) for module in modules for table in module_hook_tables(module)]
    values = {id(value): value for _, attributes in before for value in attributes.values()}
    containers = [_saved(value) for value in values.values() if type(value) in _CONTAINERS]
    tensors = [
        (value, version_of(value), value.detach().clone())
        for value in values.values()
        if isinstance(value, Tensor) and value.is_leaf and not value.is_meta
    ]
    try:
        yield
    finally:
        for now, attributes in before:
            for name in _attributes(now).keys() - attributes.keys():
                del now[name]
            now.update(attributes)
        for table, registered in hooks:
            if table.keys() != registered.keys():
                table.clear()
                table.update(registered)
        for container in containers:
            if not container.unchanged():
                container.restore()
        for tensor, version, numbers in tensors:
            if version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(numbers)


def _attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _TORCH}


def _saved(container: Any) -> DictEntries | Items:
    return DictEntries("", container) if type(container) is dict else Items("", container)
