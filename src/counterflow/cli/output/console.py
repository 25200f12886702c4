"""Output of commands: a console, JSON and numbers; also the writing of files, with errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from counterflow.common.text_files import can_encode
from counterflow.errors import ConfigError, CounterflowError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.registry import find

from .visible import echo, visible_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from counterflow.common.json_models import Result
    from counterflow.simulation import Simulation

Row = TypeVar("Row")

WIDE = 4096
"""Columns assumed if the output is not a terminal and its width is unknown: nothing is cut or wrapped."""


def console(width: int | None = None) -> Console:
    """A console on stdout; ``width`` is assumed if there is no terminal."""
    from .screen import Screen

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        width = None
    return Screen(width=width, highlight=False, soft_wrap=False)


def sign_of(out: Console, ok: bool | None) -> tuple[str, str]:
    """Sign of a result and its style; a word where the console cannot encode the sign.

    Args:
        out: the console.
        ok: True: it holds; False: it does not; None: it was skipped.
    """
    sign, word, style = _SIGNS[ok]
    return _encoded(out, sign, word), style


def bullet(out: Console) -> str:
    """Beginning of a remark, in characters that the console can encode."""
    return _encoded(out, "·", "-")


_SIGNS = {True: ("✓", "ok", "green"), False: ("✗", "WRONG", "bold red"), None: ("·", "skipped", "dim")}


def _encoded(out: Console, text: str, plain: str) -> str:
    return text if can_encode(out.encoding, text) else plain


def table_of(*columns: str, text_columns: Sequence[str] = ("",), pad_edge: bool = True) -> Table:
    """A table of figures; the columns named in ``text_columns`` contain words, aligned to the left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=pad_edge)
    for column in columns:
        table.add_column(column, justify="left" if column in text_columns else "right")
    return table


def merge_equal_rows(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Rows of workers with each row's workers; neighbours with the same figures share a row.

    >>> merge_equal_rows([5, 7, 7, 7])
    [('0', 5), ('1–3', 7)]
    """
    merged: list[tuple[str, Row]] = []
    for _, same in groupby(enumerate(rows), key=lambda pair: pair[1]):
        (first, row), *following = same
        merged.append((f"{first}–{following[-1][0]}" if following else str(first), row))
    return merged


def print_json(value: Result) -> None:
    """Print the JSON object of ``--json`` on one line."""
    shown = {"format": value.format} | value.model_dump(mode="json", exclude_unset=True)
    typer.echo(visible_json(json.dumps(shown, ensure_ascii=False, allow_nan=False)))


def note(text: str) -> None:
    """Print a remark on stderr."""
    echo(text, err=True)


def heading(schedule: Schedule) -> str:
    """A schedule as the first line of an output: its text, after the name that papers have for its scheme.

    >>> from counterflow import schemes
    >>> heading(schemes.dapple(stages=2, micro_batches=4)), heading(schemes.zb_v(workers=2, micro_batches=4))
    ('1F1B: dapple(stages=2, micro_batches=4)', 'zb-v(workers=2, micro_batches=4)')
    """
    known = find(schedule.scheme)
    return f"{known.paper_name}: {schedule}" if known and known.paper_name else str(schedule)


def number(value: float) -> str:
    """A number in at most six digits.

    >>> number(36.0), number(1 / 3)
    ('36', '0.333333')
    """
    return f"{value:.6g}"


def numbers(value: Any) -> str:
    """One number, or several separated by commas."""
    if isinstance(value, (int, float)):
        return number(value)
    return ", ".join(number(v) for v in value)


def bubble_causes(result: Simulation) -> str:
    """The shares of all workers' makespan that are idle, by cause; empty if there are none.

    >>> from counterflow import schemes, simulate
    >>> bubble_causes(simulate(schemes.dapple(stages=2, micro_batches=2)))
    'warm-up 5.56%, dependency 16.67%, drain 11.11%'
    """
    causes = {
        name.replace("_", "-"): sum(getattr(worker, name) for worker in result.bubbles)
        for name in ("warm_up", "dependency", "message", "drain")
    }
    total = result.makespan * result.schedule.workers
    return ", ".join(f"{name} {part / total:.2%}" for name, part in causes.items() if part > 5e-5 * total)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context for writing a file that the user named: errors say where and why it cannot be written.

    Raises:
        ConfigError: the path is wrong: no such directory, not permitted.
        CounterflowError: writing failed: a full disk.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"cannot write {path}: the directory {path.parent} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"cannot write {path}: it is a directory") from None
    except PermissionError:
        raise ConfigError(f"cannot write {path}: permission denied") from None
    except OSError as error:
        raise CounterflowError(f"cannot write {path}: {error.strerror or error}") from error
