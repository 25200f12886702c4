"""Values as TOML text, which the standard library reads but does not write.

Invariant: ``tomllib`` reads back what was written, value for value. Only what a config holds can be
written: true and false, numbers, texts, paths, and lists of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from counterflow.errors import ConfigError

_SHORT = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f\x7f]')


def dumps(value: object) -> str:
    r"""One value as it stands right of ``key =``.

    Raises:
        ConfigError: TOML has no such value.

    >>> print(dumps([1, 2.5, True, 'a "b"\n']))
    [1, 2.5, true, "a \"b\"\n"]
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, PurePath)):
        return _text(str(value))
    if isinstance(value, Sequence):
        return f"[{', '.join(map(dumps, value))}]"
    raise ConfigError(f"{value!r} cannot be written as TOML; give a text, a number, true, false or a list")


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} cannot be written as TOML: it is not Unicode; rename it") from None
    return f'"{_TO_ESCAPE.sub(_escaped, text)}"'


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return _SHORT.get(character, f"\\u{ord(character):04x}")
