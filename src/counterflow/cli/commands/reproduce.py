"""``counterflow reproduce``: a paper's table or figure, published and predicted side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterflow.errors import ConfigError, hint

from ..options.flags import JsonFlag
from ..output.console import WIDE, console, print_json
from ..output.paper_figures import show_figure, show_figures
from ..output.visible import echo

if TYPE_CHECKING:
    from counterflow.papers.tables.layout_table import Table


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A table or figure, a paper (chimera, mixpipe, hanayo, wpipe) or all. Default: list.",
        ),
    ] = None,
    *,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", metavar="FILE", help="Draw a figure into FILE: .png .svg .pdf; may be repeated."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Reproduce a paper's table or figure: published, predicted, difference.

    A figure's values are predicted by the planner, with what the paper states of each configuration and the
    rest of it as good as possible. A miss has its cause, and the value with that cause changed. Values on
    which a constant was fitted are marked; all others test the prediction.
    """
    from counterflow.papers.figures import FIGURES, PAPERS
    from counterflow.papers.tables import TABLES

    known = (*TABLES, *FIGURES)
    if name is None or listed:
        _list(known, as_json)
        return
    if name in (*PAPERS, "all"):
        if out:
            raise ConfigError(f"{name} is several figures; give one of them to draw")
        papers = PAPERS if name == "all" else (name,)
        show_figures(
            (figure for figure in FIGURES.values() if figure.name.startswith(papers)), as_json=as_json
        )
        return
    if name not in known:
        raise ConfigError(f"unknown table or figure {name!r}{hint(name, known)}")
    if name in FIGURES:
        show_figure(FIGURES[name], out or (), as_json=as_json)
        return
    if out:
        raise ConfigError(f"{name} is a table, which cannot be drawn; leave out --out")
    table = TABLES[name]()
    if as_json:
        from counterflow.papers.reproduction_report import TableShown

        print_json(TableShown.model_validate(table))
    else:
        _print(table)


def _list(known: Iterable[str], as_json: bool) -> None:
    from counterflow.papers.figures import FIGURES

    names = list(known)
    if as_json:
        from counterflow.papers.reproduction_report import Reproducible

        tables, figures = ([n for n in names if (n in FIGURES) is drawn] for drawn in (False, True))
        print_json(Reproducible(tables=tables, figures=figures))
        return
    for name in names:
        echo(name)


SHOWN = ("scheme", "setting", "formula", "value", "measured", "difference", "note")
"""Columns of a section, whose heading is the quantity and its source."""


def _print(table: Table) -> None:
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

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
