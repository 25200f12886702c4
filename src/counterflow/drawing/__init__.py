"""Pictures of timelines: in the terminal, PNG, SVG, PDF, an HTML page, a Perfetto trace.

Invariant: pictures are drawn from ``Chart`` alone, which ``chart_of`` makes from a simulation; importing
this room imports neither matplotlib nor rich. Nothing here computes a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Simulation

from .chart import Arrow, Box, BoxKind, Bubble, Chart, Lane, Memory
from .charting import chart_of, order_chart
from .page import write_page
from .trace import write_trace
from .units import AmountUnit

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "AmountUnit",
    "Arrow",
    "Box",
    "BoxKind",
    "Bubble",
    "Chart",
    "Lane",
    "Memory",
    "chart_of",
    "draw",
    "draw_charts",
    "draw_terminal",
    "order_chart",
    "print_charts",
]


def draw(
    result: Simulation,
    path: str | Path,
    *,
    compare: Simulation | None = None,
    memory: bool = False,
    messages: bool = False,
) -> None:
    """Draw a simulated schedule into a file.

    Args:
        result: what ``simulate`` gave.
        path: the file; its suffix says what to draw: ``.png``, ``.svg``, ``.pdf``, ``.html`` (a page that
            works offline) or ``.trace.json`` (for Perfetto). An existing file is replaced.
        compare: a second simulation, drawn under the first on the same time axis.
        memory: also draw each worker's memory over time.
        messages: also draw every message between workers as an arrow.

    Raises:
        ConfigError: another suffix, a folder that is not there, or a file that cannot be written.

    >>> from counterflow.schedule.schemes import dapple
    >>> from counterflow.simulation import simulate
    >>> draw(simulate(dapple(stages=2, micro_batches=2)), "dapple.jpg")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    counterflow.errors.ConfigError: dapple.jpg: cannot tell what to draw from this name; ...
    """
    draw_charts(_charts(result, compare, memory, messages), path)


def draw_charts(charts: Sequence[Chart], path: str | Path) -> None:
    """Draw charts, one under the other on one time axis, into a file.

    Args:
        charts: at least one.
        path: as for ``draw``.

    Raises:
        ConfigError: as for ``draw``.
    """
    path = Path(path)
    write = _writer(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} is not there; make it first")
    try:
        write(charts, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def draw_terminal(
    result: Simulation,
    console: Console,
    *,
    compare: Simulation | None = None,
    memory: bool = False,
) -> None:
    """Print a simulated schedule's timeline, as wide as the console at most.

    Args:
        result: what ``simulate`` gave.
        console: where to print; without colour, forwards are digits and backwards are letters.
        compare: a second simulation, printed under the first on the same time axis.
        memory: also print each worker's memory over time.
    """
    print_charts(_charts(result, compare, memory), console)


def print_charts(charts: Sequence[Chart], console: Console) -> None:
    """Print charts, one under the other on one time axis."""
    from .terminal import print_charts as print_them  # noqa: PLC0415 - rich takes a while to import

    print_them(charts, console)


def _charts(
    result: Simulation, compare: Simulation | None, memory: bool, messages: bool = False
) -> list[Chart]:
    return [chart_of(s, memory=memory, messages=messages) for s in (result, compare) if s is not None]


def _figure(form: str, charts: Sequence[Chart], path: Path) -> None:
    from .figure import write_figure  # noqa: PLC0415 - matplotlib takes a while to import

    write_figure(charts, path, form)


_WRITERS: dict[str, Callable[[Sequence[Chart], Path], None]] = {
    ".png": partial(_figure, "png"),
    ".svg": partial(_figure, "svg"),
    ".pdf": partial(_figure, "pdf"),
    ".html": write_page,
    ".trace.json": write_trace,
}


def _writer(path: Path) -> Callable[[Sequence[Chart], Path], None]:
    for suffix, writer in _WRITERS.items():
        if path.name.lower().endswith(suffix):
            return writer
    raise ConfigError(
        f"{path}: cannot tell what to draw from this name; legal endings: {', '.join(_WRITERS)}"
    )


def _html(schedule: Schedule) -> str:
    from .notebook import html_of  # noqa: PLC0415 - for notebooks alone

    return html_of(schedule)


def _svg(result: Simulation) -> str | None:
    from .notebook import svg_of  # noqa: PLC0415 - for notebooks alone

    return svg_of(result)


Schedule._repr_html_ = _html
Simulation._repr_svg_ = _svg
