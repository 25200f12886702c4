"""Objects and variables that Python code may change, as entries that can be compared.

Invariant: nothing here changes or copies an object. What has no comparable state has no entries.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import queue
import random
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from counterflow.common.trees import version_of

LARGEST = 1000
"""Entries of a container beyond which it is compared by their number, and not looked into."""

_ABSENT = object()
_SLOTS_OF_MODULES = {name for name in vars(nn.Module()) if name != "training"} | {
    "training",
    "_compiled_call_impl",
}
LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "numpy", "counterflow", "transformers", "peft", "accelerate", "safetensors"),
}
"""Packages whose functions and objects are not looked into."""
_PLAIN_CLASSES = (
    *(SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList),
    *(queue.Queue, threading.local),
)
_ITERATORS = tuple(
    type(iterator)
    for iterator in (iter([]), iter(()), iter({}), iter(range(0)), itertools.count(), itertools.cycle(()))
)
_RANDOM = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
OPAQUE = (Tensor, CellType, np.ndarray, *_RANDOM, *_ITERATORS, GeneratorType, ContextVar)
"""Kinds of objects with a state, and without attributes that matter."""

_CONTAINERS = (dict, list, collections.deque, set, bytearray)
_CONSTANT = (MethodType, ModuleType, partial, tuple, frozenset, weakref.ref, nn.Parameter)


def is_library(value: object) -> bool:
    """True if a function or class belongs to Python, torch, NumPy or Counterflow."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] in LIBRARIES


def is_opaque(value: object) -> bool:
    """True if an object is one of a library's, whose attributes are its own matter."""
    if isinstance(value, nn.Module) and type(value).__module__.startswith("torch."):
        return False
    return is_library(type(value)) and not isinstance(value, _PLAIN_CLASSES)


def is_subject(value: object) -> bool:
    """True if an object may be changed, and compared."""
    if isinstance(value, _CONSTANT):
        return False
    if isinstance(value, (*_CONTAINERS, *OPAQUE)):
        return True
    return not is_library(value) if isinstance(value, (type, FunctionType)) else not is_opaque(value)


@dataclass(frozen=True, slots=True, eq=False)
class SharedSubject:
    """Object that may change, or variable of a module.

    Attributes:
        target: the object; of a variable the namespace.
        variable: the variable's name; None: an object.
    """

    target: Any
    variable: str | None = None

    @property
    def key(self) -> Hashable:
        """Its identity."""
        return id(self.target), self.variable

    @property
    def is_tensor(self) -> bool:
        """True if the subject is a tensor."""
        return self.variable is None and isinstance(self.target, Tensor)

    @property
    def is_sequence(self) -> bool:
        """True if its entries are found by their place."""
        return self.variable is None and isinstance(self.target, (list, collections.deque))

    def entries(self) -> dict[Hashable, Any]:
        """Return its entries by key, index or name; of an object with a hidden state that state."""
        if self.variable is not None:
            value = self.target.get(self.variable, _ABSENT)
            return {} if value is _ABSENT else {self.variable: value}
        return entries_of(self.target)


def entries_of(value: Any) -> dict[Hashable, Any]:
    """Return an object's entries, as ``SharedSubject.entries``."""
    kind = next((kind for kind in _ENTRIES if isinstance(value, kind)), None)
    return attributes(value) if kind is None else _ENTRIES[kind](value)


def attributes(value: Any) -> dict[Hashable, Any]:
    """An object's own attributes, without those that a module's machinery has."""
    members: dict[Hashable, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                members[name] = getattr(value, name)
    members |= getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        return {name: member for name, member in members.items() if name not in _SLOTS_OF_MODULES}
    if isinstance(value, type):
        return {
            n: member for n, member in members.items() if not str(n).startswith("__") and not callable(member)
        }
    return members


def _of_sequence(value: Any) -> dict[Hashable, Any]:
    return {"": len(value)} if len(value) > LARGEST else dict(enumerate(value))


def _of_cell(cell: CellType) -> dict[Hashable, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # it is empty
        return {}


def _of_array(value: Any) -> dict[Hashable, Any]:
    small = value.nbytes <= LARGEST**2
    return {"": (value.shape, str(value.dtype), value.tobytes() if small else b"")}


def _of_generator(value: GeneratorType[Any, Any, Any]) -> dict[Hashable, Any]:
    frame = value.gi_frame
    return {"": None if frame is None else (frame.f_lasti, repr(sorted(_numbers(frame.f_locals))))}


def _of_iterator(value: Any) -> dict[Hashable, Any]:
    known = isinstance(value, itertools.count)
    return {"": repr(value) if known else repr(sorted(_numbers(value.__reduce__())))}


_ENTRIES: dict[type, Callable[[Any], dict[Hashable, Any]]] = {
    dict: lambda value: {"": len(value)} if len(value) > LARGEST else dict(value),
    list: _of_sequence,
    collections.deque: _of_sequence,
    queue.Queue: lambda value: _of_sequence(value.queue),
    set: lambda value: {"": frozenset(value)},
    bytearray: lambda value: {"": bytes(value)},
    CellType: _of_cell,
    Tensor: lambda value: {"": value},
    np.ndarray: _of_array,
    random.Random: lambda value: {"": value.getstate()},
    torch.Generator: lambda value: {"": value.get_state().numpy().tobytes()},
    np.random.Generator: lambda value: {"": repr(value.bit_generator.state)},
    np.random.RandomState: lambda value: {"": repr(value.get_state())},
    ContextVar: lambda value: {"": value.get(None)},
    GeneratorType: _of_generator,
    **dict.fromkeys(_ITERATORS, _of_iterator),
}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)):
        yield value
    for member in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ():
        yield from _numbers(member)


class Snapshot:
    """Entries of a subject at one time.

    Args:
        subject: the subject.
    """

    def __init__(self, subject: SharedSubject) -> None:
        self._subject = subject
        self._contents = {key: (value, _state_of(value)) for key, value in subject.entries().items()}

    def changed(self) -> tuple[set[Hashable], set[Hashable]]:
        """The entries that hold something else now, and those that are new, or larger tensors."""
        replaced: set[Hashable] = set()
        added: set[Hashable] = set()
        now = self._subject.entries()
        for key in self._contents.keys() - now.keys():
            replaced.add(key)
        for key, value in now.items():
            before, state = self._contents.get(key, (None, None))
            if same(_state_of(value), state) if value is before else same(before, value):
                continue
            larger = isinstance(value, Tensor) and isinstance(before, Tensor) and value.shape != before.shape
            (added if before is None or larger else replaced).add(key)
        if self._subject.is_sequence:  # what is appended is no cache by a key
            replaced, added = replaced | added, set()
        if any(isinstance(now[key], Tensor) for key in added):  # up to which length a table goes, say
            numbers = {key for key in replaced if type(now.get(key)) in (int, float)}
            replaced, added = replaced - numbers, added | numbers
        return set(map(plain_key, replaced)), set(map(plain_key, added))


def plain_key(key: object) -> Hashable:
    """A key as it may be sent to other workers; of an object its kind."""
    return key if isinstance(key, (str, int, bytes, float)) else repr(type(key))


def _state_of(value: object) -> object:
    if not isinstance(value, Tensor):
        return None
    large = value.is_meta or value.layout is not torch.strided or value.numel() > LARGEST
    # A copy shows a change in place; of a large tensor its version does.
    return version_of(value) if large else value.detach().clone()


def same(value: Any, reference: Any, depth: int = 3) -> bool:
    """True if two objects have equal contents, as far as these are tensors, plain values and containers."""
    if value is reference or type(value) is not type(reference):
        return value is reference
    if isinstance(value, Tensor):
        comparable = (
            value.shape == reference.shape
            and value.dtype == reference.dtype
            and value.device == reference.device
        )
        return comparable and value.detach().equal(reference.detach())
    if isinstance(value, (dict, list, tuple)):
        return depth > 0 and len(value) == len(reference) and _same_entries(value, reference, depth - 1)
    plain = isinstance(value, (bool, int, float, complex, str, bytes, frozenset, set))
    return plain and (bool(value == reference) or repr(value) == repr(reference) == "nan")


def _same_entries(value: Any, reference: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return value.keys() == reference.keys() and all(
            same(value[key], reference[key], depth) for key in value
        )
    return all(same(item, expected, depth) for item, expected in zip(value, reference, strict=True))


def content(value: Any, depth: int = 4) -> object:
    """Return a value that identifies an object's contents in every process; its kind, if it is no value."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided or value.numel() > LARGEST**2:
            return tuple(value.shape), str(value.dtype)
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
        return tuple(value.shape), str(value.dtype), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    if depth and isinstance(value, (dict, list, tuple, collections.deque)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(str(key), content(item, depth - 1)) for key, item in pairs]
    return type(value).__name__
