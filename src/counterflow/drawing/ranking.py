"""Schedules of one model, fastest first: one bar per step, with each worker's memory next to it.

Invariant: the same rows give the same file. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import palette
from .saving import saved, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Ranked:
    """One row.

    Attributes:
        name: name of the schedule.
        step: duration of a mini-batch in seconds, or in forwards.
        bubble_ratio: share of the step in which a worker is idle.
        activations: maximum activations that a worker holds.
        weights: copies of its share of the model that a worker holds.
        synchronous: whether the numbers equal those of one process.
    """

    name: str
    step: float
    bubble_ratio: float
    activations: float
    weights: float
    synchronous: bool


_ROW, _TOP, _BOTTOM, _WIDTH = 0.24, 0.72, 0.42, 9.0  # inches
_NAMES = 0.29  # share of the width


def draw_ranking(rows: Sequence[Ranked], path: str | Path, *, title: str, about: str, unit: str) -> None:
    """Write the rows into a file; an existing one is replaced.

    Args:
        rows: rows to draw, from the top.
        path: see ``saved``, also for the errors.
        title: the heading.
        about: the line under it.
        unit: unit of the steps.
    """
    saved(path, lambda: make_ranking(rows, title=title, about=about, unit=unit))


def make_ranking(rows: Sequence[Ranked], *, title: str, about: str, unit: str) -> Figure:
    """The figure: three panels with a row each, for steps, activations and weights."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    height = _TOP + _BOTTOM + _ROW * max(len(rows), 1)
    figure = sized(_WIDTH, height)
    figure.text(0.015, 1 - 0.2 / height, title, size=10, weight="bold", color=palette.INK)
    figure.text(0.015, 1 - 0.4 / height, about, size=7.5, color=palette.FAINT)
    bottom, tall = _BOTTOM / height, 1 - (_TOP + _BOTTOM) / height
    panels = {
        f"step, {unit}": (_NAMES, 0.39, [row.step for row in rows]),
        "activations per worker": (0.71, 0.12, [row.activations for row in rows]),
        "weights per worker": (0.86, 0.12, [row.weights for row in rows]),
    }
    for number, (label, (x, width, values)) in enumerate(panels.items()):
        axes = figure.add_axes((x, bottom, width, tall), label=label)
        _panel(axes, rows, values, label, idle=number == 0)
    keys = [("computing", palette.HUES[0].forward), ("idle", palette.BACKGROUND)]
    if not all(row.synchronous for row in rows):
        keys.append(("asynchronous: older weights", palette.HUES[1].forward))
    handles = [Patch(facecolor=face, edgecolor=palette.HUES[0].backward, label=key) for key, face in keys]
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.99, 1 - 0.08 / height),
        ncols=len(handles),
        fontsize=7.5,
    )
    return figure


_VALUE_TEXT: dict[str, Any] = {"textcoords": "offset points", "va": "center", "color": palette.INK}


def _panel(axes: Axes, rows: Sequence[Ranked], values: Sequence[float], label: str, *, idle: bool) -> None:
    most = max(values, default=1.0)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        hue = palette.HUES[0 if row.synchronous else 1]
        filled = value * (1 - row.bubble_ratio) if idle else value
        axes.barh(place, value, 0.72, color=palette.BACKGROUND, edgecolor=hue.backward, linewidth=0.6)
        axes.barh(place, filled, 0.72, color=hue.forward, edgecolor=hue.backward, linewidth=0.6)
        axes.annotate(f"{value:.4g}", (value, place), (3, 0), size=7, **_VALUE_TEXT)
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * most or 1.0)
    axes.set_yticks(range(len(rows)), [row.name for row in rows] if idle else [""] * len(rows), fontsize=7.5)
    axes.set_xlabel(label, fontsize=7.5, color=palette.INK)
    axes.tick_params(axis="x", labelsize=7, colors=palette.FAINT, width=0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
