"""Walk over the Python values that forwards can read: attributes, globals, closures, what these contain.

The functions that opened modules run are known by their classes. What a function's code loads of its globals
and its closure is read from its bytecode; functions among these are walked as well. A value that is a list, a
dict or an object of a user's class is walked to its leaves.

Data of a user's class, also of its bases and its metaclass, counts if walked code mentions its name; a class
or a module within a module is entered if the code that reads the outer one mentions its name.

Invariant: nothing is called but ``vars``, ``len``, iterators of built-in containers, and ``repr`` of numbers.
Libraries that no user changes between steps (torch, NumPy, the standard library, ...) are not entered.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .code_names import ENVIRONMENT_NAMES, GRADIENT_NAMES, SEED_NAMES, imported_modules, names_in
from .contents import Contents, ContentWatch, Version, content_watch
from .namespaces import Namespace, is_config, is_library, is_operator, of_users, slots_of
from .python_state import (
    ABSENT,
    AbsentNames,
    Cell,
    DictEntries,
    FunctionParts,
    Items,
    Names,
    Order,
    Plain,
    PythonState,
    Same,
    Slots,
    content_of,
)

LRU_CACHE = type(functools.lru_cache(lambda: None))

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_METHODS = (FunctionType, property, staticmethod, classmethod, functools.cached_property)
_TYPES_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_LARGEST = 50_000
"""Largest number of values of a state; further ones are not looked at."""
_LONGEST = 10_000
"""Largest number of entries of a container that is walked; of a larger one only the length is compared."""


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
        self._walked: dict[int, tuple[int, object]] = {}
        self._contents, self._attribute = Contents(), ""
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, str], object]] = {}
        self._functions: dict[int, object] = {}
        self._mentions: set[str] = set()
        self._namespaces: dict[int, Namespace] = {}
        self._reads: set[tuple[int, frozenset[str]]] = set()
        self._repetitions: dict[str, int] = {}
        self._path = ""

    def done(self) -> PythonState:
        """State of all that was walked."""
        while self._look_up_mentions():
            pass
        for content in self._contents.mentioned():
            self._content(content)
        self.state.watches += [
            AbsentNames(space.label, space.owner, space.names) for space in self._namespaces.values()
        ]
        self.state.watches += [Names(*entry) for entry in self._names.values()]
        self.state.watches.append(self._contents.classes())
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
                if table is members["_modules"]:
                    self._token(label, Same(table[name]))
                    self._note_class(type(table[name]))
                else:
                    self.weights[label] = Same(table[name])
            else:
                self._of_class(label, type(module), name)

    def members(self, label: str, owner: object, names: Iterable[str]) -> None:
        """Walk some attributes of an object, and the functions of its class that these are."""
        attributes = vars(owner)
        self._class_of(label, owner)
        self._note_class(type(owner), methods=True)
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
        self._class_of(path, module)
        self._note_class(type(module), methods=True)
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
        loaded, names = names_in(function.__code__)
        self._mentions.update(names)
        self._contents.add_code(function.__name__, names)
        if not names.isdisjoint(SEED_NAMES):
            self._refuse("sets the state of torch's random numbers")
        if not names.isdisjoint(ENVIRONMENT_NAMES):
            self.value("os.environ", vars(os.environ).get("_data"))
        if not is_library(function.__module__):
            self._function_of_user(label, function, names)
        of_module, home = function.__globals__, function.__module__
        for name in loaded:
            if name in of_module:
                variable = f"the global {name!r} of {home}"
                new = self._name(variable, of_module, name)
                self._read(variable, of_module[name], names, new=new)
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

    def _function_of_user(self, label: str, function: FunctionType, names: frozenset[str]) -> None:
        # Libraries ask for gradients before checkpoints, which change no number.
        self.state.asks_for_gradients |= not names.isdisjoint(GRADIENT_NAMES)
        self.state.watches += FunctionParts(label, function), DictEntries(label, function.__dict__)
        self._token(f"the code of {label}", Same(function.__code__))
        for module in imported_modules(function):
            self._read(f"the module {module.__name__}", module, names)

    def _read(self, label: str, value: Any, names: frozenset[str], *, new: bool = True) -> None:
        if not isinstance(value, ModuleType | type):
            if new:
                self.value(label, value)
            return
        if new:
            self._token(label, Same(value))
        if (id(value), names) in self._reads:
            return
        self._reads.add((id(value), names))
        if isinstance(value, ModuleType):
            self.state.mentions.add(value.__name__)
            if value.__name__ == "numpy" and "random" in names:
                self.state.mentions.add("numpy.random")
            if not is_library(value.__name__):
                self._look_up(self._namespace(value), names, methods=True, inner_names=names)
        else:
            self._note_class(value)
            operators = () if issubclass(value, nn.Module) else tuple(filter(is_operator, dir(value)))
            for base in of_users(value.__mro__):
                self._look_up(self._namespace(base), names.union(operators), methods=True, inner_names=names)

    # -- modules and classes, of which mentioned names are read

    def _namespace(self, owner: ModuleType | type) -> Namespace:
        if id(owner) not in self._namespaces:
            self._namespaces[id(owner)] = Namespace(owner)
        return self._namespaces[id(owner)]

    def _note_class(self, kind: type, *, methods: bool = False) -> None:
        for base in of_users([*kind.__mro__, *type.mro(type(kind))]):
            space = self._namespace(base)
            space.of_any_code, space.of_any_method = True, space.of_any_method or methods

    def _look_up_mentions(self) -> bool:
        """Look up what all walked code mentions, and tell whether anything was left."""
        mentions = frozenset(self._mentions)
        spaces = [space for space in self._namespaces.values() if space.lacks(mentions)]
        for space in spaces:
            self._look_up(space, mentions, methods=space.of_any_method)
        return bool(spaces)

    def _look_up(
        self,
        space: Namespace,
        names: frozenset[str],
        *,
        methods: bool,
        inner_names: frozenset[str] | None = None,
    ) -> None:
        """Walk attributes of a module or a class, and ``inner_names`` of modules and classes among them."""
        further = names - space.names
        further_methods = names - space.methods if methods else frozenset()
        space.names |= further
        space.methods |= further_methods
        mapping = vars(space.owner)
        for name in sorted(mapping.keys() & names):
            value, label = mapping[name], f"{space.label}.{name}"
            counts = name in (further_methods if isinstance(value, _METHODS) else further)
            inner = inner_names is not None and isinstance(value, ModuleType | type)
            called = inner_names is not None and isinstance(value, FunctionType)
            if (is_operator(name) and not called) or not (counts or inner):
                continue
            new = self._name(label, mapping, name, space.class_or_none)
            if inner:
                self._read(label, value, inner_names or frozenset(), new=new)
            elif new:
                self._member(label, value)

    def _methods(self, kind: type) -> None:
        """Walk all methods of the classes of an object, and the numbers and texts of these classes."""
        self._note_class(kind)
        outer, self._contents.of_object = self._contents.of_object, True
        for base in of_users(kind.__mro__):
            space = self._namespace(base)
            if space.entered:
                continue
            space.entered = True
            for name, value in vars(base).items():
                number = isinstance(value, _NUMBERS) and not is_operator(name)
                label = f"{space.label}.{name}"
                if (number or isinstance(value, _METHODS)) and self._name(label, vars(base), name, base):
                    self._member(label, value)
        self._contents.of_object = outer

    def value(self, label: str, value: Any) -> None:
        """Walk a value to its leaves."""
        if isinstance(value, (*_NUMBERS, *_TYPES_OF_TORCH)) and not isinstance(value, Enum):
            self._token(label, Plain(value))
            return
        if id(value) in self._model:
            self._token(label, Same(value))
            return
        if id(value) in self._walked:
            alone = isinstance(value, (Tensor, nn.Module, FunctionType))
            self._token(label, Same(value) if alone else Plain(("known", self._walked[id(value)][0])))
            return
        if len(self.state.tokens) > _LARGEST:
            return
        self._walked[id(value)] = len(self._walked), value
        walk = next((walk for kinds, walk in _WALKS if isinstance(value, kinds)), Walk._object)
        walk(self, label, value)
        if isinstance(value, _CONTAINERS) and not is_library(type(value).__module__):
            self._attributes(label, value)

    def _tensor(self, label: str, tensor: Tensor) -> None:
        self._token(label, Same(tensor))
        if id(tensor) not in self._tensors:
            self._content(Version(label, tensor))

    def _module(self, label: str, module: nn.Module) -> None:
        self._token(label, Same(module))
        self._class_of(label, module)
        self.value(f"attributes of {label}", vars(module))
        self._methods(type(module))

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
        if isinstance(value, type):
            self._note_class(value)
        elif isinstance(value, ModuleType) and not is_library(value.__name__):
            space = self._namespace(value)
            space.of_any_code = space.of_any_method = True
        elif isinstance(value, Enum):
            self._methods(type(value))
        owner = getattr(value, "__self__", None)  # random.random is a method of a generator
        if isinstance(value, BuiltinFunctionType | MethodType) and owner is not None:
            self.state.mentions.add(type(owner).__module__)

    def _object(self, label: str, value: Any) -> None:
        kind = type(value)
        if hasattr(kind, "__next__") or kind.__module__.startswith(("random", "numpy.random")):
            self._refuse(f"reads {label}, of which each use gives another value")
        watch = content_watch(label, value)
        if watch is not None and not self._contents.defer(self._attribute, watch):
            self._content(watch)
        enters = is_config(kind) if watch is None else kind.__module__.startswith("numpy.")
        if enters or not is_library(kind.__module__):
            self._token(label, Same(kind))
            self._attributes(label, value)
        elif watch is None:
            self._identity(label, value)

    def _attributes(self, label: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and len(attributes) <= _LONGEST:
            self.state.watches.append(DictEntries(label, attributes))
            outer = self._attribute
            for self._attribute, attribute in attributes.items():
                self.value(f"{label}.{self._attribute}", attribute)
            self._attribute = outer
        for base in of_users(type(value).__mro__):
            if names := slots_of(base):
                self.state.watches.append(Slots(label, value, names))
            for name in names:
                self.value(f"{label}.{name}", getattr(value, name, None))
        self._class_of(label, value)
        self._methods(type(value))

    def _content(self, watch: ContentWatch) -> None:
        self.state.watches.append(watch)
        self._token(f"the content of {watch.label}", watch.token)
        for name, value in watch.values.items():
            self.value(name, value)

    def _class_of(self, label: str, value: object) -> None:
        self._contents.add_class(label, value)
        self._token(f"the class of {label}", Same(type(value)))

    def _token(self, label: str, token: object) -> None:
        if label in self.state.tokens:  # two closures of one function have the same names
            number = self._repetitions[label] = self._repetitions.get(label, 1) + 1
            label = f"{label} ({number})"
        self.state.tokens[label] = token

    def _refuse(self, why: str) -> None:
        self.state.refused.append((self._path, why))

    def _name(self, label: str, mapping: Mapping[str, Any], name: str, owner: object = None) -> bool:
        """Note a name of a mapping, and tell whether it is new."""
        key = id(mapping) if owner is None else id(owner)
        if key not in self._names:
            self._names[key] = mapping, {}, owner
        return self._names[key][1].setdefault(name, label) is label


_WALKS: tuple[tuple[Any, Callable[[Walk, str, Any], None]], ...] = (
    (Tensor, Walk._tensor),  # noqa: SLF001 - of this module
    (nn.Module, Walk._module),  # noqa: SLF001
    (dict, Walk._dict),  # noqa: SLF001
    ((list, tuple, deque, set, frozenset), Walk._items),  # noqa: SLF001
    ((FunctionType, MethodType, functools.partial, LRU_CACHE), Walk._callable),  # noqa: SLF001
    ((type, ModuleType, BuiltinFunctionType, Enum), Walk._identity),  # noqa: SLF001
)
