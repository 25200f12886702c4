"""What commands print with: a console, JSON, numbers, and files written or refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from counterflow.errors import ConfigError, CounterflowError

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 4096
"""Columns assumed where output is no terminal and says nothing of its width: nothing is cut or wrapped."""


def console(width: int | None = None) -> Console:
    """A console on stdout; ``width`` is what to assume where there is no terminal."""
    from rich.console import Console  # noqa: PLC0415  (not for --json)

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        width = None
    return Console(width=width, highlight=False, soft_wrap=False)


def print_json(value: dict[str, Any]) -> None:
    """The one JSON object of ``--json``, on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def note(text: str) -> None:
    """A remark beside the result, on stderr."""
    typer.echo(text, err=True)


def number(value: float) -> str:
    """A number as short as six digits allow.

    >>> number(36.0), number(1 / 3)
    ('36', '0.333333')
    """
    return f"{value:.6g}"


def numbers(value: Any) -> str:
    """One number, or several with commas."""
    if isinstance(value, (int, float)):
        return number(value)
    return ", ".join(number(v) for v in value)


def byte_size(value: float) -> str:
    """Bytes in binary units.

    >>> byte_size(512), byte_size(1.5 * 2**30)
    ('512 B', '1.5 GiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def exact(value: float) -> float | int:
    """A count as JSON should show it: 5 rather than 5.0, but 2.5 as it is."""
    return int(value) if float(value).is_integer() else value


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file the user named: tells where and why it cannot be written.

    Raises:
        ConfigError: the path is wrong: no such directory, not permitted.
        CounterflowError: writing failed: a full disk.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}") from None
    except IsADirectoryError:
        raise ConfigError(f"cannot write {path}: it is a directory") from None
    except PermissionError:
        raise ConfigError(f"cannot write {path}: permission denied") from None
    except OSError as error:
        raise CounterflowError(f"cannot write {path}: {error.strerror or error}") from error
