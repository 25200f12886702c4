"""Titles that an SVG's viewer shows over each shape of a chart.

matplotlib writes no titles of shapes, so they are inserted into its SVG by the names of the groups in which
shapes are drawn. Nothing else of the SVG is changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .chart import BoxKind, Chart, shared_unit


def titles_of(charts: Sequence[Chart]) -> dict[str, list[str]]:
    """Titles of shapes, by group and in the group's order."""
    titles: dict[str, list[str]] = {}
    for index, chart in enumerate(charts):
        unit = shared_unit([chart])
        for box in chart.boxes:
            rows = [box.what, *(f"{name} {text}".strip() for name, text in chart.facts(box))]
            titles.setdefault(group_of(index, box.kind, box.lane), []).append("\n".join(rows))
        for bubble in chart.bubbles:
            text = f"bubble: {bubble.cause}\nworker {bubble.worker}\n"
            text += f"from {unit.text(bubble.start)} to {unit.text(bubble.end)}"
            titles.setdefault(f"chart-{index}-bubbles", []).append(text)
    return titles


def with_titles(svg: str, titles: dict[str, list[str]]) -> str:
    """The same SVG with a title in each path of the named groups."""
    for name, texts in titles.items():
        start = svg.index(f'<g id="{name}"')
        stop = svg.index("</g>", start)
        paths = re.split(r"(?<=/>)", svg[start:stop])
        remaining = iter(texts)
        titled = [
            f"{path[:-2]}><title>{escape(next(remaining))}</title></path>" if "<path" in path else path
            for path in paths
        ]
        svg = svg[:start] + "".join(titled) + svg[stop:]
    return svg


def group_of(chart: int, kind: BoxKind, lane: int | None) -> str:
    """Name of the group of a lane's boxes of one kind."""
    name = f"chart {chart} {kind.value}" + ("" if lane is None else f" {lane}")
    return name.replace(" ", "-")
