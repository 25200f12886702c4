"""Python values that a forward can read beside its tensors, their fast comparison, and their restoration.

A ``PythonState`` is the result of a walk (``walk``): every value by its name, and the containers in which
they are. To compare the objects of a container takes nanoseconds an entry; values are compared only if
objects differ.

Invariant: a state keeps all objects that it names alive, so identities stay theirs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol

from torch import nn

ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "absent"})()
"""Value of a name that does not exist."""


class Same:
    """An object that equals only itself."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, obj: object) -> bool:
        return isinstance(obj, Same) and self.value is obj.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"another {type(self.value).__name__}"


class Plain:
    """A number or a text, which equals one of the same type and value."""

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.value = repr(value) if isinstance(value, (float, complex)) else value  # nan is nan, 0.0 not -0.0

    def __eq__(self, obj: object) -> bool:
        return isinstance(obj, Plain) and self.kind is obj.kind and bool(self.value == obj.value)

    def __hash__(self) -> int:
        return hash((self.kind, self.value))

    def __repr__(self) -> str:
        return str(self.value) if self.kind in (float, complex) else repr(self.value)


class WatchedContainer(Protocol):
    """A container whose entries are compared and restored."""

    @property
    def label(self) -> str:
        """Name for messages."""

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""

    def restore(self) -> None:
        """Put the saved entries back."""


class Names:
    """Some names of a mapping: globals of a module, attributes of an object or a class.

    Args:
        mapping: the mapping.
        labels: by name, the name for messages.
        owner: class whose attributes the mapping has; None: names are set in the mapping.
    """

    __slots__ = ("_get", "_labels", "_names", "_owner", "_values", "mapping")

    def __init__(self, mapping: Mapping[str, Any], labels: Mapping[str, str], owner: object = None) -> None:
        self.mapping, self._labels, self._owner = mapping, labels, owner
        self._get = mapping.get
        self._names = tuple(labels)
        self._values = tuple(map(self._get, self._names, repeat(ABSENT)))

    @property
    def label(self) -> str:
        """The first name with another value, for messages."""
        pairs = zip(self._names, self._values, strict=True)
        return next((self._labels[n] for n, v in pairs if self._get(n, ABSENT) is not v), "")

    def saved(self) -> Iterator[tuple[str, Any]]:
        """Names and their saved values."""
        return zip(self._names, self._values, strict=True)

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""
        return all(map(is_, map(self._get, self._names, repeat(ABSENT)), self._values))

    def restore(self) -> None:
        """Put the saved entries back."""
        for name, value in zip(self._names, self._values, strict=True):
            now = self._get(name, ABSENT)
            if now is value:
                continue
            if self._owner is not None:
                delattr(self._owner, name) if value is ABSENT else setattr(self._owner, name, value)
            elif value is ABSENT:
                del self.mapping[name]  # type: ignore[attr-defined]
            else:
                self.mapping[name] = value  # type: ignore[index]


class AbsentNames:
    """Names that a module or a class does not have, but that code would read.

    Args:
        label: name of the owner, for messages.
        owner: the module or the class.
        names: names that code mentions.
    """

    __slots__ = ("_keys", "_label", "_names", "_owner")

    def __init__(self, label: str, owner: ModuleType | type, names: Collection[str]) -> None:
        self._label, self._owner, self._keys = label, owner, vars(owner).keys()
        self._names = frozenset(names) - self._keys

    @property
    def label(self) -> str:
        """The first name that exists, for messages."""
        return f"{self._label}.{min(self._keys & self._names, default='')}"

    def unchanged(self) -> bool:
        """Tell whether none of the names exists."""
        return self._keys.isdisjoint(self._names)

    def restore(self) -> None:
        """Remove the names."""
        for name in self._keys & self._names:
            delattr(self._owner, name)


class FunctionParts:
    """Code and defaults of a function, which its attributes replace.

    Args:
        label: name for messages.
        function: the function.
    """

    __slots__ = ("function", "label", "values")

    NAMES = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, label: str, function: FunctionType) -> None:
        self.label, self.function = label, function
        self.values = self._current()

    def _current(self) -> tuple[Any, ...]:
        return tuple([getattr(self.function, name) for name in self.NAMES])

    def unchanged(self) -> bool:
        """Compare the parts with the saved ones, by identity."""
        return all(map(is_, self._current(), self.values))

    def restore(self) -> None:
        """Put the saved parts back."""
        for name, value in zip(self.NAMES, self.values, strict=True):
            if getattr(self.function, name) is not value:
                setattr(self.function, name, value)


class DictEntries:
    """All entries of a dict."""

    __slots__ = ("entries", "keys", "label", "values")

    def __init__(self, label: str, entries: dict[Any, Any]) -> None:
        self.label, self.entries = label, entries
        self.keys, self.values = tuple(entries), tuple(dict.values(entries))

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""
        now = self.entries
        return (
            len(now) == len(self.keys)
            and all(map(is_, dict.values(now), self.values))
            and all(map(is_, now, self.keys))
        )

    def added(self) -> list[Any]:
        """Values of new keys, if all others are as before; else none."""
        now = self.entries
        if len(now) <= len(self.keys) or any(
            now.get(key, ABSENT) is not value for key, value in zip(self.keys, self.values, strict=True)
        ):
            return []
        return [value for key, value in now.items() if key not in set(self.keys)]

    def restore(self) -> None:
        """Put the saved entries back."""
        self.entries.clear()
        self.entries.update(zip(self.keys, self.values, strict=True))


class Items:
    """All items of a list, a deque or a set."""

    __slots__ = ("items", "label", "values")

    def __init__(self, label: str, items: list[Any] | deque[Any] | set[Any]) -> None:
        self.label, self.items = label, items
        self.values = tuple(items)

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""
        return len(self.items) == len(self.values) and all(map(is_, self.items, self.values))

    def restore(self) -> None:
        """Put the saved entries back."""
        self.items.clear()
        add: Callable[[Any], None] = getattr(self.items, "append", None) or self.items.add  # type: ignore[union-attr]
        for value in self.values:
            add(value)


class Order:
    """Order of the keys of an ``OrderedDict``, which its dict does not show."""

    __slots__ = ("_keys", "_ordered", "label")

    def __init__(self, label: str, ordered: OrderedDict[Any, Any]) -> None:
        self.label, self._ordered, self._keys = label, ordered, tuple(ordered)

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""
        return all(map(is_, self._ordered, self._keys))

    def restore(self) -> None:
        """Put the saved entries back."""
        for key in self._keys:
            self._ordered.move_to_end(key)


class Slots:
    """Attributes of an object that has no dict."""

    __slots__ = ("_names", "_object", "_values", "label")

    def __init__(self, label: str, instance: object, names: tuple[str, ...]) -> None:
        self.label, self._object, self._names = label, instance, names
        self._values = tuple(getattr(instance, name, ABSENT) for name in names)

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""
        now = (getattr(self._object, name, ABSENT) for name in self._names)
        return all(map(is_, now, self._values))

    def restore(self) -> None:
        """Put the saved entries back."""
        for name, value in zip(self._names, self._values, strict=True):
            if value is not ABSENT and getattr(self._object, name, ABSENT) is not value:
                setattr(self._object, name, value)


class ParameterAttribute:
    """An attribute of the parameters.

    Args:
        parameters: the parameters.
        name: name of the attribute.
    """

    __slots__ = ("_parameters", "_read", "_values", "label")

    def __init__(self, parameters: Sequence[nn.Parameter], name: str) -> None:
        self.label, self._parameters = f"{name} of a parameter", tuple(parameters)
        self._read = attrgetter(name)
        self._values = self.values()

    def values(self) -> tuple[object, ...]:
        """Value of each parameter."""
        return tuple(map(self._read, self._parameters))

    def unchanged(self) -> bool:
        """Compare the values with the saved ones."""
        return self.values() == self._values

    def restore(self) -> None:
        """Leave the values as they are."""


class Cell:
    """A variable of a closure."""

    __slots__ = ("_cell", "_value", "label")

    def __init__(self, label: str, cell: CellType) -> None:
        self.label, self._cell = label, cell
        self._value = content_of(cell)

    def unchanged(self) -> bool:
        """Compare the entries with the saved ones, by identity."""
        return content_of(self._cell) is self._value

    def restore(self) -> None:
        """Put the saved entries back."""
        if self._value is ABSENT:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = self._value


class Unknown:
    """Values that were not looked at, so they always have to be compared."""

    label = "values that were not looked at"

    def unchanged(self) -> bool:
        """Say that they may differ."""
        return False

    def restore(self) -> None:
        """Leave them as they are."""


def content_of(cell: CellType) -> Any:
    """Value of a closure's variable; ``ABSENT``: it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


@dataclass(slots=True)
class PythonState:
    """Values by name, and the containers in which they are.

    Attributes:
        tokens: by name, what stands for the value: two states are equal if these are.
        watches: the containers.
        refused: reads that no record can have: path of the module that reads, and what it does.
        mentions: names of the Python modules that the walked functions mention.
        caches: functions with a cache of ``functools``, by identity.
        asks_for_gradients: whether a function asks if gradients are recorded.
    """

    tokens: dict[str, object] = field(default_factory=dict)
    watches: list[WatchedContainer] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    mentions: set[str] = field(default_factory=set)
    caches: dict[int, Any] = field(default_factory=dict)
    asks_for_gradients: bool = False

    def unchanged(self) -> bool:
        """Compare all containers with the saved entries, by identity."""
        return all(watch.unchanged() for watch in self.watches)

    def changed(self) -> list[WatchedContainer]:
        """Containers whose entries are other objects than the saved ones."""
        return [watch for watch in self.watches if not watch.unchanged()]

    def differences(self, state: PythonState) -> list[str]:
        """Names whose values differ from those of another state."""
        names = [*self.tokens, *(name for name in state.tokens if name not in self.tokens)]
        return [n for n in names if self.tokens.get(n, ABSENT) != state.tokens.get(n, ABSENT)]
