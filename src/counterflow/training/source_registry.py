"""The model sources: the only list of them.

Invariant: a source is known by the kinds of its models; every ``SOURCE`` in ``sources`` is listed here. A
user's own source is registered in each process.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from counterflow.common import toml
from counterflow.errors import ConfigError, hint

from . import sources as _folder
from .source import ModelSource

_SOURCES: list[ModelSource] = []


def register(source: ModelSource) -> ModelSource:
    """Add a source, for ``load_config`` and every reader of configs."""
    _SOURCES.append(source)
    return source


def sources() -> tuple[ModelSource, ...]:
    """All sources, in the order in which they were registered."""
    return tuple(_SOURCES)


def kinds() -> tuple[str, ...]:
    """Values of ``model.kind`` that are not names of models."""
    return tuple(kind for source in _SOURCES for kind in source.kinds)


def named() -> tuple[str, ...]:
    """Values of ``model.kind`` that are names of models."""
    return tuple(name for source in _SOURCES for name in source.named)


def source_of(kind: str) -> ModelSource:
    """The source of models of a kind or name.

    Raises:
        ConfigError: no source has the kind.
    """
    for source in _SOURCES:
        if kind in source.kinds or kind in source.named:
            return source
    raise ConfigError(f"model.kind = {toml.shown(kind)}: unknown{hint(kind, [*kinds(), *named()])}")


def refuse_keys_of_others(kind: str, table: str, keys: Iterable[str]) -> None:
    """Refuse keys of a table that only models of other sources have.

    Args:
        kind: kind of the model.
        table: the name of the table.
        keys: keys of the table that are given.

    Raises:
        ConfigError: a key belongs to other sources only.
    """
    permitted = source_of(kind).own_keys.get(table, ())
    owners = {key: source.kinds[0] for source in _SOURCES for key in source.own_keys.get(table, ())}
    for key in keys:
        if key in owners and key not in permitted:
            raise ConfigError(
                f'{table}.{key}: is for model.kind = "{owners[key]}", but model.kind is {toml.shown(kind)}; '
                f'leave it out, or set model.kind = "{owners[key]}"'
            )


for _module in iter_modules(_folder.__path__):
    _source = getattr(import_module(f"{_folder.__name__}.{_module.name}"), "SOURCE", None)
    if _source is not None:
        register(_source)
