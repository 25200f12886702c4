"""Contents of objects without attributes (memory, references, tensors): comparison and restoration.

An object that exports its memory (an array of Python or NumPy, a ``bytearray``, a ctypes value) is compared
by its bytes, a reference (``weakref``, ``contextvars``) by the object that it returns.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from counterflow.common.tensors.torch_private import without_functions
from counterflow.common.trees import version_of

from .python_state import ABSENT, Plain

_BYTES = 2**16
"""Largest memory that is compared byte by byte."""
_SAMPLES = 4096
"""Number of bytes that are compared of a larger one, in equal distances."""
_TENSOR_BYTES = 4096
"""Largest tensor whose values are compared; of larger ones torch counts the changes."""

_PLAIN = (Tensor, nn.Parameter)
_VIEWS: tuple[type, ...] = (MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))


class ContentWatch:
    """Content of an object, compared with what it was.

    Args:
        label: name for messages.
    """

    __slots__ = ("label",)

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

    def unchanged(self) -> bool:
        """Compare the content with the saved one."""
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

    __slots__ = ("_is_small", "_saved", "_tensor")

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

    def _content(self) -> tuple[int, bytes]:
        tensor = self._tensor
        with without_functions():
            octets = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if self._is_small else b""
            return version_of(tensor), octets

    @override
    def unchanged(self) -> bool:
        return self._content() == self._saved


class Buffer(ContentWatch):
    """Memory of an object that exports it.

    Args:
        label: name for messages.
        exporter: the object.
    """

    __slots__ = ("_exporter", "_saved")

    def __init__(self, label: str, exporter: Any) -> None:
        super().__init__(label)
        self._exporter = exporter
        self._saved = self._content()

    @property
    @override
    def token(self) -> object:
        length, content = self._saved
        kind = type(self._exporter)
        return Plain((kind.__module__, kind.__qualname__, length, content))

    def _content(self) -> tuple[int, bytes]:
        with memoryview(self._exporter) as memory:
            length = memory.nbytes
            if length <= _BYTES or not memory.c_contiguous:
                return length, memory.tobytes()
            with memory.cast("B") as octets, octets[:: length // _SAMPLES] as part:
                return length, part.tobytes()

    @override
    def unchanged(self) -> bool:
        return self._content() == self._saved

    @override
    def restore(self) -> None:
        length, content = self._saved
        with memoryview(self._exporter) as memory:
            if memory.readonly or not memory.c_contiguous or memory.nbytes != length != len(content):
                return
            with memory.cast("B") as octets:
                octets[:] = content


class ObjectArray(ContentWatch):
    """Objects in an array of NumPy.

    Args:
        label: name for messages.
        array: the array, of the dtype ``object``.
    """

    __slots__ = ("_array", "_saved")

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
        return len(now) == len(self._saved) and all(a is b for a, b in zip(now, self._saved, strict=True))

    @override
    def restore(self) -> None:
        for place, value in enumerate(self._saved):
            self._array.flat[place] = value


class Referent(ContentWatch):
    """Object to which a reference leads.

    Args:
        label: name for messages.
        read: returns the object.
        write: sets it; None: it cannot be set.
    """

    __slots__ = ("_read", "_saved", "_write")

    def __init__(
        self, label: str, read: Callable[[], object], write: Callable[[Any], object] | None = None
    ) -> None:
        super().__init__(label)
        self._read, self._write = read, write
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

    @override
    def restore(self) -> None:
        if self._write is not None and self._saved is not ABSENT:
            self._write(self._saved)


class ContextContent(Referent):
    """Value of a variable of ``contextvars``, which a forward may set for a while.

    Args:
        label: name for messages.
        variable: the variable.
    """

    __slots__ = ()

    def __init__(self, label: str, variable: ContextVar[Any]) -> None:
        super().__init__(label, partial(_content_of_context, variable), variable.set)


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
        return Referent(label, value)
    if isinstance(value, ContextVar):
        return ContextContent(label, value)
    if isinstance(value, _VIEWS):
        (mapping,) = gc.get_referents(value)
        return Referent(label, lambda: mapping)
    of_numpy = any(base.__module__ == "numpy" for base in type(value).__mro__)
    kind = value.dtype.kind if of_numpy and hasattr(value, "dtype") else ""
    if kind == "O":
        return ObjectArray(label, value)
    try:
        return Buffer(label, value.view("i8") if kind in ("m", "M") else value)
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
