"""Values as TOML text by tomlkit, for configs and messages.

Invariant: ``tomllib`` reads back what was written, value for value. Only what a config holds can be
written: true and false, numbers, texts, paths, and lists of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import tomlkit

from counterflow.errors import ConfigError


def dumps(value: object) -> str:
    r"""One value as it stands right of ``key =``.

    Raises:
        ConfigError: TOML has no such value.

    >>> print(dumps([1, 2.5, True, 'a "b"\n']))
    [1, 2.5, true, "a \"b\"\n"]
    """
    return tomlkit.item(_plain(value)).as_string()


def _plain(value: object) -> bool | float | str | list[object]:
    """The value in the types that tomlkit knows."""
    if isinstance(value, (str, PurePath)):
        text = str(value)
        if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{text!r} cannot be written as TOML: it is not Unicode; rename it")
        return text
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    raise ConfigError(f"{value!r} cannot be written as TOML; give a text, a number, true, false or a list")
