"""Output of ``counterflow reproduce``: a paper's figure as a table, with its constants, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.errors import ConfigError

from .console import WIDE, console, note, number, print_json, table_of
from .search_bar import search_bar

if TYPE_CHECKING:
    from counterflow.papers.figures.lines import ReportLine
    from counterflow.papers.figures.published import Figure
    from counterflow.papers.figures.reproduction import Reproduction


def show_figure(figure: Figure, out: Sequence[Path], *, as_json: bool) -> None:
    """Predict a figure, print it, and draw it into each of the files."""
    from counterflow.drawing.saving import require_form
    from counterflow.papers.figures.reproduction import reproduce

    for path in out:
        require_form(path)
    if out and not figure.runs:
        raise ConfigError(f"{figure.name} has no predictions, so it cannot be drawn; leave out --out")
    with search_bar("reproducing") as report:
        reproduction = reproduce(figure, report)
    if as_json:
        from counterflow.papers.reproduction_report import figure_shown

        print_json(figure_shown(reproduction))
    else:
        _print(reproduction)
    for path in out:
        _draw(reproduction, path)
        note(f"Drew {path}")


def show_figures(figures: Iterable[Figure], *, as_json: bool) -> None:
    """Predict figures one after the other, print their rows, and count all of them."""
    from rich.text import Text

    from counterflow.papers.figures.lines import lines_of
    from counterflow.papers.figures.reproduction import reproduce, total

    out = console(WIDE)
    reproductions: list[Reproduction] = []
    for figure in figures:
        with search_bar(f"reproducing {figure.name}") as report:
            reproductions.append(reproduce(figure, report))
        if not as_json:
            out.print(Text(figure.title, style="bold"))
            out.print(_rows(lines_of(reproductions[-1])))
    if as_json:
        from counterflow.papers.reproduction_report import figures_shown

        print_json(figures_shown(reproductions))
    else:
        out.print(Text(total(reproductions), style="bold"))


def _draw(reproduction: Reproduction, path: Path) -> None:
    from counterflow.drawing.bars import Bars, Series, draw_bars
    from counterflow.papers.figures.throughputs import scheme_bars

    figure = reproduction.figure
    schemes = scheme_bars(reproduction)
    marked = any(mark is not None for scheme in schemes for mark in scheme.published)
    bars = Bars(
        title=figure.title,
        about=f"{figure.setting}. R: with recomputation",
        axis="predicted peak memory, GiB" if figure.unlimited else "predicted samples/s",
        groups=tuple(run.label for run in figure.runs),
        series=tuple(
            Series(scheme.label, scheme.values, scheme.published, scheme.texts) for scheme in schemes
        ),
        mark="where the published ratio puts it" if marked else "",
    )
    draw_bars(bars, path)


def _print(reproduction: Reproduction) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from counterflow.papers.figures.lines import lines_of

    figure = reproduction.figure
    out = console(WIDE)
    out.print(Text(figure.title, style="bold"))
    out.print(Text(figure.setting, style="dim"))
    out.print()
    out.print(
        Text("With what the paper states of the configurations; R: stages are recomputed", style="bold")
    )
    lines = lines_of(reproduction)
    out.print(_rows(lines))
    if figure.runs:
        out.print(Text("Memory" if figure.unlimited else "Throughput", style="bold"))
        out.print(_values(reproduction))
    for heading, texts in (
        ("Misses", [f"{_name(line)}: {line.cause}" for line in lines if line.cause]),
        ("Stated", list(figure.statements)),
        ("Assumed", list(figure.assumptions)),
        ("Constants", [f"{name}: {text}" for name, text in reproduction.constants.items()]),
    ):
        if texts:
            out.print(Text(heading, style="bold"))
        for text in texts:
            out.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
    out.print(Text(reproduction.summary(), style="bold"))


def _name(line: ReportLine) -> str:
    return f"{line.what}, {line.runs}" if line.runs else line.what


_COLUMNS = ("quantity", "run", "predicted", "published", "difference", "verdict", "use", "source")
_RIGHT = ("difference",)


def _rows(lines: Sequence[ReportLine]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=column in _RIGHT)
    for line in lines:
        cells = (line.what, line.runs, line.predicted, line.published, line.difference, line.verdict)
        style = "" if line.verdict == "hit" else "bold yellow"
        table.add_row(
            *(Text(cell) for cell in cells[:-1]),
            Text(line.verdict, style=style),
            Text(line.use),
            Text(line.source),
        )
    return table


def _values(reproduction: Reproduction) -> Any:
    from counterflow.papers.figures.throughputs import scheme_bars

    first = "predicted peak, GiB" if reproduction.figure.unlimited else "predicted samples/s"
    runs = [run.label for run in reproduction.figure.runs]
    table = table_of(first, *runs, text_columns=(first,), pad_edge=False)
    for scheme in scheme_bars(reproduction):
        table.add_row(
            scheme.label, *("does not fit" if v is None else number(round(v, 1)) for v in scheme.values)
        )
    return table
