"""Names that the code of a function mentions: globals that it loads, and attributes that it may read."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

GRADIENT_NAMES = {"is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "grad_fn", "is_leaf"}
"""Names by which code asks whether gradients are recorded."""
SEED_NAMES = {"manual_seed", "manual_seed_all", "set_rng_state", "fork_rng"}
"""Names by which code sets the state of torch's random numbers."""
ENVIRONMENT_NAMES = {"environ", "getenv"}
"""Names by which code reads variables of the environment."""


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the globals that a code loads, and all names that it mentions, also as texts for ``getattr``.

    The code of functions and classes within it counts.
    """
    loaded: dict[str, None] = {}
    names = {*code.co_names, *_texts(code.co_consts)}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            loaded[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, more = names_in(constant)
            loaded |= dict.fromkeys(inner)
            names |= more
    return tuple(loaded), frozenset(names)


@functools.lru_cache(maxsize=4096)
def _imports(code: CodeType) -> tuple[str, ...]:
    imports = {i.argval: None for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            imports |= dict.fromkeys(_imports(constant))
    return tuple(imports)


def imported_modules(function: FunctionType) -> list[ModuleType]:
    """Modules that a function imports itself, of those that were imported before."""
    package = function.__globals__.get("__package__") or ""
    modules: dict[str, object] = {}
    for name in _imports(function.__code__):
        for full in (name, f"{package}.{name}".rstrip(".")):
            modules |= {n: sys.modules[n] for n in (full.partition(".")[0], full) if n in sys.modules}
    return [module for module in modules.values() if isinstance(module, ModuleType)]


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(tuple(constant))
