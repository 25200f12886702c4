"""Walk over the Python values that forwards can read: attributes, globals, closures, what these contain.

The functions that opened modules run are known by their classes. What a function's code loads of its globals
and its closure is read from its bytecode; functions among these are walked as well. A value that is a list, a
dict or an object of a user's class is walked to its leaves.

Invariant: nothing is called but ``vars``, ``len``, iterators of built-in containers, and ``repr`` of numbers.
Libraries that no user changes between steps (torch, NumPy, the standard library, ...) are not entered.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .python_state import (
    ABSENT,
    ArrayContent,
    Cell,
    DictEntries,
    Items,
    Names,
    Order,
    Plain,
    PythonState,
    Same,
    Slots,
    Version,
    content_of,
)

LRU_CACHE = type(functools.lru_cache(lambda: None))

_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "sympy", "triton", "einops", "counterflow"),
    *("transformers", "accelerate", "peft", "trl", "diffusers", "timm", "safetensors", "tokenizers"),
}
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TYPES_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OF_GRADIENTS = {"is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "grad_fn", "is_leaf"}
_SEEDS = {"manual_seed", "manual_seed_all", "set_rng_state", "fork_rng"}
_ENVIRONMENT = {"environ", "getenv"}
_LARGEST = 50_000
"""Largest number of values of a state; further ones are not looked at."""
_LONGEST = 10_000
"""Largest number of entries of a container that is walked; of a larger one only the length is compared."""
_BYTES = 4096
"""Largest array whose content is compared."""


def is_library(name: str | None) -> bool:
    """Tell whether a Python module, by its full name, is of a library that is not entered."""
    return (name or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _loads(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    loaded: dict[str, None] = {}
    names = set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            loaded[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, more = _loads(constant)
            loaded |= dict.fromkeys(inner)
            names |= more
    return tuple(loaded), frozenset(names)


class Walk:
    """One walk.

    Args:
        model: model whose modules, parameters and buffers are known, and not entered.
        objects: further objects that are known, and not entered.
    """

    def __init__(self, model: nn.Module, objects: Iterable[object] = ()) -> None:
        self.state = PythonState()
        self.weights: dict[str, object] = {}
        """Parameters and buffers that are read, by name."""
        self._model = {id(m) for m in (*model.modules(), *objects)}
        self._tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._walked: dict[int, object] = {}
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, str], object]] = {}
        self._functions: dict[int, object] = {}
        self._path = ""

    def done(self) -> PythonState:
        """State of all that was walked."""
        self.state.watches += [Names(*entry) for entry in self._names.values()]
        self._names.clear()
        return self.state

    # -- modules of the model

    def attributes(self, path: str, module: nn.Module, names: Iterable[str]) -> None:
        """Walk some attributes of a module of the model, and the functions of its class that these are."""
        members, self._path = vars(module), path
        for name in names:
            label = f"{path}.{name}" if path else name
            self._name(label, members, name)
            if name in members:
                self.value(label, members[name])
                continue
            table = next(
                (members[t] for t in ("_parameters", "_buffers", "_modules") if name in members[t]), None
            )
            if table is not None:
                self._name(label, table, name)
                tokens = self.state.tokens if table is members["_modules"] else self.weights
                tokens[label] = Same(table[name])
            else:
                self._of_class(label, type(module), name)

    def members(self, label: str, owner: object, names: Iterable[str]) -> None:
        """Walk some attributes of an object, and the functions of its class that these are."""
        attributes = vars(owner)
        for name in names:
            member = f"{label}.{name}"
            self._name(member, attributes, name)
            if name in attributes:
                self.value(member, attributes[name])
            else:
                self._of_class(member, type(owner), name)

    def children(self, path: str, module: nn.Module) -> None:
        """Walk which modules, and in which order, a module has."""
        table = vars(module)["_modules"]
        self.state.watches.append(DictEntries(f"the modules of {path!r}" if path else "the modules", table))
        for name, child in table.items():
            self._token(f"{path}.{name}" if path else name, Same(child))
        self._token(f"the order of the modules of {path!r}", Plain(tuple(table)))

    def _of_class(self, label: str, kind: type, name: str) -> None:
        for base in kind.__mro__:
            self._name(label, vars(base), name, base)
            if name in vars(base):
                self._member(label, vars(base)[name])
                return
        self._token(label, ABSENT)

    def member(self, label: str, kind: type, name: str, value: Any) -> None:
        """Walk a value of a class of modules: its functions, and whether it changes."""
        self._name(label, vars(kind), name, kind)
        self._member(label, value)

    def _member(self, label: str, value: Any) -> None:
        if isinstance(value, property):
            for function in (value.fget, value.fset):
                self._member(label, function)
        elif isinstance(value, (staticmethod, classmethod)):
            self._member(label, value.__func__)
        elif isinstance(value, functools.cached_property):
            self._member(label, value.func)
        elif isinstance(value, FunctionType):
            self._token(label, Same(value))
            self.function(label, value, inside=True)
        else:
            self.value(label, value)

    # -- functions

    def function(self, label: str, function: Callable[..., Any], *, inside: bool = False) -> None:
        """Walk the globals, the closure and the defaults of a function.

        Args:
            label: name for messages.
            function: the function.
            inside: whether it is walked even if it is of a library.
        """
        if id(function) in self._functions or not isinstance(function, FunctionType):
            return
        self._functions[id(function)] = function
        if not inside and is_library(function.__module__):
            return
        loaded, names = _loads(function.__code__)
        if not names.isdisjoint(_SEEDS):
            self._refuse("sets the state of torch's random numbers")
        if not names.isdisjoint(_ENVIRONMENT):
            self.value("os.environ", vars(os.environ).get("_data"))
        if not is_library(function.__module__):  # these ask before checkpoints, which change no number
            self.state.asks_for_gradients |= not names.isdisjoint(_OF_GRADIENTS)
        of_module, home = function.__globals__, function.__module__
        for name in loaded:
            if name in of_module:
                variable = f"the global {name!r} of {home}"
                self._name(variable, of_module, name)
                self._read(variable, of_module[name], names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                variable = f"{name!r} around {function.__qualname__}"
                self.state.watches.append(Cell(variable, cell))
                self._read(variable, content_of(cell), names)
        for default in (function.__defaults__, function.__kwdefaults__):
            self.value(f"a default of {function.__qualname__}", default)
        if function.__dict__:
            self.value(f"attributes of {function.__qualname__}", function.__dict__)
        self._read(label, getattr(function, "__wrapped__", None), names)

    def _read(self, label: str, value: Any, names: frozenset[str]) -> None:
        if isinstance(value, ModuleType):
            self._token(label, Same(value))
            self.state.mentions.add(value.__name__)
            if value.__name__ == "numpy" and "random" in names:
                self.state.mentions.add("numpy.random")
            if not is_library(value.__name__) and id(value) not in self._walked:
                self._of_names(label, vars(value), names)
        elif isinstance(value, type):
            self._token(label, Same(value))
            for base in () if is_library(value.__module__) else value.__mro__:
                if not is_library(base.__module__):
                    self._of_names(label, vars(base), names, base)
        else:
            self.value(label, value)

    def _of_names(
        self, label: str, mapping: Mapping[str, Any], names: frozenset[str], owner: object = None
    ) -> None:
        for name in sorted(names & mapping.keys()):
            if name.startswith("__"):
                continue
            self._name(f"{label}.{name}", mapping, name, owner)
            member = mapping[name]
            if isinstance(member, ModuleType | type):
                self._token(f"{label}.{name}", Same(member))
            else:
                self._member(f"{label}.{name}", member)

    # -- values

    def value(self, label: str, value: Any) -> None:
        """Walk a value to its leaves."""
        if isinstance(value, (*_NUMBERS, *_TYPES_OF_TORCH)) and not isinstance(value, Enum):
            self._token(label, Plain(value))
            return
        if id(value) in self._model:
            self._token(label, Same(value))
            return
        if id(value) in self._walked:
            self._token(label, Same(value) if isinstance(value, (Tensor, nn.Module)) else Plain("known"))
            return
        if len(self.state.tokens) > _LARGEST:
            return
        self._walked[id(value)] = value
        for kinds, walk in _WALKS:
            if isinstance(value, kinds):
                walk(self, label, value)
                return
        self._object(label, value)

    def _tensor(self, label: str, tensor: Tensor) -> None:
        self._token(label, Same(tensor))
        if id(tensor) not in self._tensors:
            watch = Version(label, tensor)
            self.state.watches.append(watch)
            self._token(f"the content of {label}", Plain(watch._version))  # noqa: SLF001 - of this package

    def _module(self, label: str, module: nn.Module) -> None:
        self._token(label, Same(module))
        self.value(f"attributes of {label}", vars(module))

    def _dict(self, label: str, entries: dict[Any, Any]) -> None:
        if len(entries) > _LONGEST:
            self._token(label, Plain(len(entries)))
            return
        self.state.watches.append(DictEntries(label, entries))
        if isinstance(entries, OrderedDict):
            self.state.watches.append(Order(label, entries))
        keys = tuple(key if isinstance(key, _NUMBERS) else number for number, key in enumerate(entries))
        self._token(f"the keys of {label}", Plain(keys))
        for number, (key, value) in enumerate(entries.items()):
            plain = isinstance(key, (*_NUMBERS, *_TYPES_OF_TORCH))
            self.value(f"{label}[{key!r}]" if plain else f"{label}[key {number}]", value)

    def _items(self, label: str, items: Any) -> None:
        self._token(label, Plain((type(items).__name__, len(items))))
        if len(items) > _LONGEST:
            return
        if isinstance(items, (list, deque, set)):
            self.state.watches.append(Items(label, items))
        for number, item in enumerate(items):
            self.value(f"{label}[{number}]", item)

    def _callable(self, label: str, function: Any) -> None:
        if isinstance(function, FunctionType):
            self._token(label, Same(function))
            self.function(label, function)
        elif isinstance(function, LRU_CACHE):
            self._token(label, Same(function))
            self.state.caches[id(function)] = function
            self.function(label, function.__wrapped__)
        elif isinstance(function, MethodType):
            self.value(label, function.__func__)
            self.value(f"the object of {label}", function.__self__)
        else:
            self.value(label, function.func)
            self.value(f"the arguments of {label}", (function.args, function.keywords))

    def _identity(self, label: str, value: Any) -> None:
        self._token(label, Same(value))
        owner = getattr(value, "__self__", None)  # random.random is a method of a generator
        if isinstance(value, BuiltinFunctionType | MethodType) and owner is not None:
            self.state.mentions.add(type(owner).__module__)

    def _object(self, label: str, value: Any) -> None:
        kind = type(value)
        if hasattr(kind, "__next__") or kind.__module__.startswith(("random", "numpy.random")):
            self._refuse(f"reads {label}, of which each use gives another value")
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            self._array(label, value)
            return
        if is_library(kind.__module__) and not _is_config(kind):
            self._identity(label, value)
            return
        self._token(label, Same(kind))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and len(attributes) <= _LONGEST:
            self.state.watches.append(DictEntries(label, attributes))
            for name, attribute in attributes.items():
                self.value(f"{label}.{name}", attribute)
        for base in kind.__mro__ if not is_library(kind.__module__) else ():
            if is_library(base.__module__):
                continue
            if names := _slots(base):
                self.state.watches.append(Slots(label, value, names))
            for name in names:
                self.value(f"{label}.{name}", getattr(value, name, None))
            for member in vars(base).values():
                if isinstance(member, FunctionType | property):
                    self._member(f"{label}.{getattr(member, '__name__', 'property')}", member)

    def _array(self, label: str, array: Any) -> None:
        self._token(label, Same(array))
        if array.nbytes <= _BYTES and array.dtype != object:
            watch = ArrayContent(label, array)
            self.state.watches.append(watch)
            self._token(f"the content of {label}", Plain(array.tobytes()))

    # -- notes

    def _token(self, label: str, token: object) -> None:
        self.state.tokens[label] = token

    def _refuse(self, why: str) -> None:
        self.state.refused.append((self._path, why))

    def _name(self, label: str, mapping: Mapping[str, Any], name: str, owner: object = None) -> None:
        key = id(mapping) if owner is None else id(owner)
        if key not in self._names:
            self._names[key] = mapping, {}, owner
        self._names[key][1].setdefault(name, label)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _is_config(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (
        "types",
        "argparse",
        "transformers",
        "peft",
        "diffusers",
        "collections",
    )


_WALKS: tuple[tuple[Any, Callable[[Walk, str, Any], None]], ...] = (
    (Tensor, Walk._tensor),  # noqa: SLF001 - of this module
    (nn.Module, Walk._module),  # noqa: SLF001
    (dict, Walk._dict),  # noqa: SLF001
    ((list, tuple, deque, set, frozenset), Walk._items),  # noqa: SLF001
    ((FunctionType, MethodType, functools.partial, LRU_CACHE), Walk._callable),  # noqa: SLF001
    ((type, ModuleType, BuiltinFunctionType, Enum), Walk._identity),  # noqa: SLF001
)
