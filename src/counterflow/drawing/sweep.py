"""Bubbles of schemes over a size or a cost, one line per scheme.

Invariant: the same numbers give the same file. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import palette
from .saving import saved, sized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.5, 4.2  # inches
_MARKERS = "os^vDPX*<>"


def draw_sweep(
    lines: Mapping[str, Sequence[float | None]],
    values: Sequence[float],
    path: str | Path,
    *,
    title: str,
    label: str,
) -> None:
    """Write the picture into a file; an existing one is replaced.

    Args:
        lines: bubble ratios by name, one per value; None: no schedule.
        values: values of the size or cost.
        path: see ``saved``, also for the errors.
        title: the heading.
        label: noun of the values.
    """
    saved(path, lambda: make_sweep(lines, values, title=title, label=label))


def make_sweep(
    lines: Mapping[str, Sequence[float | None]], values: Sequence[float], *, title: str, label: str
) -> Figure:
    """The figure."""
    figure = sized(_WIDTH, _HEIGHT)
    axes = figure.add_axes((0.09, 0.12, 0.6, 0.78), label=label)
    for number, (name, ratios) in enumerate(lines.items()):
        points = [(x, 100 * y) for x, y in zip(values, ratios, strict=True) if y is not None]
        hue = palette.HUES[number % len(palette.HUES)]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=hue.backward,
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle="-" if number < len(palette.HUES) else "--",
            linewidth=1.2,
            markersize=4,
            label=name,
        )
    axes.set_title(title, fontsize=10, loc="left", color=palette.INK)
    axes.set_xlabel(label, fontsize=8, color=palette.INK)
    axes.set_ylabel("bubbles, % of a step", fontsize=8, color=palette.INK)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7, colors=palette.FAINT, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="upper left", bbox_to_anchor=(0.7, 0.92), fontsize=7, frameon=False)
    return figure
