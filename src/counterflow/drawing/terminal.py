"""A timeline as text: one row per worker, time to the right, at most as wide as the console.

Time goes in slots of the longest duration that divides every start and end, each wide enough for a
micro-batch's number if there is room, so an op of two slots is twice as wide as one of one slot. A timeline
with more slots than characters is scaled: then a character is a slice of time and shows the op that fills
most of it. With colour, hue and shade distinguish ops; without, a forward is a digit, a backward or an input
gradient a small letter and weight gradients a capital. If both backwards and input gradients occur, the
latter are underlined or followed by a quote. Bubbles are dots either way.

Invariant: the same charts, width and colours give the same text. No schedule is read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

from counterflow.common.text_files import can_encode

from . import palette
from .chart import (
    Box,
    BoxKind,
    Chart,
    Memory,
    band_of,
    marks_input_gradients,
    shared_end,
    shared_peak,
    shared_unit,
    steps_until,
    ways,
)
from .time_units import nice_step

_BUBBLE = "."
_LEVELS = " ▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = " 123456789"
_MOST_SLOTS = 4000
_PLAIN = Style.null()
_FAINT = Style(dim=True)


def print_charts(charts: Sequence[Chart], console: Console) -> None:
    """Print charts, one under the other, on one time axis."""
    grid = Grid.of(charts, console)
    for index, chart in enumerate(charts):
        if index:
            console.print()
        for line in _chart_lines(chart, grid):
            console.print(line, highlight=False)
    for note in _notes(charts, grid):
        console.print(Text(note, style=_FAINT), highlight=False)


@dataclass(frozen=True, slots=True)
class Grid:
    """Mapping of time to characters.

    ``slot`` is in seconds and ``wide`` characters show it; ``short``: numbers are cut to one character;
    ``scaled``: ops begin and end within slots; ``room``: number of characters of a row; ``marked``: input
    gradients are distinguished from backwards.
    """

    charts: tuple[Chart, ...]
    end: float
    slot: float
    wide: int
    short: bool
    scaled: bool
    room: int
    margin: int
    colour: bool
    marked: bool
    levels: str

    @classmethod
    def of(cls, charts: Sequence[Chart], console: Console) -> Grid:
        """The widest grid that fits the console."""
        end = shared_end(charts)
        margin = max(len(f"P{chart.workers - 1}") for chart in charts) + 1
        room = max(8, console.width - margin - max(map(_peak_width, charts)))
        ops = [box for chart in charts for box in chart.boxes if box.kind is not BoxKind.SYNC]
        marked = marks_input_gradients(charts)
        colour = console.color_system is not None and not console.no_color
        # A blank keeps neighbours apart.
        wide = 1 + max((len(box.label if colour else _letters(box, marked)) for box in ops), default=1)
        slot = common_slot([t for chart in charts for b in chart.boxes for t in (b.start, b.end)], end)
        scaled = slot is None or round(end / slot) > room
        short = scaled or round(end / (slot or end)) * wide > room
        if slot is None or scaled:
            slot, wide = end / room, 1
        elif short:
            wide = room // round(end / slot)
        levels = _LEVELS if can_encode(console.encoding, _LEVELS) else _PLAIN_LEVELS
        return cls(tuple(charts), end, slot, wide, short, scaled, room, margin, colour, marked, levels)

    @property
    def width(self) -> int:
        """Width of the whole time axis in characters."""
        return round(self.end / self.slot) * self.wide

    def column(self, seconds: float) -> int:
        """The column that contains the time ``seconds``."""
        return round(seconds / self.slot) * self.wide

    def columns(self, chart: Chart) -> int:
        """Width of a chart's makespan in characters."""
        return self.column(chart.makespan)


def common_slot(times: Sequence[float], end: float) -> float | None:
    """The longest slot, within reason, of which all ``times`` are multiples; None if none exists.

    >>> common_slot([0.0, 1.0, 1.0, 3.0], 3.0), common_slot([0.0, 1.0, 2.5], 2.5)
    (1.0, 0.5)
    >>> common_slot([0.0, 1.0, 2.7182818], 2.7182818) is None
    True
    """
    near = 1e-6 * end
    slot = 0.0
    for time in sorted(set(times)):
        # Euclid's algorithm, with a small tolerance for sums of fractions.
        a, b = time, slot
        while b > near:
            a, b = b, a % b
            if a - b < near:
                b = 0.0
        slot = a
        if slot * _MOST_SLOTS < end and slot > near:
            return None
    return slot if slot > near else None


def _peak_width(chart: Chart) -> int:
    if chart.memory is None:
        return 0
    return 1 + max(len(chart.memory.unit.short(use.peak)) for use in chart.memory.workers)


# --- lines ---------------------------------------------------------------------------------------


def _chart_lines(chart: Chart, grid: Grid) -> Iterator[Text]:
    yield Text(chart.heading, style=Style(bold=True))
    yield Text(chart.summary)
    if grid.colour:
        yield from _legend(chart, grid)
    syncs = chart.sync_rows()
    for worker, row in enumerate(chart.rows()):
        yield _row(f"P{worker}", _bubbles(chart, grid), row, chart, grid)
        if chart.has_syncs:
            yield _row("", [(" ", _PLAIN)] * grid.columns(chart), syncs[worker], chart, grid)
    yield from _axis(grid)
    yield Text(chart.split, style=_FAINT)
    if chart.memory is not None:
        yield from _memory(chart, chart.memory, grid)


Cell = tuple[str, Style]


def _bubbles(chart: Chart, grid: Grid) -> list[Cell]:
    return [(_BUBBLE if i % grid.wide == 0 else " ", _FAINT) for i in range(grid.columns(chart))]


def _row(name: str, cells: list[Cell], boxes: Sequence[Box], chart: Chart, grid: Grid) -> Text:
    for start, stop, box in _runs(boxes, len(cells), grid):
        style = _style(box, chart, grid) if grid.colour else _PLAIN
        cells[start:stop] = [(character, style) for character in _filling(box, stop - start, grid)]
    return _text(name, cells, grid)


def _text(name: str, cells: Sequence[Cell], grid: Grid) -> Text:
    line = _grid_line(f"{name:<{grid.margin}}")
    for character, style in cells:
        line.append(character, style)
    if not grid.colour:
        line.rstrip()
    return line


def _grid_line(text: str, style: Style = _PLAIN) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="crop")


def _runs(boxes: Sequence[Box], width: int, grid: Grid) -> Iterator[tuple[int, int, Box]]:
    if not grid.scaled:
        for op in boxes:
            start, stop = grid.column(op.start), grid.column(op.end)
            if start < stop:
                yield start, stop, op
        return
    first = 0
    shown: Box | None = None
    for column, box in enumerate([*_dominant(boxes, width, grid.slot), None]):
        if box is not shown or column == width:
            if shown is not None:
                yield first, column, shown
            first, shown = column, box


def _dominant(boxes: Sequence[Box], width: int, slot: float) -> Iterator[Box | None]:
    index = 0
    for column in range(width):
        begin, end = column * slot, (column + 1) * slot
        while index < len(boxes) and boxes[index].end <= begin:
            index += 1
        most, idle = 0.0, slot
        shown: Box | None = None
        for at in range(index, len(boxes)):
            box = boxes[at]
            if box.start >= end:
                break
            inside = min(box.end, end) - max(box.start, begin)
            idle -= inside
            if inside > most:
                most, shown = inside, box
        yield shown if idle <= most else None


def _filling(box: Box, width: int, grid: Grid) -> str:
    if box.kind is BoxKind.SYNC:
        label = box.label if len(box.label) + 2 <= width else ""
        return f"={label}".ljust(width, "=")
    if grid.colour:
        return box.label.ljust(width) if len(box.label) < width else " " * width
    slots = width // grid.wide
    if not grid.short:
        return _letters(box, grid.marked).ljust(grid.wide) * slots
    # Micro-batches that are computed together divide the slots.
    batches = box.micro_batches or (0,)
    shown = (batches[slot * len(batches) // slots] for slot in range(slots))
    return "".join(_short(box.kind, batch).ljust(grid.wide) for batch in shown)


_FIRST = {
    BoxKind.BACKWARD: "a",
    BoxKind.INPUT_GRADIENT: "a",
    BoxKind.WEIGHT_GRADIENTS: "A",
}
"""The letter of micro-batch 0; other kinds show its number."""

_RECOMPUTED = "'"
"""Mark of a recomputation behind its number, or in place of it."""


def _short(kind: BoxKind, batch: int) -> str:
    if kind is BoxKind.RECOMPUTATION:
        return _RECOMPUTED
    return chr(ord(_FIRST[kind]) + batch % 26) if kind in _FIRST else str(batch % 10)


def _letters(box: Box, marked: bool) -> str:
    if box.kind not in _FIRST:
        return box.label + _RECOMPUTED if box.kind is BoxKind.RECOMPUTATION else box.label
    text = "".join(_letter(m, _FIRST[box.kind]) for m in box.micro_batches)
    # The label of a part ends with the part: 4a is the first half of 4, in letters e1.
    _, dot, number = box.label.partition(".")
    if dot:  # for a sliced micro-batch the number of the slice follows, as in forwards
        return f"{text}.{number}"
    last = box.label[-1:]
    if last.isalpha():
        text += str(ord(last) - ord("a") + 1)
    return text + "'" if marked and box.kind is BoxKind.INPUT_GRADIENT else text


def _letter(number: int, first: str) -> str:
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord(first) + rest) + text
    return text


def _style(box: Box, chart: Chart, grid: Grid) -> Style:
    if box.lane is None:
        return Style(color=palette.SYNC_HATCH, bgcolor=palette.SYNC)
    return _shaded(palette.hue(chart.lanes[box.lane].hue), box.kind, grid)


def _shaded(hue: palette.Hue, kind: BoxKind, grid: Grid) -> Style:
    shade = (kind.shade or palette.Shade.LIGHT).value
    line = band_of(kind, marked=grid.marked) is not None
    return Style(color=palette.INKS.shades[shade], bgcolor=hue.shades[shade], underline=line or None)


def _axis(grid: Grid) -> Iterator[Text]:
    unit = shared_unit(grid.charts)
    span = grid.end / unit.seconds
    step = nice_step(span, max(1, grid.width // (len(f"{span:.4g}") + 3)))
    slot_seconds = grid.slot / unit.seconds
    if not grid.scaled and step < slot_seconds:
        step = slot_seconds
    cells = [" "] * grid.room
    tick = 0.0
    while tick <= span * (1 + 1e-9):
        column = int(tick / span * grid.width + 1e-6)
        text = f"{tick:.6g}"
        if column + len(text) <= grid.room:
            cells[column : column + len(text)] = text
        tick = round(tick + step, 9)
    yield _grid_line(f"{unit.symbol:<{grid.margin}}{''.join(cells).rstrip()}", _FAINT)


def _memory(chart: Chart, memory: Memory, grid: Grid) -> Iterator[Text]:
    most = shared_peak(grid.charts, memory.unit)
    yield Text(f"memory of each worker, full height is {memory.unit.text(most)}; peaks at the right")
    width, columns = grid.width, grid.columns(chart)
    for worker, use in enumerate(memory.workers):
        amounts = [0.0] * columns
        for start, stop, amount in steps_until(use, chart.makespan):
            first = int(start / grid.end * width + 1e-6)
            after = min(columns, max(first + 1, round(stop / grid.end * width)))
            # A peak shorter than a column is still visible.
            amounts[first:after] = [max(amount, a) for a in amounts[first:after]]
        bars = "".join(_level(amount / most, grid.levels) for amount in amounts)
        peak = memory.unit.short(use.peak)
        yield _grid_line(f"{f'P{worker}':<{grid.margin}}{bars.ljust(width)} {peak}")


def _level(share: float, levels: str) -> str:
    if share <= 0:
        return levels[0]
    return levels[max(1, min(len(levels) - 1, round(share * (len(levels) - 1))))]


# --- words ---------------------------------------------------------------------------------------


def _legend(chart: Chart, grid: Grid) -> Iterator[Text]:
    line = Text()
    for entry in _legend_entries(chart, grid):
        if line and len(line) + 3 + len(entry) > grid.margin + grid.room:
            yield line
            line = Text()
        line.append("   " if line else "").append_text(entry)
    yield line


def _legend_entries(chart: Chart, grid: Grid) -> Iterator[Text]:
    def swatches(hue: palette.Hue, text: str) -> Text:
        return Text.assemble(*(("  ", _shaded(hue, kind, grid)) for kind in chart.kinds), f" {text}")

    entries = chart.legend()
    if len(entries) == 1 and not entries[0][1]:
        yield swatches(palette.hue(entries[0][0]), ways(chart))
    else:
        yield swatches(palette.NEUTRAL, ways(chart))
        for number, text in entries:
            yield swatches(palette.hue(number), text)
    if chart.has_syncs:
        style = Style(color=palette.SYNC_HATCH, bgcolor=palette.SYNC)
        yield Text.assemble(("=1=", style), " gradient sync of stage 1")
    yield Text(f"{_BUBBLE} bubble")
    yield Text("P0 worker 0")


def _notes(charts: Sequence[Chart], grid: Grid) -> Iterator[str]:
    unit = shared_unit(grid.charts)
    if not grid.colour:
        syncs = ", =1= a gradient sync of stage 1" if any(c.has_syncs for c in charts) else ""
        halves = ", b1 and b2 its halves" if _any_parts(charts) and not grid.short else ""
        wrap = "; digits are mod 10, letters mod 26" if grid.short else ""
        gradients = ", ".join(_said(charts, grid))
        ops = f"1 forward of micro-batch 1{gradients and ', '}{gradients}{halves}"
        yield f"{ops}, . bubble{syncs}, P0 worker 0{wrap}"
    if grid.scaled:
        shown = unit.text(grid.slot)
        yield f"scaled to fit: a character is {shown} and shows what fills most of it"


def _said(charts: Sequence[Chart], grid: Grid) -> Iterator[str]:
    kinds = {kind for chart in charts for kind in chart.kinds}
    if BoxKind.RECOMPUTATION in kinds:
        yield f"{'' if grid.short else '1'}{_RECOMPUTED} its {BoxKind.RECOMPUTATION.value}"
    small = [k.value for k in (BoxKind.BACKWARD, BoxKind.INPUT_GRADIENT) if k in kinds]
    if len(small) == 2 and not grid.short:
        yield f"b its {small[0]}, b' its {small[1]}"
    elif small:
        yield f"b its {' or '.join(small)}"
    if BoxKind.WEIGHT_GRADIENTS in kinds:
        yield f"B its {BoxKind.WEIGHT_GRADIENTS.value}"


def _any_parts(charts: Sequence[Chart]) -> bool:
    return any(b.label[-1:].isalpha() for c in charts for b in c.boxes if b.kind in _FIRST)
