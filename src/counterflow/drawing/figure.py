"""PNG, SVG and PDF, drawn with matplotlib objects; pyplot and its global state are not used.

Every chart is a panel: heading, summary, legend, one row per worker, and its memory below. All positions are
computed in inches from the top, so nothing overlaps at any number of workers. This module imports matplotlib
and is itself imported when a picture is made. Invariant: the same charts give the same file. Nothing is shown
on a screen.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Transform

from . import palette
from .box_styles import BAND, HANDLERS, STEADY, colour_of, handles_of, hatched
from .chart import Box, BoxKind, Chart, Memory, band_of, steps_until
from .grey import in_grey
from .look import USUAL, Look
from .saving import SETTINGS, UNDATED, sized
from .sheet import CAPTION, EDGE, FEW, LEFT_MARGIN, SPLIT, TICKS, TITLE, Sheet, legend_texts
from .svg_titles import group_of, titles_of, with_titles
from .time_units import nice_step

_INSIDE: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 3}
_CHARACTER = 0.64  # width of a digit of DejaVu Sans, in font sizes
_SMALLEST = 4.5  # font size below which numbers are omitted

Rectangle = tuple[float, float, float, float]
"""Left, right, bottom, top in data coordinates."""


def write_figure(charts: Sequence[Chart], path: Path, form: str, look: Look = USUAL) -> Figure:
    """Write the charts, one under the other, as ``form``: ``png``, ``svg`` or ``pdf``."""
    figure = styled(charts, look)
    with mpl.rc_context(SETTINGS):
        if form == "svg":
            path.write_text(_svg_text(figure, charts), encoding="utf-8")
        else:
            figure.savefig(path, format=form, metadata=UNDATED[form])
    return figure


def svg(charts: Sequence[Chart]) -> str:
    """The charts, one under the other, as an SVG's text."""
    with mpl.rc_context(SETTINGS):
        return _svg_text(make_figure(charts), charts)


def _svg_text(figure: Figure, charts: Sequence[Chart]) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=UNDATED["svg"])
    return with_titles(file.getvalue(), titles_of(charts))


def styled(charts: Sequence[Chart], look: Look) -> Figure:
    """The figure of the charts in the look that the caller wants."""
    with mpl.rc_context(_settings(look)):
        figure = make_figure(charts, look)
    if look.grey:
        in_grey(figure)
    return figure


def _settings(look: Look) -> dict[Any, Any]:
    return SETTINGS if look.font is None else SETTINGS | {"font.family": [look.font]}


def draw_on(axes: Axes, chart: Chart, look: Look) -> Figure:
    """Draw a chart's timeline, with its legend above, on axes of the caller's figure."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    place, (width, height) = axes.get_position(), figure.get_size_inches()
    sheet = replace(Sheet.of([chart], replace(look, width=None)), plot_width=float(place.width * width))
    with mpl.rc_context(_settings(look)):
        panel = _Panel(figure, sheet, chart, 0)
        panel.height = float(place.height * height)
        panel.on(axes)
        axes.set_xlabel(f"time ({sheet.unit.symbol})", fontsize=8.5, labelpad=2)
        pad = 72 * sheet.legend_height(chart) + 3
        axes.set_title(chart.heading, loc="left", fontsize=10, pad=pad)
    if look.grey:
        in_grey(axes)
    return figure


def make_figure(charts: Sequence[Chart], look: Look = USUAL) -> Figure:
    """The figure of the charts; axes are labelled ``timeline 0``, ``memory 0`` and so on."""
    sheet = Sheet.of(charts, look)
    figure = sized(sheet.width, sheet.height)
    top = EDGE
    for index, chart in enumerate(charts):
        top = _Panel(figure, sheet, chart, index).draw(top)
    return figure


class _Panel:
    def __init__(self, figure: Figure, sheet: Sheet, chart: Chart, index: int) -> None:
        self.figure, self.sheet, self.chart, self.index = figure, sheet, chart, index
        self.height = sheet.rows_height(chart)
        self.floor = 0.74 if chart.has_syncs else 0.93

    def draw(self, top: float) -> float:
        """Draw from ``top`` inches down; return where the panel ends."""
        chart, sheet = self.chart, self.sheet
        bottom = top + sheet.panel_height(chart)
        last = self.index == len(sheet.charts) - 1
        self._text(top + 0.17, chart.heading, size=11, weight="bold", color=palette.INK)
        room = 72 * (sheet.width - LEFT_MARGIN) / (0.55 * max(len(chart.summary), 1))
        self._text(top + 0.38, chart.summary, size=min(9.0, room), color=palette.FAINT)
        top += TITLE
        middle = (0.07 + self.floor) / 2
        below = top + sheet.legend_height(chart)
        axes = self._axes(f"timeline {self.index}", below, self.height, middle)
        self._legend(axes, (LEFT_MARGIN / sheet.width, self._fraction(top)), self.figure.transFigure)
        self._timeline(axes)
        top = below + self.height + TICKS + SPLIT
        self._text(top - 0.07, chart.split, size=8.5, color=palette.FAINT)
        if chart.memory is not None:
            axes = self._axes(f"memory {self.index}", top + CAPTION - 0.06, sheet.memory_height(chart), 0.5)
            self._memory(axes, chart.memory, top)
        if last:
            axes.set_xlabel(f"time ({sheet.unit.symbol})", fontsize=8.5, labelpad=2)
        return bottom

    # --- places ---

    def _fraction(self, top: float) -> float:
        return 1 - top / self.sheet.height

    def _text(self, top: float, text: str, **style: Any) -> None:
        self.figure.text(LEFT_MARGIN / self.sheet.width, self._fraction(top), text, va="center", **style)

    def _axes(self, name: str, top: float, height: float, middle: float) -> Axes:
        sheet = self.sheet
        place = (
            LEFT_MARGIN / sheet.width,
            self._fraction(top + height),
            sheet.plot_width / sheet.width,
            height / sheet.height,
        )
        axes = self.figure.add_axes(place, label=name)
        self._rows(axes, height, middle)
        return axes

    def on(self, axes: Axes) -> None:
        """Draw the timeline on existing axes, and its legend above them."""
        self._rows(axes, self.height, (0.07 + self.floor) / 2)
        self._timeline(axes)
        above = self.sheet.legend_height(self.chart) / self.height
        self._legend(axes, (0, 1 + above), axes.transAxes)

    def _rows(self, axes: Axes, height: float, middle: float) -> None:
        sheet, workers = self.sheet, self.chart.workers
        axes.set_xlim(0, sheet.end)
        axes.set_ylim(workers, 0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(palette.FAINT)
        points = 72 * height / workers
        size = min(9.0, max(5.5, 0.62 * points))
        stride = max(1, -(-int(size * 1.25 * 10) // int(points * 10)))
        shown = range(0, workers, stride)
        axes.set_yticks([w + middle for w in shown], [str(w) for w in shown])
        axes.set_ylabel("worker", fontsize=min(8.5, size), labelpad=3, color=palette.INK)
        axes.tick_params(axis="y", length=0, pad=3, labelsize=size, labelcolor=palette.INK)
        axes.tick_params(axis="x", length=3, pad=2, labelsize=8, color=palette.FAINT, width=0.6)
        axes.tick_params(axis="x", labelcolor=palette.INK)
        unit = sheet.unit.seconds
        step = nice_step(sheet.end / unit, max(4, int(sheet.plot_width / 0.45)))
        ticks = [i * step for i in range(int(sheet.end / unit / step + 1e-9) + 1)]
        axes.set_xticks([tick * unit for tick in ticks], [f"{tick:.6g}" for tick in ticks])
        axes.hlines(range(1, workers), 0, self.chart.makespan, color="#e3e6ea", linewidth=0.5, zorder=0)
        axes.vlines(
            self.chart.makespan, 0, workers, color=palette.FAINT, linewidth=0.8, zorder=1.5
        ).set_clip_on(False)

    # --- the timeline ---

    def _timeline(self, axes: Axes) -> None:
        chart = self.chart
        groups: dict[tuple[BoxKind, int | None], list[Box]] = {}
        for box in chart.boxes:
            groups.setdefault((box.kind, box.lane), []).append(box)
        for (kind, lane), boxes in groups.items():
            if lane is None:
                self._boxes(axes, boxes, facecolor=palette.SYNC, hatch="//////")
                continue
            hue = palette.hue(chart.lanes[lane].hue, grey=self.sheet.grey)
            self._boxes(axes, boxes, facecolor=colour_of(hue, kind), **hatched(hue, kind))
            if (band := band_of(kind, marked=self.sheet.marked)) is not None:
                self._marks(axes, boxes, hue.shades[band.value])
        for kind in chart.kinds:
            self._labels(axes, [box for box in chart.boxes if box.kind is kind], kind)
        self._bubbles(axes)
        self._messages(axes)
        if chart.steady is not None:
            self._steady(axes, chart.steady)

    def _boxes(self, axes: Axes, boxes: Sequence[Box], **style: Any) -> None:
        shortest = min((b.end - b.start for b in boxes if b.end > b.start), default=0.0)
        points = shortest * self.sheet.points_per_second
        # An edge is thin relative to its box; if it would cover the box, neighbours touch instead.
        edge = min(0.5, points / 12)
        axes.add_collection(
            PolyCollection(
                [_corners(*self._rectangle(box)) for box in boxes],
                edgecolor=palette.SYNC_HATCH if boxes[0].kind is BoxKind.SYNC else palette.INK,
                linewidth=edge if edge > 0.15 else 0.0,
                gid=group_of(self.index, boxes[0].kind, boxes[0].lane),
                zorder=2,
                **style,
            ),
            autolim=False,
        )

    def _bubbles(self, axes: Axes) -> None:
        spaces = [
            _corners(bubble.start, bubble.end, bubble.worker + self.floor, bubble.worker + 0.07)
            for bubble in self.chart.bubbles
        ]
        if spaces:
            name = f"chart-{self.index}-bubbles"
            paper = PolyCollection(spaces, facecolor=palette.BACKGROUND, linewidth=0, zorder=1, gid=name)
            axes.add_collection(paper, autolim=False)

    def _messages(self, axes: Axes) -> None:
        if not self.chart.messages:
            return
        ends = []
        for arrow in self.chart.messages:
            down = 0.25 if arrow.receiver > arrow.sender else -0.25
            from_, to = arrow.sender + self.floor / 2 + down, arrow.receiver + self.floor / 2 - down
            ends.append((arrow.start, from_, arrow.end - arrow.start, to - from_))
        x, y, right, below = zip(*ends, strict=True)
        axes.quiver(
            x, y, right, below, angles="xy", scale_units="xy", scale=1, units="dots", width=2.2,
            headwidth=4, headlength=5, headaxislength=4.5, color=palette.INK, alpha=0.75, zorder=4,
            edgecolor=palette.BACKGROUND, linewidth=0.4, gid=f"chart-{self.index}-messages",
        )  # fmt: skip

    def _marks(self, axes: Axes, boxes: Sequence[Box], colour: str) -> None:
        bands = []
        for x_min, x_max, bottom, top in map(self._rectangle, boxes):
            tall = bottom - top
            bands.append(_corners(x_min, x_max, bottom - 0.02 * tall, bottom - BAND * tall))
        axes.add_collection(PolyCollection(bands, facecolor=colour, linewidth=0, zorder=2.5), autolim=False)

    def _rectangle(self, box: Box) -> Rectangle:
        if box.kind is BoxKind.SYNC:
            return box.start, box.end, box.worker + 0.97, box.worker + 0.77
        return box.start, box.end, box.worker + self.floor, box.worker + 0.07

    def _labels(self, axes: Axes, boxes: Sequence[Box], kind: BoxKind) -> None:
        tall = (self.floor - 0.07) * self.height * 72 / self.chart.workers
        scale = self.sheet.points_per_second
        sizes = [
            min(8.0, 0.6 * tall, ((b.end - b.start) * scale - 1.5) / (_CHARACTER * max(1, len(b.label))))
            for b in boxes
        ]
        if 2 * sum(size >= _SMALLEST for size in sizes) < len(sizes):
            return
        ink = colour_of(palette.INKS, kind)
        # In a picture with hatches, a number has a rim in its box's grey.
        rim = [withStroke(linewidth=2.0, foreground=colour_of(palette.GREY, kind))] if self.sheet.grey else []
        for box, size in zip(boxes, sizes, strict=True):
            if size >= _SMALLEST:
                x_min, x_max, bottom, top = self._rectangle(box)
                axes.text(
                    (x_min + x_max) / 2,
                    (bottom + top) / 2,
                    box.label,
                    size=size,
                    color=ink,
                    path_effects=rim,
                    **_INSIDE,
                )

    def _steady(self, axes: Axes, steady: Sequence[tuple[float, float]]) -> None:
        for side in (0, 1):
            at = [window[side] for window in steady]
            axes.plot(
                [x for x in at for _ in (0, 1)],
                [y for w in range(len(at)) for y in (w, w + 1)],
                **STEADY,
                zorder=4,
                gid=f"chart-{self.index}-steady-{side}",
            )

    # --- the legend ---

    def _legend(self, axes: Axes, corner: tuple[float, float], unit: Transform) -> None:
        handles = handles_of(self.chart, marked=self.sheet.marked, grey=self.sheet.grey)
        columns = self.sheet.legend_columns(self.chart)
        texts = legend_texts(self.chart)
        # matplotlib fills columns first; people read rows first.
        rows = -(-len(texts) // columns)
        columns = -(-len(texts) // rows)
        reading = [i for column in range(columns) for i in range(column, len(texts), columns)]
        axes.legend(
            [handles[i] for i in reading],
            [texts[i] for i in reading],
            handler_map=HANDLERS,
            loc="upper left",
            bbox_to_anchor=corner,
            bbox_transform=unit,
            ncols=columns,
            fontsize=8,
            labelcolor=palette.INK,
            borderaxespad=0,
            borderpad=0,
            handlelength=self.sheet.handle(self.chart),
            handleheight=0.9,
            columnspacing=1.6,
            labelspacing=0.5,
        )

    # --- memory ---

    def _memory(self, axes: Axes, memory: Memory, top: float) -> None:
        chart, peak = self.chart, self.sheet.most(memory)
        steps = [
            (worker, *step)
            for worker, use in enumerate(memory.workers)
            for step in steps_until(use, chart.makespan)
        ]
        few = chart.workers <= FEW
        areas = PolyCollection(
            [
                _corners(start, stop, w + 0.96, w + (0.96 - 0.86 * amount / peak if few else 0.04))
                for w, start, stop, amount in steps
            ],
            facecolor=palette.MEMORY,
            linewidth=0,
            # Steps share edges, and smoothing each alone would show as stripes.
            antialiased=False,
            gid=f"chart-{self.index}-memory",
            zorder=2,
        )
        if few:
            caption = f"memory of each worker, a full row is {memory.unit.text(peak)}"
        else:
            scale = LinearSegmentedColormap.from_list("memory", palette.HEAT)
            areas.set_facecolor([scale(amount / peak) for *_, amount in steps])
            caption = "memory of each worker"
            self._scale(scale, memory.unit.short(peak), top)
        axes.add_collection(areas, autolim=False)
        self._text(top + CAPTION - 0.18, caption, size=8.5, color=palette.FAINT)
        self._peaks(axes, memory)

    def _peaks(self, axes: Axes, memory: Memory) -> None:
        size = axes.yaxis.get_ticklabels()[0].get_fontsize()
        x, by = 1 + 0.08 / self.sheet.plot_width, axes.get_yaxis_transform()
        for tick in axes.get_yticks():
            peak = memory.unit.short(memory.workers[int(tick)].peak)
            axes.text(x, tick, peak, size=min(8.0, size), va="center", color=palette.INK, transform=by)
        above = -0.08 / (self.sheet.memory_height(self.chart) / self.chart.workers)
        axes.text(x, above, "peak", size=8, va="bottom", color=palette.FAINT, transform=by)

    def _scale(self, scale: LinearSegmentedColormap, most: str, top: float) -> None:
        sheet = self.sheet
        width, height = 1.3, 0.1
        right = LEFT_MARGIN + sheet.plot_width - 0.9
        middle = self._fraction(top + CAPTION - 0.18)
        place = (
            (right - width) / sheet.width,
            middle - height / 2 / sheet.height,
            width / sheet.width,
            height / sheet.height,
        )
        axes = self.figure.add_axes(place, label=f"scale {self.index}")
        axes.imshow([[i / 255 for i in range(256)]], aspect="auto", cmap=scale)
        axes.set_xticks([])
        axes.set_yticks([])
        style: dict[str, Any] = {"size": 8, "va": "center", "transform": axes.transAxes, "color": palette.INK}
        axes.text(-0.04, 0.5, "0", ha="right", **style)
        axes.text(1.04, 0.5, most, ha="left", **style)


def _corners(x_min: float, x_max: float, bottom: float, top: float) -> list[tuple[float, float]]:
    return [(x_min, bottom), (x_max, bottom), (x_max, top), (x_min, top)]
