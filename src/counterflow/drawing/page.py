"""One HTML page that works offline: hovering shows an op, the wheel, the mouse and the keys move in time.

The page is ``page.html`` with ``timeline.css``, ``timeline.js`` and, as JSON, the charts inserted; it loads
nothing. Ops are columns of numbers, with every repeated text written once, so 100,000 of them are a few
megabytes.

Invariant: text from a chart reaches the page only as JSON in which ``<``, ``>`` and ``&`` are escaped, and
the page shows it only as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from . import palette
from .chart import (
    LETTERS,
    BoxKind,
    Chart,
    Memory,
    band_of,
    marks_input_gradients,
    shared_end,
    shared_peak,
    shared_unit,
    ways,
)

_NUMBERS = {kind: number for number, kind in enumerate(BoxKind)}


def write_page(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts as a page."""
    path.write_text(page(charts), encoding="utf-8")


def page(charts: Sequence[Chart]) -> str:
    """The page's text."""
    template = asset("page.html")
    for mark, name in (("STYLE", "timeline.css"), ("CODE", "timeline.js")):
        template = template.replace(f"/* PUT THE {mark} HERE */\n", asset(name), 1)
    # None of these can end the enclosing script element.
    text = json.dumps(page_data(charts), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return template.replace('"PUT THE DATA HERE"', text, 1)


def asset(name: str) -> str:
    """The text of one of the page's own files: ``page.html``, ``timeline.css`` or ``timeline.js``."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def page_data(charts: Sequence[Chart]) -> dict[str, object]:
    """The data that the page draws, as plain lists and dictionaries."""
    marked = marks_input_gradients(charts)
    bands = [band_of(kind, marked=marked) for kind in BoxKind]
    return {
        "end": _number(shared_end(charts)),
        "unit": shared_unit(charts).symbol,
        "hues": [list(hue.shades) for hue in palette.HUES],
        "neutral": list(palette.NEUTRAL.shades),
        "letters": [LETTERS.get(kind, "") for kind in BoxKind],
        "shades": [kind.shade and kind.shade.value for kind in BoxKind],
        "syncKind": _NUMBERS[BoxKind.SYNC],
        "bands": [band and band.value for band in bands],
        "sync": [palette.SYNC, palette.SYNC_HATCH],
        "memory": palette.MEMORY,
        "ink": list(palette.INKS.shades),
        "charts": [_chart(chart, charts) for chart in charts],
    }


def _chart(chart: Chart, charts: Sequence[Chart]) -> dict[str, object]:
    def place(index: int) -> tuple[int, bool, float, float]:
        box = chart.boxes[index]
        return box.worker, box.kind is BoxKind.SYNC, box.start, box.end

    order = sorted(range(len(chart.boxes)), key=place)
    number = {old: new for new, old in enumerate(order)}
    boxes = [chart.boxes[index] for index in order]
    bubbles = sorted(chart.bubbles, key=lambda b: (b.worker, b.start))
    texts = Texts()
    return {
        "heading": chart.heading,
        "summary": chart.summary,
        "workers": chart.workers,
        "makespan": _number(chart.makespan),
        "lanes": [[lane.name, lane.hue] for lane in chart.lanes],
        "kinds": [_NUMBERS[kind] for kind in chart.kinds],
        "ways": ways(chart),
        "legend": [[hue, text] for hue, text in chart.legend()],
        "steady": chart.steady and [[_number(a), _number(b)] for a, b in chart.steady],
        "memory": chart.memory and _memory(chart.memory, charts),
        "worker": [box.worker for box in boxes],
        "start": [_number(box.start) for box in boxes],
        "end": [_number(box.end) for box in boxes],
        "kind": [_NUMBERS[box.kind] for box in boxes],
        "lane": [-1 if box.lane is None else box.lane for box in boxes],
        "stage": [box.stage for box in boxes],
        "label": [texts.number(box.label) for box in boxes],
        "what": [texts.number(box.what) for box in boxes],
        "detail": [texts.number(box.detail) for box in boxes],
        "needs": [[number[need] for need in box.needs] for box in boxes],
        "slack": chart.slack and [None if i >= len(chart.slack) else _number(chart.slack[i]) for i in order],
        "circle": [[number[waits], number[maker]] for waits, maker in chart.circle],
        "limit": chart.limit and _numbers(chart.limit),
        "split": chart.split,
        "messages": [[m.sender, m.receiver, _number(m.start), _number(m.end)] for m in chart.messages],
        "bubbles": [[b.worker, _number(b.start), _number(b.end), texts.number(b.cause)] for b in bubbles],
        "texts": texts.all,
    }


class Texts:
    """Texts by number, each stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of ``text``."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> list[str]:
        """Every text, at its number."""
        return list(self._numbers)


def _memory(memory: Memory, charts: Sequence[Chart]) -> dict[str, object]:
    return {
        "unit": memory.unit.value,
        "most": _number(shared_peak(charts, memory.unit)),
        "peaks": [memory.unit.short(use.peak) for use in memory.workers],
        "times": [_numbers(use.times) for use in memory.workers],
        "amounts": [_numbers(use.amounts) for use in memory.workers],
    }


def _numbers(values: Iterable[float]) -> list[float | int]:
    return [_number(value) for value in values]


def _number(value: float) -> float | int:
    rounded = float(f"{value:.10g}")
    return int(rounded) if rounded.is_integer() else rounded
