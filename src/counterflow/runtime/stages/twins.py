"""Copies of the user's modules that follow what the user sets in these.

Followed are attributes of all kinds (also what is in containers and objects that they hold), modes, hooks,
freezing, and contents of weights and buffers.

Invariant: only what changed between two calls is followed, so what a forward sets stays with its module.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import module_hook_tables, parameters_of
from counterflow.errors import ConfigError

from .remote import tables

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that belong to torch, and are followed otherwise."""

_DEEPEST = 6
"""Containers and objects that are looked into, one within another."""

_LARGEST = 2**16
"""Entries of a container, and bytes of an array, that are compared."""


class Twin:
    """A module of the user's, and the copy of it that this worker runs.

    Args:
        module: the user's module.
        twin: its copy.
        memo: by identity, copies of objects that ``module`` reaches.
    """

    def __init__(self, module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
        self._module, self._twin = module, twin
        self._memo = memo
        self._tensors = [
            _CopiedTensor(table, twins, name)
            for table, twins in zip(tables(module), tables(twin), strict=True)
            for name in table
        ]
        self._attributes = _attributes(module)
        self._hooks = [set(hooks) for hooks in module_hook_tables(module)]

    def follow(self) -> None:
        """Set what was set in the user's module since ``note``.

        Raises:
            ConfigError: an attribute cannot be copied.
        """
        self._follow_attributes()
        of_both = zip(
            module_hook_tables(self._module), module_hook_tables(self._twin), self._hooks, strict=True
        )
        for table, twin, seen in of_both:
            for gone in seen - table.keys():
                twin.pop(gone, None)
            twin.update({key: hook for key, hook in table.items() if key not in seen})
            seen.clear()
            seen.update(table)
        copies = parameters_of(self._twin)
        for name, parameter in parameters_of(self._module).items():
            copy_of_it = copies.get(name)
            if (
                parameter is not None
                and copy_of_it is not None
                and copy_of_it.requires_grad != parameter.requires_grad
            ):
                copy_of_it.requires_grad_(parameter.requires_grad)
        for tensor in self._tensors:
            tensor.follow()

    def note(self, *, contents: bool) -> None:
        """Note what the user's module is after a call; ``contents``: also whether tensors are equal."""
        self._attributes = _attributes(self._module)
        for tensor in self._tensors:
            tensor.note(contents=contents)

    def _follow_attributes(self) -> None:
        now, before = _attributes(self._module), self._attributes
        changed = [name for name, (_, content) in now.items() if before.get(name, (None, None))[1] != content]
        if changed:
            values = {name: now[name][0] for name in changed}
            # Objects of before may have changed within; modules and registered tensors have their copies.
            known = {key: item for key, item in self._memo.items() if isinstance(item, (nn.Module, Tensor))}
            try:
                vars(self._twin).update(copy.deepcopy(values, known))
            except Exception as error:
                raise ConfigError(
                    f"{', '.join(map(repr, changed))} of a {type(self._module).__name__} changed and "
                    f"cannot be copied ({error}), and threads that share one model copy what several use; "
                    "make the model in the function that launch() runs"
                ) from error
        for name in before.keys() - now.keys():
            vars(self._twin).pop(name, None)
        self._attributes = now


class _CopiedTensor:
    """A weight or a buffer of the user's module, and the copy of it that this worker computes with.

    Args:
        original: the table of the user's module.
        twin: the table of its copy.
        name: the tensor's name in both.
    """

    def __init__(
        self, original: Mapping[str, Tensor | None], twin: Mapping[str, Tensor | None], name: str
    ) -> None:
        self._module, self._twin, self._name = original, twin, name
        self._noted: tuple[int, int] | None = None
        self._equal = self._by_data = False

    def follow(self) -> None:
        """Let the copy have what the user's tensor was given since the call before."""
        pair = self._pair()
        if pair is None or self._noted is None:
            return
        original, twin = pair
        state = _state(original)
        changed = state != self._noted
        if state[1] == self._noted[1] and (changed or (self._equal and not _equal(original, twin))):
            changed = self._by_data = True  # others of these may show in the contents alone
        if changed:
            with torch.no_grad():
                twin.copy_(original)

    def note(self, *, contents: bool) -> None:
        """Note the user's tensor after a call."""
        pair = self._pair()
        self._noted = None if pair is None else _state(pair[0])
        self._equal = (contents or self._by_data) and pair is not None and _equal(*pair)

    def _pair(self) -> tuple[Tensor, Tensor] | None:
        original, twin = self._module.get(self._name), self._twin.get(self._name)
        if original is None or twin is None or original is twin or original.shape != twin.shape:
            return None
        return (
            None
            if is_dtensor(twin) or original.is_meta or twin.is_meta
            else (original.detach(), twin.detach())
        )


def _equal(original: Tensor, twin: Tensor) -> bool:
    return original.to(twin.device).equal(twin)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Address and count of changes of a tensor; changes through ``.data`` are not counted."""
    return tensor.data_ptr(), tensor._version  # noqa: SLF001 - documented as it


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Hashable]]:
    """A module's attributes, each with what identifies its contents; the value keeps identities its own."""
    return {
        name: (value, _content(value, _DEEPEST))
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def _content(value: Any, depth: int) -> Hashable:
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return (id(value), *(() if value.is_meta or is_dtensor(value) else _state(value)))
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= _LARGEST else b""
    if isinstance(value, (nn.Module, type)) or not depth:
        return id(value)
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = value
    elif isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
    if len(parts) > _LARGEST:
        return id(value), len(parts)
    members = getattr(value, "__dict__", {})
    return id(value), *(_content(part, depth - 1) for part in (*parts, *members.values()))
