"""How ``counterflow reproduce`` shows a paper's figure: a table, the constants, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import WIDE, console, note, number, print_json
from .search_bar import search_bar

if TYPE_CHECKING:
    from counterflow.plan.compare import Reproduction, Row
    from counterflow.plan.figure import Figure


def show_figure(figure: Figure, out: Sequence[Path], *, as_json: bool) -> None:
    """Predict a figure, print it, and draw it into each of the files."""
    from counterflow.draw.bars import require_form  # noqa: PLC0415  (only a figure needs them)
    from counterflow.plan.compare import reproduce  # noqa: PLC0415

    for path in out:
        require_form(path)
    with search_bar("reproducing") as told:
        found = reproduce(figure, told)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    for path in out:
        _draw(found, path)
        note(f"Drew {path}")


def _draw(found: Reproduction, path: Path) -> None:
    from counterflow.draw.bars import Bars, Series, draw_bars  # noqa: PLC0415
    from counterflow.plan.picture import scheme_bars  # noqa: PLC0415

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
    from rich import box  # noqa: PLC0415  (not for --json)
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    figure = found.figure
    out = console(WIDE)
    out.print(Text(figure.title, style="bold"))
    out.print(Text(figure.setting, style="dim"))
    out.print()
    out.print(Text(_heading(found), style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    for row in found.rows:
        cells = _cells(found, row)
        style = "" if row.holds else "bold yellow"
        table.add_row(*(Text(cells[c], style=style if c == "difference" else "") for c in _COLUMNS))
    out.print(table)
    misses = [row for row in found.rows if not row.holds]
    if misses:
        out.print(Text("Misses", style="bold"))
    for row in misses:
        out.print(Text(f"  {row.published.label}, {_runs(row)}: {row.published.miss}"))
    out.print(Text("Throughput", style="bold"))
    out.print(_throughputs(found))
    for heading, lines in (
        ("Assumed", list(figure.assumptions)),
        ("Constants", [f"{name}: {text}" for name, text in found.constants.items()]),
    ):
        out.print(Text(heading, style="bold"))
        for line in lines:
            out.print(Text(f"  {line}"))
    out.print(Text(found.summary(), style="bold"))


def _heading(found: Reproduction) -> str:
    if all(row.same is not None for row in found.rows):
        return "Best configurations"
    return f"{found.figure.subject} over the others, with the best configurations found"


_COLUMNS = (
    "scheme",
    "run",
    "found",
    "predicted",
    "published",
    "difference",
    "use",
    "stated by the paper",
    "predicted there",
    "difference there",
)
_NUMBERS = ("predicted", "published", "difference", "predicted there", "difference there")


def _cells(found: Reproduction, row: Row) -> dict[str, str]:
    value = row.published
    stated = found.figure.competitor(value.label).stated
    cells = {
        "scheme": value.label
        + (f", {value.quantity.value}" if value.quantity.value.startswith("para") else ""),
        "run": _runs(row),
        "found": " / ".join(row.found),
        "use": value.use.value,
        "stated by the paper": "" if stated is None else str(stated),
    }
    if row.same is not None:
        return cells | {
            "predicted": "",
            "published": "",
            "difference": "the same" if row.same else "another",
            "predicted there": "",
            "difference there": "",
        }
    return cells | {
        "predicted": _ratio(row.predicted),
        "published": _ratio(value.value),
        "difference": _percent(row.difference),
        "predicted there": _ratio(row.at_stated) if stated is not None else "",
        "difference there": _percent(row.stated_difference) if stated is not None else "",
    }


def _runs(row: Row) -> str:
    runs = row.published.runs
    if len(runs) < 2:
        return runs[0]
    mean = "mean of " if row.published.quantity.value == "speed-up" else ""
    return f"{mean}{runs[0]} to {runs[-1]}"


def _throughputs(found: Reproduction) -> Any:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("predicted samples/s")
    runs = [run.label for run in found.figure.runs]
    for run in runs:
        table.add_column(run, justify="right")
    for each in found.figure.competitors:
        values = [found.entry(each.label, run).throughput() for run in runs]
        table.add_row(each.label, *("does not fit" if v is None else number(round(v, 1)) for v in values))
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "nothing fits" if value is None else f"{value:+.1%}"
