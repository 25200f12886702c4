"""The look of boxes and lines, in a chart and in its legend."""

from __future__ import annotations

from typing import Any

from matplotlib.legend_handler import HandlerPatch, HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from . import palette
from .chart import BoxKind, Chart, band_of
from .sheet import hues_of

BAND = 0.16
"""Share of a box's height in which input gradients and recomputations are marked."""

STEADY: dict[str, Any] = {"color": palette.INK, "linewidth": 1.3, "linestyle": (0, (3, 1.5))}
"""Style of the lines around the steady part."""


def handles_of(chart: Chart, *, marked: bool, grey: bool = False) -> list[Any]:
    """The samples that a legend draws before each of its texts.

    Args:
        chart: chart of the legend.
        marked: whether a band distinguishes input gradients from backwards.
        grey: whether hatches instead of colours distinguish lanes.
    """

    def patch(colour: str, **style: Any) -> Patch:
        # The types of Patch's keywords are not known one by one.
        return Patch(facecolor=colour, edgecolor=palette.INK, linewidth=0.5, **style)

    handles: list[Any] = []
    for hue, _ in hues_of(chart, grey=grey):
        swatches = [patch(colour_of(hue, kind), **hatched(hue, kind)) for kind in chart.kinds]
        for place, kind in enumerate(chart.kinds):
            if (band := band_of(kind, marked=marked)) is not None:
                swatches[place] = _Marked(
                    facecolor=colour_of(hue, kind),
                    edgecolor=palette.INK,
                    linewidth=0.5,
                    label=hue.shades[band.value],
                )
        handles.append(tuple(swatches))
    if chart.has_syncs:
        handles.append(patch(palette.SYNC, hatch="//////"))
    handles.append(
        Patch(facecolor=palette.BACKGROUND, edgecolor=palette.FAINT, linewidth=0.7, linestyle=(0, (3, 2)))
    )
    if chart.steady is not None:
        handles.append(Line2D([], [], **STEADY))
    return handles


class _Marked(Patch):
    pass


class _MarkedHandler(HandlerPatch):
    def create_artists(
        self, legend: Any, orig_handle: Any, xdescent: float, ydescent: float, *size: Any
    ) -> list[Any]:
        """The box, and the band at its foot."""
        width, height, _, transform = size
        artists: list[Any] = list(super().create_artists(legend, orig_handle, xdescent, ydescent, *size))
        place = (-xdescent + 0.4, -ydescent + 0.4)
        band = Rectangle(place, width - 0.8, 1.6 * BAND * height, color=orig_handle.get_label(), lw=0)
        band.set_transform(transform)
        return [*artists, band]


def colour_of(hue: palette.Hue, kind: BoxKind) -> str:
    """The colour of boxes of a kind, in a micro-batch's hue."""
    assert kind.shade is not None, "a sync has no hue"
    return hue.shades[kind.shade.value]


def hatched(hue: palette.Hue, kind: BoxKind) -> dict[str, str]:
    """Style of a hue's hatch on a kind of boxes; empty for a hue without one."""
    return {"hatch": hue.hatch, "hatchcolor": colour_of(palette.HATCHES, kind)} if hue.hatch else {}


HANDLERS = {tuple: HandlerTuple(ndivide=None, pad=0), _Marked: _MarkedHandler()}
"""Legend handlers."""
