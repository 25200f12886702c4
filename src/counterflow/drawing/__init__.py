"""Pictures of timelines: in the terminal, PNG, SVG, PDF, an HTML page, a Perfetto trace.

Invariant: pictures are drawn from ``Chart`` alone, which ``chart_of`` makes from a simulation; importing
this room imports neither matplotlib nor rich. Nothing here computes a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.registry import schedule_of
from counterflow.schedule.scheme_keywords import Sizes
from counterflow.simulation import Simulation, simulate

from .chart import Arrow, Box, BoxKind, BoxLane, Bubble, Chart, Memory
from .charting import chart_of, order_chart
from .look import USUAL, Look
from .page import write_page
from .saving import CHARTS, FORMS, require_form, written
from .time_units import AmountUnit
from .trace import write_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

__all__ = [
    "AmountUnit",
    "Arrow",
    "Box",
    "BoxKind",
    "BoxLane",
    "Bubble",
    "Chart",
    "Memory",
    "chart_of",
    "draw",
    "draw_charts",
    "draw_terminal",
    "order_chart",
    "print_charts",
]


def draw(
    result: Simulation | Schedule | str,
    path: str | Path | None = None,
    *,
    ax: Axes | None = None,
    compare: Simulation | None = None,
    memory: bool = False,
    messages: bool = False,
    title: str | None = None,
    width: float | None = None,
    font: str | None = None,
    grey: bool = False,
    **sizes: Unpack[Sizes],
) -> Figure | None:
    """Draw a simulated schedule into a file, on your own axes, or as a matplotlib figure.

    Args:
        result: a result of ``simulate``; or a schedule or the name of a scheme, which is simulated with a
            forward of 1 and a backward of 2.
        path: the file; its suffix is the format: ``.png``, ``.svg``, ``.pdf``, ``.html`` (a page that
            works offline) or ``.trace.json`` (for Perfetto). An existing file is replaced.
        ax: matplotlib axes on which the timeline is drawn, with its legend above; leave an inch of space
            there.
        compare: a second simulation, drawn under the first on the same time axis.
        memory: also draw each worker's memory over time.
        messages: also draw every message between workers as an arrow.
        title: the heading; None: the scheme and its options.
        width: width of the whole picture in inches; None: as wide as the ops' numbers need.
        font: name of a font that matplotlib finds; None: DejaVu Sans.
        grey: whether to use shades of grey instead of colours.
        sizes: options of the named scheme.

    Returns:
        The figure; None for a page or a trace.

    Raises:
        ConfigError: the suffix is unknown, the folder does not exist, the file cannot be written, or a page,
            a trace or given axes do not support an option.

    >>> draw("dapple", "dapple.jpg", workers=2, micro_batches=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    counterflow.errors.ConfigError: dapple.jpg: cannot tell what to draw from this name; ...
    """
    if not isinstance(result, Simulation):
        result = simulate(schedule_of(result, sizes))
    elif sizes:
        raise ConfigError(
            f"draw: unknown option {min(sizes)}; sizes are accepted only with the name of a scheme"
        )
    charts = _charts(result, compare, memory, messages)
    if title is not None:
        charts = [replace(charts[0], heading=title), *charts[1:]]
    look = Look(width, font, grey)
    if ax is not None:
        if path is not None or compare is not None or memory or width is not None:
            raise ConfigError("ax: accepts one timeline; leave out path, compare, memory and width")
        from .figure import draw_on  # noqa: PLC0415 - matplotlib takes a while to import

        return draw_on(ax, charts[0], look)
    if path is None:
        from .figure import styled  # noqa: PLC0415

        return styled(charts, look)
    return draw_charts(charts, path, look)


def draw_charts(charts: Sequence[Chart], path: str | Path, look: Look = USUAL) -> Figure | None:
    """Draw charts, one under the other on one time axis, into a file.

    Args:
        charts: at least one.
        path: as in ``draw``.
        look: look of the picture.

    Raises:
        ConfigError: as in ``draw``.
    """
    path = Path(path)
    form = require_form(path, CHARTS)
    with written(path):
        if form in FORMS:
            from .figure import write_figure  # noqa: PLC0415 - matplotlib takes a while to import

            return write_figure(charts, path, form[1:], look)
        if look != USUAL:
            raise ConfigError(f"{path}: width, font and grey are those of figures: {', '.join(FORMS)}")
        _WRITERS[form](charts, path)
        return None


_WRITERS: dict[str, Callable[[Sequence[Chart], Path], None]] = {
    ".html": write_page,
    ".trace.json": write_trace,
}


def draw_terminal(
    result: Simulation,
    console: Console,
    *,
    compare: Simulation | None = None,
    memory: bool = False,
) -> None:
    """Print a simulated schedule's timeline, at most as wide as the console.

    Args:
        result: result of ``simulate``.
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


def _html(schedule: Schedule) -> str:
    from .notebook import html_of  # noqa: PLC0415 - for notebooks alone

    return html_of(schedule)


def _svg(result: Simulation) -> str | None:
    from .notebook import svg_of  # noqa: PLC0415 - for notebooks alone

    return svg_of(result)


Schedule._repr_html_ = _html
Simulation._repr_svg_ = _svg
