"""Contents of objects without attributes (memory, references, tensors): comparison and restoration.

An object that exports its memory (an array of Python or NumPy, a ``bytearray``, a ctypes value) is compared
by its bytes, a reference (``weakref``, ``contextvars``) by the object that it returns.
"""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from counterflow.common.tensors.torch_private import without_functions
from counterflow.common.trees import version_of

from .call_arguments import PLAIN
from .python_state import ABSENT, Plain, Same

_BYTES = 2**16
"""Largest memory that is compared byte by byte."""
_SAMPLES = 4096
"""Number of bytes that are compared of a larger one, in equal distances."""
_OBJECTS = 10_000
"""Largest array of objects that is looked at."""
_TENSOR_BYTES = 4096
"""Largest tensor whose values are compared; of larger ones torch counts the changes."""

_CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__init_subclass__"}
_PLAIN = (Tensor, nn.Parameter)
_VIEWS: tuple[type, ...] = (MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))


class ContentWatch:
    """Content of an object, compared with what it was.

    Args:
        label: name for messages.
    """

    __slots__ = ("_saved", "label")
    _saved: Any

    def __init__(self, label: str) -> None:
        self.label = label

    @property
    def token(self) -> object:
        """Value that represents the content, but for ``values``."""
        raise NotImplementedError

    @property
    def values(self) -> Mapping[str, object]:
        """Objects in it, by their names."""
        return {}

    @property
    def is_small(self) -> bool:
        """True if it is watched wherever it is; otherwise only where code mentions its name."""
        return True

    def unchanged(self) -> bool:
        """Compare the content with the saved one."""
        return bool(self._content() == self._saved)

    def _content(self) -> object:
        raise NotImplementedError

    def restore(self) -> None:
        """Put the saved content back, if this is possible."""


class Version(ContentWatch):
    """Content of a tensor that is no weight; it cannot be restored.

    Torch counts changes, but not those by ``tensor.data`` or by an array that shares the memory, so the
    memory of small tensors is compared as well. It is read without torch, whose modes may be on.

    Args:
        label: name for messages.
        tensor: the tensor.
    """

    __slots__ = ("_is_small", "_tensor")

    def __init__(self, label: str, tensor: Tensor) -> None:
        super().__init__(label)
        self._tensor = tensor
        with without_functions():
            self._is_small = (
                type(tensor) in _PLAIN
                and tensor.layout is torch.strided
                and tensor.device.type == "cpu"
                and tensor.is_contiguous()
                and 0 < tensor.nbytes <= _TENSOR_BYTES
            )
        self._saved = self._content()

    @property
    @override
    def token(self) -> object:
        return Plain(self._saved)

    @override
    def _content(self) -> tuple[int, bytes]:
        tensor = self._tensor
        with without_functions():
            octets = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if self._is_small else b""
            return version_of(tensor), octets


class Buffer(ContentWatch):
    """Memory of an object that exports it.

    Of more than 64 KiB some thousand bytes are compared, at all places within its items.

    Args:
        label: name for messages.
        exporter: the object.
        owner: object of the user's, of which it is a view.

    Raises:
        TypeError: the object exports no memory.
        ValueError: the memory is large and has gaps, or the object cannot export it now.
    """

    __slots__ = ("_exporter", "_owner")

    def __init__(self, label: str, exporter: Any, owner: object) -> None:
        super().__init__(label)
        self._exporter, self._owner = exporter, owner
        self._saved = self._content()

    @property
    @override
    def token(self) -> object:
        length, form, content = self._saved
        kind = type(self._owner)
        owner = None if length == len(content) else Same(self._owner)
        return Plain((kind.__module__, kind.__qualname__, length, form)), owner, Plain(content)

    @property
    @override
    def is_small(self) -> bool:
        kind = type(self._owner)
        return self._saved[0] <= _TENSOR_BYTES and kind.__module__ != "multiprocessing.sharedctypes"

    @override
    def _content(self) -> tuple[int, object, bytes]:
        with memoryview(self._exporter) as memory:
            length, form = memory.nbytes, (memory.format, memory.shape)
            if length <= _BYTES:
                return length, form, memory.tobytes()
            step = length // _SAMPLES
            while math.gcd(step, memory.itemsize) != 1:
                step += 1
            if memory.c_contiguous:
                with memory.cast("B") as octets, octets[::step] as part:
                    return length, form, part.tobytes()
        if not hasattr(self._exporter, "flat"):
            raise ValueError("large memory with gaps")
        items = self._exporter.flat[:: self._exporter.size // _SAMPLES]
        return length, form, bytes(items.tobytes())

    @override
    def restore(self) -> None:
        length, _, content = self._saved
        with memoryview(self._exporter) as memory:
            if memory.readonly or not memory.c_contiguous or not memory.nbytes == length == len(content):
                return
            with memory.cast("B") as octets:
                octets[:] = content


class ObjectArray(ContentWatch):
    """Objects in an array of NumPy.

    Args:
        label: name for messages.
        array: the array, of the dtype ``object``.
    """

    __slots__ = ("_array",)

    def __init__(self, label: str, array: Any) -> None:
        super().__init__(label)
        self._array = array
        self._saved = tuple(array.flat)

    @property
    @override
    def token(self) -> object:
        return Plain(tuple(self._array.shape))

    @property
    @override
    def values(self) -> Mapping[str, object]:
        return {f"{self.label}[{place}]": value for place, value in enumerate(self._saved)}

    @override
    def unchanged(self) -> bool:
        now = tuple(self._array.flat)
        return len(now) == len(self._saved) and all(map(is_, now, self._saved))

    @override
    def restore(self) -> None:
        for place, value in enumerate(self._saved):
            self._array.flat[place] = value


class Result(ContentWatch):
    """Object that a function without arguments returns.

    Args:
        label: name for messages.
        read: the function.
    """

    __slots__ = ("_read",)

    def __init__(self, label: str, read: Callable[[], object]) -> None:
        super().__init__(label)
        self._read = read
        self._saved = read()

    @property
    @override
    def token(self) -> object:
        return Plain("a reference")

    @property
    @override
    def values(self) -> Mapping[str, object]:
        return {f"what {self.label} refers to": self._saved}

    @override
    def unchanged(self) -> bool:
        return self._read() is self._saved


class ContextContent(Result):
    """Value of a variable of ``contextvars``, which a forward may set for a while.

    Args:
        label: name for messages.
        variable: the variable.
    """

    __slots__ = ("_variable",)

    def __init__(self, label: str, variable: ContextVar[Any]) -> None:
        super().__init__(label, partial(_content_of_context, variable))
        self._variable = variable

    def current(self) -> object:
        """Return the value of now."""
        return self._read()

    @override
    def restore(self) -> None:
        if self._saved is not ABSENT:
            self._variable.set(self._saved)


class WeakContent(ContentWatch):
    """Object of a weak reference with its plain attributes, which is not kept alive.

    Args:
        label: name for messages.
        reference: the reference.
    """

    __slots__ = ("_reference",)

    def __init__(self, label: str, reference: weakref.ref[Any]) -> None:
        super().__init__(label)
        self._reference = reference
        self._saved = self._content()

    @property
    @override
    def token(self) -> object:
        _, kind, attributes = self._saved
        return Plain((kind, tuple((name, text) for name, text, _ in attributes)))  # the same on all workers

    @override
    def _content(self) -> tuple[int, str, list[tuple[str, str, int]]]:
        referent = self._reference()
        if referent is None:
            return 0, "", []
        attributes = getattr(referent, "__dict__", None)
        entries = attributes.items() if isinstance(attributes, dict) else ()
        described = [
            (name, repr(value), 0)
            if isinstance(value, PLAIN)
            else (name, type(value).__qualname__, id(value))
            for name, value in entries
        ]
        return id(referent), type(referent).__qualname__, described


class Classes:
    """Classes of objects, which ``__class__`` replaces.

    Args:
        objects: objects with their names for messages.
    """

    __slots__ = ("_kinds", "_labels", "_objects")

    def __init__(self, objects: Sequence[tuple[str, object]]) -> None:
        self._labels, self._objects = [label for label, _ in objects], [value for _, value in objects]
        self._kinds = [*map(type, self._objects)]

    @property
    def label(self) -> str:
        """The first object with another class, for messages."""
        pairs = zip(self._labels, self._objects, self._kinds, strict=True)
        return next((f"the class of {n}" for n, value, kind in pairs if type(value) is not kind), "")

    def unchanged(self) -> bool:
        """Compare the classes with the saved ones."""
        return [*map(type, self._objects)] == self._kinds

    def restore(self) -> None:
        """Put the saved classes back."""
        for value, kind in zip(self._objects, self._kinds, strict=True):
            if type(value) is not kind:
                value.__class__ = kind


class Contents:
    """Contents and classes of the objects of a walk."""

    def __init__(self) -> None:
        self._classes: list[tuple[str, object]] = []
        self._unread: list[tuple[str, ContentWatch]] = []
        self._called: set[str] = set()
        self._methods: list[tuple[str, frozenset[str]]] = []
        self.of_object = False
        """True while all methods of an object are walked, of which only some are called."""

    def add_code(self, name: str, names: frozenset[str]) -> None:
        """Add a function.

        Args:
            name: name of the function.
            names: names that its code mentions.
        """
        if self.of_object:
            self._methods.append((name, names))
        else:
            self._called |= names

    def add_class(self, label: str, value: object) -> None:
        """Add an object whose class is watched."""
        self._classes.append((label, value))

    def defer(self, attribute: str, watch: ContentWatch) -> bool:
        """Keep the watch of an attribute's content that counts if code that is called mentions the attribute.

        Args:
            attribute: name of the attribute; empty: the content counts in any case.
            watch: the watch.

        Returns:
            False if the content counts in any case.
        """
        if attribute and not watch.is_small:
            self._unread.append((attribute, watch))
        return bool(attribute) and not watch.is_small

    def mentioned(self) -> list[ContentWatch]:
        """Return the deferred watches of attributes that code mentions; a method is called by its name."""
        names, methods = set(self._called), self._methods
        while self._unread:
            called = (more for name, more in methods if name in names or _is_called_unnamed(name))
            further = set().union(*called) - names
            if not further:
                break
            names |= further
        return [watch for attribute, watch in self._unread if attribute in names]

    def classes(self) -> Classes:
        """Return the watch of all classes."""
        return Classes(self._classes)


def _is_called_unnamed(function: str) -> bool:
    # Operators, lambdas, and what a call of a module runs; a constructor makes another object.
    return function == "forward" or (function.startswith(("__", "<")) and function not in _CONSTRUCTORS)


def _content_of_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return ABSENT


def content_watch(label: str, value: Any) -> ContentWatch | None:
    """Return the watch of an object's content; None: none is known.

    Args:
        label: name for messages.
        value: the object.
    """
    if isinstance(value, weakref.ref):
        return WeakContent(label, value)
    if isinstance(value, ContextVar):
        return ContextContent(label, value)
    if isinstance(value, threading.Event):
        return Result(label, value.is_set)
    if isinstance(value, _VIEWS):
        (mapping,) = gc.get_referents(value)
        return Result(label, lambda: mapping)
    try:
        return _buffer_watch(label, value)
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None


def _buffer_watch(label: str, value: Any) -> ContentWatch | None:
    kind = type(value)
    if getattr(kind, "__module__", None) == "multiprocessing.sharedctypes":
        return Buffer(label, value.get_obj(), value)
    array = next((b for b in kind.__mro__ if b.__module__ == "numpy" and b.__name__ == "ndarray"), None)
    if array is None:
        return Buffer(label, value, value)
    plain: Any = array.view(value, array)  # type: ignore[attr-defined] # a subclass may have its own methods
    if plain.dtype.hasobject:
        return ObjectArray(label, plain) if plain.dtype.kind == "O" and plain.size <= _OBJECTS else None
    if plain.dtype.kind in ("m", "M"):
        plain = plain.view("i8")
    return Buffer(label, plain.T if plain.flags.f_contiguous else plain, value)
