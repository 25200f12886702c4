"""Values as TOML text by tomlkit, for configs and messages.

Invariant: ``tomllib`` reads back what was written, value for value. Only values of a config can be written:
true and false, numbers, texts, paths, and lists of them.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import tomlkit

from counterflow.errors import ConfigError


def dumps(value: object) -> str:
    r"""A value as it stands to the right of ``key =``.

    Raises:
        ConfigError: TOML cannot express the value.

    >>> print(dumps([1, 2.5, True, 'a "b"\n']))
    [1, 2.5, true, "a \"b\"\n"]
    """
    return tomlkit.item(_plain(value)).as_string()


_SHOWN = 60
"""Maximum characters of a value that a message shows."""

_LARGEST = 2**63 - 1


def shown(value: object) -> str:
    """A value in a message: as TOML if possible, at most a line long, in bounded time.

    >>> shown(None)
    'not given'
    >>> shown([1] * 1_000_000)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,…'
    """
    if value is None:
        return "not given"
    try:
        text = dumps(_begin(value))
    except ConfigError:
        text = reprlib.repr(value) if isinstance(value, (list, Mapping)) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}…"


def _begin(value: object, depth: int = 3) -> object:
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, (str, PurePath)):
        return str(value)[: _SHOWN + 1]
    if isinstance(value, Sequence):
        return [_begin(part, depth - 1) for part in itertools.islice(value, _SHOWN)] if depth else "…"
    return value


def has_only_legal_numbers(values: object) -> bool:
    """True if all whole numbers fit in TOML's 64 bits; tomllib also reads longer ones."""
    if isinstance(values, Mapping):
        return all(has_only_legal_numbers(value) for value in values.values())
    if isinstance(values, list):
        return all(has_only_legal_numbers(value) for value in values)
    return not isinstance(values, int) or -_LARGEST - 1 <= values <= _LARGEST


def _plain(value: object) -> bool | float | str | list[object]:
    if isinstance(value, (str, PurePath)):
        text = str(value)
        if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{text!r} cannot be written as TOML: it is not Unicode; rename it")
        return text
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    raise ConfigError(f"{value!r} cannot be written as TOML; use a text, a number, true, false or a list")
