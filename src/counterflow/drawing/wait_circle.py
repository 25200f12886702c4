"""Ranks that wait for each other, as a picture: the steps of each rank around the one in which it is stuck.

Invariant: the same circle gives the same file. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import palette
from .saving import saved, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE, _HIGH, _GAP = 1.5, 0.34, 0.55  # inches of a box, and between ranks
_STUCK, _AWAITED = palette.HUES[7], palette.HUES[0]


@dataclass(frozen=True, slots=True)
class WaitLane:
    """Steps of a rank.

    Attributes:
        title: name of the rank.
        steps: labels of its steps, in order.
        stuck: places in ``steps`` of those in which it is stuck.
    """

    title: str
    steps: tuple[str, ...]
    stuck: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitArrow:
    """An arrow from a step that waits to the step that it waits for, each as its lane and its place there."""

    waiting: tuple[int, int]
    awaited: tuple[int, int]


def draw_waits(
    lanes: Sequence[WaitLane], arrows: Sequence[WaitArrow], path: str | Path, *, title: str
) -> None:
    """Write the picture into a file; an existing one is replaced.

    Args:
        lanes: steps of each rank.
        arrows: waits.
        path: see ``saved``, also for the errors.
        title: the heading.
    """
    saved(path, lambda: make_waits(lanes, arrows, title=title))


def make_waits(lanes: Sequence[WaitLane], arrows: Sequence[WaitArrow], *, title: str) -> Figure:
    """The figure."""
    columns = max(len(lane.steps) for lane in lanes)
    width = 0.9 + columns * _WIDE + 0.3
    height = 0.55 + len(lanes) * (_HIGH + _GAP)
    figure = sized(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    axes.text(0.15, 0.2, title, fontsize=9, color=palette.INK, va="center")
    awaited = {arrow.awaited for arrow in arrows}
    for number, lane in enumerate(lanes):
        axes.text(0.15, _middle(number), lane.title, fontsize=8, color=palette.INK, va="center")
        for place, label in enumerate(lane.steps):
            stuck = place in lane.stuck
            fill = _STUCK.forward if stuck else _AWAITED.forward if (number, place) in awaited else "#eef0f3"
            _box(axes, number, place, label, fill)
    for arrow in arrows:
        _arrow(axes, arrow)
    return figure


def _middle(lane: int) -> float:
    return 0.55 + lane * (_HIGH + _GAP) + _HIGH / 2


def _edge(place: int) -> float:
    return 0.9 + place * _WIDE


def _box(axes: Axes, lane: int, place: int, label: str, fill: str) -> None:
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - takes a while to import

    corner = _edge(place), _middle(lane) - _HIGH / 2
    axes.add_patch(
        Rectangle(corner, _WIDE - 0.1, _HIGH, facecolor=fill, edgecolor=palette.FAINT, linewidth=0.6)
    )
    shown = label if len(label) <= 20 else label[:19] + "…"
    middle = _edge(place) + (_WIDE - 0.1) / 2
    axes.text(middle, _middle(lane), shown, fontsize=7, ha="center", va="center", color=palette.INK)


def _arrow(axes: Axes, arrow: WaitArrow) -> None:
    (lane, place), (awaited_lane, awaited_place) = arrow.waiting, arrow.awaited
    down = 1 if awaited_lane > lane else -1 if awaited_lane < lane else 0
    middle = (_WIDE - 0.1) / 2
    begin = _edge(place) + middle, _middle(lane) + down * _HIGH / 2
    end = _edge(awaited_place) + middle, _middle(awaited_lane) - down * _HIGH / 2
    style = {"arrowstyle": "-|>", "color": _STUCK.backward, "linewidth": 1.1, "shrinkA": 1, "shrinkB": 1}
    if not down:
        style["connectionstyle"] = "arc3,rad=-0.5"
        begin, end = (begin[0], begin[1] - _HIGH / 2), (end[0], end[1] - _HIGH / 2)
    axes.annotate("", xy=end, xytext=begin, arrowprops=style)
