"""How ``counterflow reproduce`` shows a paper's figure: as a table, with its constants, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import WIDE, console, note, number, print_json, table_of
from .search_bar import search_bar

if TYPE_CHECKING:
    from counterflow.papers.figures.published import Figure
    from counterflow.papers.figures.reproduction import Checked, Reproduction


def show_figure(figure: Figure, out: Sequence[Path], *, as_json: bool) -> None:
    """Predict a figure, print it, and draw it into each of the files."""
    from counterflow.drawing.saving import require_form
    from counterflow.papers.figures.reproduction import reproduce

    for path in out:
        require_form(path)
    with search_bar("reproducing") as report:
        found = reproduce(figure, report)
    if as_json:
        from counterflow.papers.report import figure_shown

        print_json(figure_shown(found))
    else:
        _print(found)
    for path in out:
        _draw(found, path)
        note(f"Drew {path}")


def _draw(found: Reproduction, path: Path) -> None:
    from counterflow.drawing.bars import Bars, Series, draw_bars
    from counterflow.papers.figures.throughputs import scheme_bars

    figure = found.figure
    schemes = scheme_bars(found)
    marked = any(mark is not None for each in schemes for mark in each.published)
    bars = Bars(
        title=figure.title,
        about=f"{figure.setting}. R: with recomputation",
        axis="predicted samples/s",
        groups=tuple(run.label for run in figure.runs),
        series=tuple(Series(each.label, each.throughputs, each.published, each.texts) for each in schemes),
        mark=f"where the published ratio puts it beside {figure.subject}" if marked else "",
    )
    draw_bars(bars, path)


def _print(found: Reproduction) -> None:
    from rich.padding import Padding
    from rich.text import Text

    figure = found.figure
    out = console(WIDE)
    out.print(Text(figure.title, style="bold"))
    out.print(Text(figure.setting, style="dim"))
    out.print()
    ratios = [row for row in found.rows if row.same is None]
    best = [row for row in found.rows if row.same is not None]
    if best:
        out.print(Text("Best configurations; R: stages are recomputed", style="bold"))
        out.print(_table(_BEST, [_best(found, row) for row in best]))
    if ratios:
        heading = (
            f"{figure.subject} over the others, with the best configurations found; R: stages are recomputed"
        )
        out.print(Text(heading, style="bold"))
        out.print(_table(_FOUND, [_found(row) for row in ratios]))
    stated = [row for row in ratios if figure.competitor(row.published.label).stated is not None]
    if stated:
        out.print(Text("The same with what the paper states of the configurations", style="bold"))
        out.print(_table(_STATED, [_stated(found, row) for row in stated]))
    out.print(Text("Throughput", style="bold"))
    out.print(_throughputs(found))
    misses = [row for row in found.rows if not row.holds]
    for heading, lines in (
        ("Misses", [f"{row.published.label}, {_runs(row)}: {row.published.miss}" for row in misses]),
        ("Assumed", list(figure.assumptions)),
        ("Constants", [f"{name}: {text}" for name, text in found.constants.items()]),
    ):
        if lines:
            out.print(Text(heading, style="bold"))
        for line in lines:
            out.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    out.print(Text(found.summary(), style="bold"))


_BEST = ("scheme", "run", "found", "published", "difference", "use")
_FOUND = ("scheme", "run", "found", "predicted", "published", "difference", "use")
_STATED = ("scheme", "run", "stated", "predicted", "published", "difference")
_RIGHT = ("predicted", "published", "difference")


def _table(columns: Sequence[str], rows: Sequence[tuple[dict[str, str], bool]]) -> Any:
    """A table of rows; each row is its cells by column and whether to leave the difference unmarked."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column in _RIGHT
        table.add_column(column, justify="right" if right else "left", no_wrap=right or column == "scheme")
    for cells, holds in rows:
        marked = "" if holds else "bold yellow"
        table.add_row(*(Text(cells[c], style=marked if c == "difference" else "") for c in columns))
    return table


def _best(found: Reproduction, row: Checked) -> tuple[dict[str, str], bool]:
    cells = {
        "scheme": row.published.label,
        "run": _runs(row),
        "found": _short(" / ".join(row.found)),
        "published": _short(str(found.figure.competitor(row.published.label).stated)),
        "difference": "the same" if row.same else "another",
        "use": row.published.use.value,
    }
    return cells, row.holds


def _found(row: Checked) -> tuple[dict[str, str], bool]:
    cells = {
        "scheme": row.published.label,
        "run": _runs(row),
        "found": _short(" / ".join(row.found)),
        "predicted": _ratio(row.predicted),
        "published": _ratio(row.published.value),
        "difference": _percent(row.difference),
        "use": row.published.use.value,
    }
    return cells, row.holds


def _stated(found: Reproduction, row: Checked) -> tuple[dict[str, str], bool]:
    from counterflow.papers.figures.reproduction import within

    cells = {
        "scheme": row.published.label,
        "run": _runs(row),
        "stated": _short(str(found.figure.competitor(row.published.label).stated)),
        "predicted": _ratio(row.at_stated),
        "published": _ratio(row.published.value),
        "difference": _percent(row.stated_difference),
    }
    return cells, within(row.stated_difference)


def _short(configuration: str) -> str:
    return configuration.replace("recompute stage", "R").replace("recompute", "R")


def _runs(row: Checked) -> str:
    runs = row.published.runs
    if len(runs) < 2:
        return runs[0]
    how = "mean" if row.published.quantity.value == "speed-up" else "efficiency"
    return f"{how}, {runs[0]} to {runs[-1]}"


def _throughputs(found: Reproduction) -> Any:
    first, runs = "predicted samples/s", [run.label for run in found.figure.runs]
    table = table_of(first, *runs, left=(first,), pad_edge=False)
    for each in found.figure.competitors:
        values = [found.entry(each.label, run).throughput() for run in runs]
        table.add_row(each.label, *("does not fit" if v is None else number(round(v, 1)) for v in values))
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "nothing fits" if value is None else f"{value:+.1%}"
