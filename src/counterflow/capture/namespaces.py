"""Modules and classes whose attributes forwards can read, and the libraries that are not entered."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "sympy", "triton", "einops", "counterflow"),
    *("transformers", "accelerate", "peft", "trl", "diffusers", "timm", "safetensors", "tokenizers"),
}

_CONFIGS = frozenset(
    (
        *("types", "argparse", "collections", "configparser", "weakref", "_weakrefset"),
        *("transformers", "peft", "diffusers"),
    )
)


def is_library(name: Any) -> bool:
    """Tell whether a Python module, by its full name, is of a library that is not entered.

    Classes in C may have a descriptor for objects in the place of the name.
    """
    if not isinstance(name, str):
        return name is not None
    return name.partition(".")[0] in _LIBRARIES


class Namespace:
    """Names of a module or a class that were looked up.

    Args:
        owner: the module or the class.

    Attributes:
        label: name for messages.
        names: names that were looked up.
        methods: names that were looked up among the methods.
        of_any_code: whether names count that any code mentions; else those of the code that reads the owner.
        of_any_method: the same of methods.
        entered: whether all methods were walked.
    """

    __slots__ = ("entered", "label", "methods", "names", "of_any_code", "of_any_method", "owner")

    def __init__(self, owner: ModuleType | type) -> None:
        self.owner, self.label = owner, owner.__qualname__ if isinstance(owner, type) else owner.__name__
        self.names: set[str] = set()
        self.methods: set[str] = set()
        self.of_any_code = self.of_any_method = self.entered = False

    @property
    def class_or_none(self) -> type | None:
        """The owner, if it is a class."""
        return self.owner if isinstance(self.owner, type) else None

    def lacks(self, mentions: frozenset[str]) -> bool:
        """Tell whether some of the names that any code mentions were not looked up."""
        return (self.of_any_code and not mentions <= self.names) or (
            self.of_any_method and not mentions <= self.methods
        )


def of_users(kinds: Iterable[type]) -> list[type]:
    """Classes that are of no library."""
    return [kind for kind in kinds if not is_library(kind.__module__)]


def slots_of(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class."""
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def is_config(kind: type) -> bool:
    """Tell whether objects of a library's class are entered."""
    return kind is threading.local or kind.__module__.partition(".")[0] in _CONFIGS


def is_operator(name: str) -> bool:
    """Tell whether Python itself reads an attribute."""
    return name.startswith("__")
