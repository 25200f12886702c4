"""What an SVG's viewer shows over each shape of a chart.

matplotlib gives shapes no titles of their own: they are put into the SVG that it wrote, by the names of the
groups in which it draws them. Nothing else of the SVG is changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .chart import BoxKind, Chart, shared_unit


def titles_of(charts: Sequence[Chart]) -> dict[str, list[str]]:
    """What an SVG's viewer shows over each shape, by group and in its order."""
    titles: dict[str, list[str]] = {}
    for index, chart in enumerate(charts):
        unit = shared_unit([chart])
        for box in chart.boxes:
            rows = [box.what, *(f"{name} {text}".strip() for name, text in chart.told(box))]
            titles.setdefault(group_of(index, box.kind, box.lane), []).append("\n".join(rows))
        for bubble in chart.bubbles:
            text = f"bubble: {bubble.cause}\nworker {bubble.worker}\n"
            text += f"from {unit.text(bubble.start)} to {unit.text(bubble.end)}"
            titles.setdefault(f"chart-{index}-bubbles", []).append(text)
    return titles


def with_titles(svg: str, titles: dict[str, list[str]]) -> str:
    """The same SVG with a title in each path of the groups named."""
    for name, texts in titles.items():
        start = svg.index(f'<g id="{name}"')
        stop = svg.index("</g>", start)
        paths = re.split(r"(?<=/>)", svg[start:stop])
        left = iter(texts)
        titled = [
            f"{path[:-2]}><title>{escape(next(left))}</title></path>" if "<path" in path else path
            for path in paths
        ]
        svg = svg[:start] + "".join(titled) + svg[stop:]
    return svg


def group_of(chart: int, kind: BoxKind, lane: int | None) -> str:
    """The name of the group of a lane's boxes of one kind."""
    name = f"chart {chart} {kind.value}" + ("" if lane is None else f" {lane}")
    return name.replace(" ", "-")
