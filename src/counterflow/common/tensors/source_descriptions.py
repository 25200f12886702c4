"""Descriptions of functions, classes and modules that are equal in every process that has the same ones.

Workers compare them: code objects (without lines, comments and paths), the constants and functions that they
read, and the attributes of modules. Values that may differ by worker are omitted: counters, devices, paths,
and tensors.

Invariant: none of the user's code runs, and nothing is imported.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_MOST_FUNCTIONS: Final = 2000
"""Maximum number of functions and classes of one digest."""

OF_WORKERS: Final = re.compile(
    r"(?:^|_)(?:device|host|hostname|id|local|pid|port|rank|seed|time|worker|world)(?:_|$)", re.IGNORECASE
)
"""Names of values that may differ by worker."""

_ROOMS: Final = ("capture", "models", "program", "runtime", "schedule")
"""Rooms of Counterflow whose source is compared: what workers execute."""


def versions() -> dict[str, object]:
    """Versions of Python, torch and Counterflow on this worker, and a digest of Counterflow's source."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "counterflow": f"{_package().__version__} (source {own_source()})",
    }


def _package() -> ModuleType:
    return sys.modules[__name__.partition(".")[0]]  # which its rooms may not import


@cache
def own_source() -> str:
    """Digest of the source that workers execute; empty if it cannot be read."""
    root = Path(str(_package().__file__)).parent
    digest = hashlib.blake2b(digest_size=4)
    try:
        for room in _ROOMS:
            for path in sorted((root / room).rglob("*.py")):
                digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def described(value: object) -> str | None:
    """Description of a value that is equal on all workers; None if it may differ.

    >>> described(0.1), described("tanh"), described("cuda:1"), described(partial(sorted, reverse=True))
    ('0.1', "'tanh'", None, 'partial(builtins.sorted, reverse=True)')
    """
    match value:
        case Enum():
            return str(value)
        case bool() | int() | float() | complex() | None | torch.dtype():
            return repr(value)
        case str():
            return None if re.search(r"[\d/\\:]", value) else repr(value)
        case tuple() | list():
            parts = [described(item) for item in value]
            return None if None in parts else f"({', '.join(map(str, parts))})"
        case Tensor():
            return described(value.item()) if value.numel() == 1 and not value.is_meta else None
    return _described_callable(value) if callable(value) else None


def _described_callable(value: Any) -> str | None:
    if isinstance(value, partial):
        arguments = [described(argument) for argument in value.args]
        arguments += [f"{name}={described(argument)}" for name, argument in sorted(value.keywords.items())]
        return f"partial({', '.join([str(described(value.func)), *map(str, arguments)])})"
    if isinstance(value, nn.Module):
        parts = hashlib.blake2b(repr(details_of(value)).encode(), digest_size=4).hexdigest()
        return f"{source_of_name(type(value))} (parts {parts})"
    if isinstance(value, type | FunctionType | MethodType):
        return source_of_name(value)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # built in
        return f"{value.__module__}.{name}" if getattr(value, "__module__", None) else name
    return source_of_name(type(value))


def details_of(module: nn.Module) -> dict[str, str]:
    """Descriptions of a module's parts that are equal on all workers, by name of the part and attribute.

    Args:
        module: the module; its weights count by their shapes, and by whether they are trained.
    """
    details: dict[str, str] = {}
    for place, part in module.named_modules():
        kind, prefix = type(part), f"{place}." if place else ""
        details[place] = source_of_name(kind)
        torch_s = kind.__module__.partition(".")[0] == "torch"
        for name, value in vars(part).items():
            if name.startswith("_") or OF_WORKERS.search(name):
                continue
            counts = isinstance(value, int) and not (torch_s or name == "training")
            is_plain = isinstance(value, bool | int | float | str) or (
                callable(value) and not isinstance(value, nn.Module | Tensor)
            )
            if is_plain and not counts:
                text = described(value)
                if text is not None:
                    details[prefix + name] = text
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, nn.parameter.UninitializedParameter):
                trained = "" if parameter.requires_grad else ", frozen"
                details[prefix + name] = f"{tuple(parameter.shape)}{trained}"
    return details


def source_of_name(value: type | FunctionType | MethodType) -> str:
    """Name of a class or function, with the version of an installed package, else the digest of its code."""
    if isinstance(value, MethodType):
        return (
            source_of_name(value.__func__) if isinstance(value.__func__, FunctionType) else value.__qualname__
        )
    name = f"{value.__module__}.{value.__qualname__}".replace("__mp_main__", "__main__")
    package = value.__module__.partition(".")[0]
    if package in {"torch", "builtins"}:
        return name
    if _is_installed(package):
        return f"{name} ({package} {getattr(sys.modules[package], '__version__', '')})".replace(" )", ")")
    if value not in _sources:
        _sources[value] = _source_of(value)
    return f"{name} (source {_sources[value]})"


@cache
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


_sources: WeakKeyDictionary[type | FunctionType, str] = WeakKeyDictionary()


def _source_of(value: type | FunctionType) -> str:
    digest = hashlib.blake2b(digest_size=4)
    package = value.__module__.partition(".")[0]
    queue: list[Any] = [value]
    seen: set[int] = set()
    while queue and len(seen) < _MOST_FUNCTIONS:
        source = queue.pop()
        if id(source) in seen:
            continue
        seen.add(id(source))
        for function in _functions_of(source):
            digest.update("\x1f".join(_code_of(function.__code__)).encode())
            for name, used in sorted(_values_of(function), key=lambda pair: pair[0]):
                if isinstance(used, FunctionType | type):
                    if used.__module__.partition(".")[0] == package:
                        queue.append(used)
                    digest.update(f"{name}={used.__qualname__}".encode())
                elif isinstance(used, float | str) and not OF_WORKERS.search(name):
                    digest.update(f"{name}={described(used)}".encode())
    return digest.hexdigest()


def _functions_of(value: object) -> Iterator[FunctionType]:
    if isinstance(value, type):
        packages = {base: base.__module__.partition(".")[0] for base in value.__mro__}
        for base in [b for b, name in packages.items() if name not in _FOREIGN and not _is_installed(name)]:
            for _, member in sorted(vars(base).items()):
                yield from _functions_of(member if not isinstance(member, type) else None)
    elif isinstance(value, property):
        yield from (function for function in (value.fget, value.fset) if isinstance(function, FunctionType))
    elif isinstance(value, cached_property):
        yield from _functions_of(value.func)
    elif isinstance(value, staticmethod | classmethod | MethodType):
        yield from _functions_of(value.__func__)
    elif isinstance(value, FunctionType):
        yield value
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield from _functions_of(wrapped)


_FOREIGN: Final = {"torch", "builtins", "abc", "typing"}


def _code_of(code: CodeType) -> Iterator[str]:
    yield from (code.co_name, code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts[code.co_consts[:1] == (_doc(code),) :]:
        if isinstance(constant, CodeType):
            yield from _code_of(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _doc(code: CodeType) -> object:
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else object()


def _values_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    yield from ((f"default {n}", default) for n, default in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    cells: Iterable[Any] = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = list(_names_in(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _FOREIGN:
            yield from ((f"{name}.{attribute}", vars(value).get(attribute)) for attribute in names)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def model_details(model: nn.Module | Sequence[nn.Module]) -> Mapping[str, str]:
    """``details_of`` a model, or of all layers of a list by their numbers."""
    if isinstance(model, nn.Module):
        return details_of(model)
    details: dict[str, str] = {}
    for number, layer in enumerate(model):
        if isinstance(layer, nn.Module):
            details |= {
                f"{number}.{name}".removesuffix("."): text for name, text in details_of(layer).items()
            }
    return details


def loss_details(loss_function: object) -> Mapping[str, str]:
    """``details_of`` a loss function that is a module; of any other, its name, source and arguments."""
    if isinstance(loss_function, nn.Module):
        return details_of(loss_function)
    return {"": str(described(loss_function))}
