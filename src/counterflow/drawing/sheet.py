"""Sizes in a figure, in inches: those that all panels share, and the texts of a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from counterflow.errors import ConfigError

from . import palette
from .chart import BoxKind, Chart, Memory, marks_input_gradients, shared_end, shared_peak, shared_unit, ways
from .look import USUAL, Look
from .time_units import TimeUnit

LEFT_MARGIN, RIGHT, EDGE = 0.55, 0.25, 0.12
PEAKS = 0.8  # right margin that contains the peaks of memory
TITLE, LEGEND, TICKS, SPLIT, CAPTION = 0.5, 0.19, 0.34, 0.2, 0.3
NARROWEST = 1.0  # inches of a time axis
FEW = 8  # maximum number of workers whose memory is drawn as areas


@dataclass(frozen=True, slots=True)
class Sheet:
    """Sizes that all panels share. Lengths in inches, ``end`` in seconds."""

    charts: tuple[Chart, ...]
    end: float
    unit: TimeUnit
    plot_width: float
    row: float
    right: float
    marked: bool
    grey: bool

    @classmethod
    def of(cls, charts: Sequence[Chart], look: Look = USUAL) -> Sheet:
        """Sizes with which the shortest usual op has room for its number, within reason.

        Args:
            charts: charts to draw.
            look: look of the picture.

        Raises:
            ConfigError: the width leaves no room.
        """
        end = shared_end(charts)
        lasting = [
            box.end - box.start
            for chart in charts
            for box in chart.boxes
            if box.kind is BoxKind.FORWARD and box.end > box.start
        ]
        wanted = 0.26 * end / median(lasting) if lasting else 0.0
        workers = max((chart.workers for chart in charts), default=1)
        # 8 workers get 0.34 inches each, 32 get 0.2, 100 get 0.09.
        row = min(0.34, max(0.03, 1.1 / workers**0.5 if workers <= 32 else 8 / (workers + 8)))
        right = PEAKS if any(chart.memory for chart in charts) else RIGHT
        plot = min(17.0, max(6.6, wanted))
        if look.width is not None:
            plot = look.width - LEFT_MARGIN - right
            if plot < NARROWEST:
                raise ConfigError(
                    f"width={look.width:g}: must be {LEFT_MARGIN + right + NARROWEST:g} inches or more"
                )
        return cls(
            tuple(charts),
            end,
            shared_unit(charts),
            plot,
            row,
            right,
            marks_input_gradients(charts),
            look.grey,
        )

    @property
    def width(self) -> float:
        """Width of the picture."""
        return LEFT_MARGIN + self.plot_width + self.right

    @property
    def height(self) -> float:
        """Height of the picture."""
        return 2 * EDGE + sum(self.panel_height(chart) for chart in self.charts)

    @property
    def points_per_second(self) -> float:
        """Typographic points per second of the time axis."""
        return 72 * self.plot_width / self.end

    def handle(self, chart: Chart) -> float:
        """Length of a legend's boxes, in font sizes: room for each kind of op."""
        return max(2.4, 1.2 * len(chart.kinds))

    def legend_columns(self, chart: Chart) -> int:
        """Number of legend entries that fit next to each other."""
        handle = self.handle(chart) * 8 / 72
        widths = [0.36 + handle + 0.066 * len(text) for text in legend_texts(chart)]
        for columns in range(len(widths), 1, -1):
            if sum(max(widths[i::columns]) for i in range(columns)) <= self.plot_width:
                return columns
        return 1

    def legend_height(self, chart: Chart) -> float:
        """Height of a panel's legend, and of the space below it."""
        return 0.06 + LEGEND * -(-len(legend_texts(chart)) // self.legend_columns(chart))

    def rows_height(self, chart: Chart) -> float:
        """Height of a panel's rows."""
        return self.row * chart.workers * (1.25 if chart.has_syncs else 1.0)

    def memory_height(self, chart: Chart) -> float:
        """Height of the memory below a panel's rows."""
        return (self.row if chart.workers <= FEW else 0.75 * self.row) * chart.workers

    def most(self, memory: Memory) -> float:
        """The maximum of any chart's memory in the same unit, so charts can be compared."""
        return shared_peak(self.charts, memory.unit)

    def panel_height(self, chart: Chart) -> float:
        """Height of a whole panel."""
        height = TITLE + self.legend_height(chart) + self.rows_height(chart) + TICKS + SPLIT + 0.08
        if chart.memory:
            height += CAPTION + self.memory_height(chart) + TICKS
        return height


def hues_of(chart: Chart, *, grey: bool = False) -> list[tuple[palette.Hue, str]]:
    """The legend's hues: the meaning of shades, then each hue if there are several."""
    entries = chart.legend()
    if len(entries) == 1 and not entries[0][1]:
        return [(palette.hue(entries[0][0], grey=grey), ways(chart))]
    return [
        (palette.NEUTRAL, ways(chart)),
        *((palette.hue(number, grey=grey), text) for number, text in entries),
    ]


def legend_texts(chart: Chart) -> list[str]:
    """The texts of a legend, in its order."""
    texts = [text for _, text in hues_of(chart)]
    if chart.has_syncs:
        texts.append("gradient sync")
    texts.append("bubble")
    if chart.steady is not None:
        texts.append("steady part")
    return texts
