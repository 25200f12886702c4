"""Checks that every scheme words the same way: the option, its value, and the legal values."""

from __future__ import annotations

from counterflow.errors import ConfigError


def at_least(name: str, value: int, least: int, why: str = "") -> None:
    """Refuse an option that is not a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more")
    if value < least:
        raise ConfigError(f"{name}={value}: must be {least} or more{why}")
