"""Groups of bars, as in papers that compare throughputs: PNG, SVG and PDF.

Invariant: the same bars give the same file. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import palette
from .saving import saved, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Series:
    """Bars of one colour, one in each group.

    Attributes:
        label: name in the legend.
        values: heights, 0 or more; None omits a bar.
        marks: heights to compare with, drawn as a line across the bar; None omits a line.
        texts: text above each bar.
    """

    label: str
    values: tuple[float | None, ...]
    marks: tuple[float | None, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """A picture of bars.

    Attributes:
        title: the heading.
        about: the line under it.
        axis: label of the heights, with the unit.
        groups: labels of the groups.
        series: bars, each with as many values as there are groups.
        mark: meaning of the lines across the bars; empty if there are none.
    """

    title: str
    about: str
    axis: str
    groups: tuple[str, ...]
    series: tuple[Series, ...] = field(default=())
    mark: str = ""


def draw_bars(bars: Bars, path: str | Path) -> None:
    """Write the bars into a file; an existing one is replaced.

    Args:
        bars: the bars to draw.
        path: see ``saved``, also for the errors.
    """
    saved(path, lambda: make_bars(bars))


_WIDTH = 0.8  # width of a group's bars together, relative to the group
_BAR_INCHES = 0.5
_HEIGHT = 4.2
_WIDE = 8.0  # inches in which the whole legend fits on one line


def make_bars(bars: Bars) -> Figure:
    """The figure: one axes with the groups, and the legend under the heading."""
    width = max(6.6, 1.2 + _BAR_INCHES * len(bars.groups) * len(bars.series) / _WIDTH)
    figure = sized(width, _HEIGHT)
    top = 0.8 if width > _WIDE else 0.74
    axes = figure.add_axes((0.8 / width, 0.1, 1 - 1.0 / width, top - 0.1), label="bars")
    figure.text(0.12 / width, 0.955, bars.title, size=10, weight="bold", color=palette.INK)
    figure.text(0.12 / width, 0.905, bars.about, size=7.5, color=palette.FAINT)
    for index, series in enumerate(bars.series):
        _series(axes, bars, series, index)
    axes.set_xticks(range(len(bars.groups)), bars.groups, fontsize=8)
    axes.set_xlim(-0.5, len(bars.groups) - 0.5)
    axes.margins(y=0.14)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(bars.axis, fontsize=8, color=palette.INK)
    axes.tick_params(axis="y", labelsize=7.5, colors=palette.FAINT, width=0.6)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, axes, bars, width)
    return figure


_ABOVE: dict[str, Any] = {
    "textcoords": "offset points",
    "ha": "center",
    "va": "bottom",
    "color": palette.INK,
}


def _series(axes: Axes, bars: Bars, series: Series, index: int) -> None:
    bar_width = _WIDTH / len(bars.series)
    hue = palette.hue(index)
    for group, (value, mark, text) in enumerate(zip(series.values, series.marks, series.texts, strict=True)):
        start = group - _WIDTH / 2 + index * bar_width
        middle = start + bar_width / 2
        label = series.label if group == 0 else "_nolegend_"
        axes.bar(
            middle, value or 0.0, 0.9 * bar_width, color=hue.forward, edgecolor=hue.backward, label=label
        )
        top = max(value or 0.0, mark or 0.0)
        if mark is not None:
            axes.hlines(
                mark, middle - 0.45 * bar_width, middle + 0.45 * bar_width, color=palette.INK, linewidth=1.4
            )
        axes.annotate(text, (middle, top), (0, 3), size=6, **_ABOVE)


def _legend(figure: Figure, axes: Axes, bars: Bars, width: float) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    handles, _ = axes.get_legend_handles_labels()
    if bars.mark:
        handles.append(Line2D([], [], color=palette.INK, linewidth=1.4, label=bars.mark))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.05 / width, 0.895),
        ncols=len(handles) if width > _WIDE else 4,
        fontsize=7.5,
        columnspacing=1.2,
        handlelength=1.3,
    )
