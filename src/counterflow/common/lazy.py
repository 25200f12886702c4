"""Names of a package that are imported when they are first used, because they need torch or load slowly.

Invariant: importing the package imports none of them. This module imports no other room.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    >>> attributes("json", {"JSONDecoder": "decoder"})("JSONDecoder").__name__
    'JSONDecoder'

    Args:
        package: name of the package.
        homes: module within the package that defines each name; empty: the name is itself a module.
    """

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name] or name}")
        return getattr(module, name) if homes[name] else module

    return attribute
