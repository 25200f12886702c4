"""``counterflow reproduce``: a paper's table, published and ours side by side."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from counterflow.errors import ConfigError

from .flags import JsonFlag
from .output import WIDE, console, print_json

if TYPE_CHECKING:
    from counterflow.plan.table import Table


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The table; without it they are listed."),
    ] = None,
    *,
    listed: Annotated[bool, typer.Option("--list", help="List the tables.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Reproduce a paper's table: published figure, ours, difference."""
    from counterflow.plan.tables import TABLES  # noqa: PLC0415  (only this command needs it)

    if name is None or listed:
        _list(TABLES, as_json)
        return
    if name not in TABLES:
        near = difflib.get_close_matches(name, TABLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown table {name!r}{hint} Known: {', '.join(TABLES)}")
    table = TABLES[name]()
    if as_json:
        print_json(table.to_json())
    else:
        _print(table)


def _list(tables: Mapping[str, Callable[[], Table]], as_json: bool) -> None:
    if as_json:
        print_json({"tables": list(tables)})
        return
    for name in tables:
        typer.echo(name)


SHOWN = ("scheme", "setting", "formula", "value", "measured", "difference", "note")
"""Columns of a section; the quantity and its source are the section's heading."""


def _print(table: Table) -> None:
    from rich import box  # noqa: PLC0415  (not for --json)
    from rich import table as rich_table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    out = console(WIDE)
    out.print(Text(table.title, style="bold"))
    out.print(Text(table.setting, style="dim"))
    sections: dict[str, list[dict[str, Text]]] = {}
    for row in table.rows:
        cells = dict(zip(table.columns, map(Text, row.cells()), strict=True))
        if row.deviates:
            cells["difference"].stylize("bold yellow")
        sections.setdefault(f"{row.quantity}  ({row.source})", []).append(cells)
    out.print()
    for heading, rows in sections.items():
        out.print(Text(heading, style="bold"))
        shown = rich_table.Table(*SHOWN, box=box.SIMPLE_HEAD, pad_edge=False)
        for cells in rows:
            shown.add_row(*(cells[column] for column in SHOWN))
        out.print(shown)
    for key, note in table.notes.items():
        out.print(Text.assemble((key, "bold"), f": {note}"))
