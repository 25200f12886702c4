"""Lists the public names with their signatures; ``python tests/public_api.py`` writes the list again."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import counterflow as cf

_PYDANTIC = ("model_config", "model_fields", "model_computed")

LIST = Path(__file__).with_name("public_api.txt")


def _call(made: Any) -> str:
    """Names, kinds and defaults of arguments: what a caller writes."""
    found = inspect.signature(made)
    shown = [
        p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in ("self", "cls")
    ]
    return str(found.replace(parameters=shown, return_annotation=found.empty))


def _members(kind: type) -> Iterator[str]:
    """What a class has of its own and from Counterflow's classes above it."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if issubclass(kind, BaseModel):
        fields = set(kind.model_fields)
    names = {n for base in kind.__mro__ if base.__module__.startswith("counterflow") for n in vars(base)}
    for name in sorted(names | fields):
        if name.startswith(("_", *_PYDANTIC)):
            continue
        member = inspect.getattr_static(kind, name, None)
        if name in fields or isinstance(member, property) or not callable(getattr(kind, name, None)):
            yield name
        else:
            yield name + _call(getattr(kind, name))


def listed(module: Any, name: str) -> Iterator[str]:
    """A public name in lines: the name with its call, and a class's members below."""
    found, full = getattr(module, name), f"{module.__name__}.{name}"
    if inspect.ismodule(found):
        for inner in getattr(found, "__all__", []):
            yield from listed(found, inner)
    elif isinstance(found, type) and issubclass(found, Enum):
        yield f"{full}: {', '.join(found.__members__)}"
    elif isinstance(found, type):
        shown = full if issubclass(found, Exception) else full + _call(found)
        yield shown
        if not issubclass(found, Exception):
            yield from (f"    .{member}" for member in _members(found))
    elif callable(found):
        yield full + _call(found)
    else:
        yield full


def text() -> str:
    """The whole list."""
    return "\n".join(line for name in sorted(cf.__all__) for line in listed(cf, name)) + "\n"


if __name__ == "__main__":
    LIST.write_text(text(), encoding="utf-8")
