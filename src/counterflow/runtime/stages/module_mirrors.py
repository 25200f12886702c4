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
"""Attributes of torch, whose contents are followed by other means."""

_DEEPEST = 6
"""Maximum depth of nested containers and objects that are compared."""

_LARGEST = 2**16
"""Maximum number of entries of a container, and of bytes of an array, that are compared."""


class ModuleMirror:
    """A user's module, and the copy of it that this worker runs.

    Args:
        module: the user's module.
        duplicate: its copy.
        memo: copies of objects that ``module`` reaches, by identity.
    """

    def __init__(self, module: nn.Module, duplicate: nn.Module, memo: dict[int, Any]) -> None:
        self._module, self._copy = module, duplicate
        self._memo = memo
        self._tensors = [
            _TensorMirror(table, copies, name)
            for table, copies in zip(tables(module), tables(duplicate), strict=True)
            for name in table
        ]
        self._attributes = _attributes(module)
        self._hooks = [set(hooks) for hooks in module_hook_tables(module)]

    def follow(self) -> None:
        """Set in the copy what the user set in the module since ``note``.

        Raises:
            ConfigError: an attribute cannot be copied.
        """
        self._follow_attributes()
        of_both = zip(
            module_hook_tables(self._module), module_hook_tables(self._copy), self._hooks, strict=True
        )
        for table, duplicate, seen in of_both:
            for gone in seen - table.keys():
                duplicate.pop(gone, None)
            duplicate.update({key: hook for key, hook in table.items() if key not in seen})
            seen.clear()
            seen.update(table)
        copies = parameters_of(self._copy)
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
        """Note the state of the user's module after a call; ``contents``: also which tensors are equal."""
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
                vars(self._copy).update(copy.deepcopy(values, known))
            except Exception as error:
                raise ConfigError(
                    f"{', '.join(map(repr, changed))} of a {type(self._module).__name__} changed and "
                    f"cannot be copied ({error}), and threads that share one model copy what several use; "
                    "make the model in the function that launch() runs"
                ) from error
        for name in before.keys() - now.keys():
            vars(self._copy).pop(name, None)
        self._attributes = now


class _TensorMirror:
    def __init__(
        self, original: Mapping[str, Tensor | None], duplicate: Mapping[str, Tensor | None], name: str
    ) -> None:
        self._module, self._copy, self._name = original, duplicate, name
        self._noted: tuple[int, int] | None = None
        self._equal = self._by_data = False

    def follow(self) -> None:
        """Copy a content that the user set since the previous call."""
        pair = self._pair()
        if pair is None or self._noted is None:
            return
        original, duplicate = pair
        state = _state(original)
        changed = state != self._noted
        if state[1] == self._noted[1] and (changed or (self._equal and not _equal(original, duplicate))):
            changed = self._by_data = True  # others of these may show in the contents alone
        if changed:
            with torch.no_grad():
                duplicate.copy_(original)

    def note(self, *, contents: bool) -> None:
        """Note the user's tensor after a call."""
        pair = self._pair()
        self._noted = None if pair is None else _state(pair[0])
        self._equal = (contents or self._by_data) and pair is not None and _equal(*pair)

    def _pair(self) -> tuple[Tensor, Tensor] | None:
        original, duplicate = self._module.get(self._name), self._copy.get(self._name)
        if (
            original is None
            or duplicate is None
            or original is duplicate
            or original.shape != duplicate.shape
        ):
            return None
        return (
            None
            if is_dtensor(duplicate) or original.is_meta or duplicate.is_meta
            else (original.detach(), duplicate.detach())
        )


def _equal(original: Tensor, duplicate: Tensor) -> bool:
    return original.to(duplicate.device).equal(duplicate)


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
