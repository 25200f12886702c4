"""The tables that ``counterflow reproduce`` accepts: each published value next to a measured one.

Each paper has a module with the rows; titles, settings and notes are in ``texts.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.resources import files
from typing import Any

from . import chimera_table, mixpipe_table, wpipe_table, zero_bubble_table
from .layout_table import COLUMNS, Row, Table


@cache
def _texts() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("texts.toml").read_text(encoding="utf-8"))


def _table(name: str, rows: Callable[[], Iterator[Row]]) -> Table:
    texts = _texts()[name]
    notes = {
        key: note if isinstance(note, str) else _texts()[note["of"]]["notes"][key]
        for key, note in texts["notes"].items()
    }
    return Table(name, texts["title"], texts["setting"], COLUMNS, tuple(rows()), notes)


_ROWS = {
    "chimera-table2": chimera_table.rows,
    "mixpipe-table1": mixpipe_table.rows,
    "wpipe-table1": wpipe_table.rows,
    "zb-table5": zero_bubble_table.rows,
}

TABLES: dict[str, Callable[[], Table]] = {name: partial(_table, name, rows) for name, rows in _ROWS.items()}
"""Tables that ``counterflow reproduce`` accepts, by name."""

__all__ = ["TABLES"]
