"""Reach of the Python code of a stage's layers: objects, variables, functions.

Followed are attributes of modules and of the user's own objects, containers, closures, default arguments,
partials, bound methods, hooks, classes, weak references, and the module variables that a function names.

Invariant: the same layers are walked in the same order, whether they are the user's or copies of them, so an
object has the same path in both.
"""

from __future__ import annotations

import builtins
import dis
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from counterflow.common.tensors.torch_private import buffers_of, children_of, module_hook_tables

from .subjects import (
    LARGEST,
    LIBRARIES,
    OPAQUE,
    SharedSubject,
    attributes,
    entries_of,
    is_library,
    is_opaque,
    is_subject,
    plain_key,
)

_MOST = 20_000
"""Objects that are visited for one stage."""

_PATHS = 8
"""Paths that are kept of an object."""

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, Enum),
    *(torch.dtype, torch.device, torch.Size, BuiltinFunctionType, CodeType, np.generic, np.dtype),
)


class Kind(Enum):
    """Kind of step by which an object is reached from another one."""

    LAYER = "layer"
    MEMBER = "member"
    """A registered module."""
    ATTRIBUTE = "attribute"
    KEY = "key"
    NAME = "name"
    """What a variable holds: one of a module, one of a closure, an argument."""
    VARIABLE = "variable"
    """A variable itself, which may be given another object."""
    MODULE = "module"
    """A variable of a module of the user's, as the module's attribute."""
    INSIDE = "inside"
    """Without a name in code: a method's object, a function's closure, a class."""
    ELSEWHERE = "elsewhere"
    """By a way that code does not show: a partial's arguments."""


Step = tuple[Kind, Hashable]
Path = tuple[Step, ...]


@dataclass(slots=True)
class Reached:
    """A subject that a stage reaches.

    Attributes:
        subject: the subject.
        paths: paths to it, the first ones.
    """

    subject: SharedSubject
    paths: list[Path]


@dataclass(slots=True)
class Reach:
    """Objects and code that a stage reaches.

    Attributes:
        reached: subjects, by identity.
        codes: code of the layers and of what they call, but for libraries'; each once.
    """

    reached: dict[Hashable, Reached] = field(default_factory=dict)
    codes: dict[CodeType, None] = field(default_factory=dict)


Root = tuple[int, object]
"""Number of a layer, and the layer's module; or LOSS and the loss function."""


def reach_of(roots: Iterable[Root]) -> Reach:
    """Return the reach of one stage's layers."""
    walk = _ObjectWalk()
    for index, root in roots:
        walk.follow(root, ((Kind.LAYER, index),))
    return walk.reach


class _ObjectWalk:
    def __init__(self) -> None:
        self.reach = Reach()
        self._seen: dict[Hashable, object] = {}

    def follow(self, root: object, path: Path) -> None:
        """Visit all that is reached from a layer, nearest first."""
        queue: deque[tuple[object, Path]] = deque([(root, path)])
        while queue and len(self._seen) < _MOST:
            value, path = queue.popleft()
            if isinstance(value, _ATOMS):
                continue
            self._note(value, path)
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # the object too, so that its identity stays its own
            with suppress(Exception):  # an object may refuse to be looked at
                queue += [(child, (*path, step)) for step, child in self._children(value)]

    def _note(self, value: object, path: Path) -> None:
        if isinstance(value, SharedSubject):
            subject = value
        elif is_subject(value):
            subject = SharedSubject(value)
        else:
            return
        entry = self.reach.reached.setdefault(subject.key, Reached(subject, []))
        if len(entry.paths) < _PATHS:
            entry.paths.append(path)

    def _children(self, value: Any) -> Iterator[tuple[Step, object]]:
        if isinstance(value, SharedSubject):
            yield from ()
        elif isinstance(value, nn.Module):
            yield from _of_module(value)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, Mapping):
            if len(value) <= LARGEST:
                yield from (((Kind.KEY, plain_key(key)), member) for key, member in value.items())
        elif isinstance(value, (list, tuple, deque)):
            if len(value) <= LARGEST:
                yield from (((Kind.KEY, index), member) for index, member in enumerate(value))
        else:
            yield from _of_object(value)

    def _of_function(self, function: FunctionType) -> Iterator[tuple[Step, object]]:
        if is_library(function):
            return
        self.reach.codes[function.__code__] = None
        code, scope = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield (Kind.VARIABLE, name), cell
            if entries := entries_of(cell):
                yield (Kind.NAME, name), entries[""]
        defaults = function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        named = chain(zip(arguments, defaults, strict=True), (function.__kwdefaults__ or {}).items())
        yield from (((Kind.NAME, name), member) for name, member in named)
        yield from (((Kind.ATTRIBUTE, name), member) for name, member in vars(function).items())
        for name in _global_names(code):
            yield from _of_variable(scope, name, code)

    def _of_class(self, kind: type) -> Iterator[tuple[Step, object]]:
        for number, base in enumerate(kind.__mro__):
            if is_library(base):
                continue
            if number:
                yield (Kind.INSIDE, f"base {number}"), base
            for name, value in vars(base).items():
                inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                inner = inner.fget if isinstance(inner, property) else inner
                if name not in _NOT_RUN and not (name.startswith("__") and not callable(inner)):
                    yield (Kind.ATTRIBUTE, name), inner


_NOT_RUN = {
    *("__init__", "__new__", "__repr__", "extra_repr", "reset_parameters", "__getstate__", "__setstate__"),
    *("__deepcopy__", "__reduce__", "__weakref__", "__dict__", "__doc__", "__module__", "__annotations__"),
}
"""Attributes of a class that no forward runs or reads."""


def _of_module(module: nn.Module) -> Iterator[tuple[Step, object]]:
    # without parameters, which are the pipeline's matter
    for name, value in attributes(module).items() if not is_opaque(module) else ():
        yield (Kind.ATTRIBUTE, name), value
    for table in module_hook_tables(module):
        yield from (((Kind.INSIDE, "hook"), hook) for hook in table.values() if callable(hook))
    yield (Kind.INSIDE, "class"), type(module)
    yield from (((Kind.MEMBER, name), member) for name, member in children_of(module).items())
    yield from (((Kind.MEMBER, name), member) for name, member in buffers_of(module).items())


def _of_object(value: Any) -> Iterator[tuple[Step, object]]:
    if isinstance(value, MethodType):
        yield (Kind.INSIDE, "self"), value.__self__
        yield (Kind.INSIDE, "function"), value.__func__
    elif isinstance(value, partial):
        yield (Kind.INSIDE, "function"), value.func
        yield from (((Kind.ELSEWHERE, ""), member) for member in (*value.args, *value.keywords.values()))
    elif isinstance(value, weakref.ref):
        yield (Kind.INSIDE, "referent"), value()
    elif not isinstance(value, (*OPAQUE, ModuleType)) and not is_opaque(value):
        yield (Kind.INSIDE, "class"), type(value)
        yield from (((Kind.ATTRIBUTE, name), member) for name, member in attributes(value).items())


def _of_variable(scope: dict[str, Any], name: str, code: CodeType) -> Iterator[tuple[Step, object]]:
    """A module variable that code names; of a module of the user's, its variables that the code names."""
    value = scope.get(name)
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] not in LIBRARIES:
            for inner in _names(code):
                if inner in vars(value):
                    of_module = _of_variable(vars(value), inner, code)
                    yield from (((Kind.MODULE, inner), member) for _, member in of_module)
        return
    if isinstance(value, (FunctionType, type)):
        if not is_library(value):
            yield (Kind.NAME, name), value
    elif name in scope or not hasattr(builtins, name):
        yield (Kind.VARIABLE, name), SharedSubject(scope, name)
        yield (Kind.NAME, name), value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> list[str]:
    return sorted({name for part in _codes(code) for name in part.co_names})


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> list[str]:
    return sorted(
        {
            instruction.argval
            for part in _codes(code)
            for instruction in dis.get_instructions(part)
            if instruction.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"}
        }
    )
