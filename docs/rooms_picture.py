"""Draws the rooms of the package, docs/pictures/rooms.svg: ``python docs/rooms_picture.py``.

The layers are those that import-linter holds in CI (pyproject.toml), and what a room is for is the first
sentence of its docstring; so the picture says nothing that stands nowhere else. A test compares the two.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"

WIDTH, GAP, MARGIN = 880, 8, 12
COLORS = {"torch": "#e8f0fb", "pure": "#eef6ea", "people": "#fdf3e3"}
"""Rooms that import torch, rooms that do not, and those that people meet."""

TORCH = (
    *("api", "common", "capture", "runtime", "testing", "models", "data", "measure", "verification"),
    *("checkpoints", "training", "integrations"),
)
PEOPLE = ("cli", "explore", "papers")


def layers() -> list[list[str]]:
    """The rooms, from the highest layer to the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return [
        [name.strip().removeprefix("counterflow.") for name in layer.split("|")]
        for layer in contract["layers"]
    ]


def purpose(room: str) -> str:
    """What a room is for, by its own docstring."""
    text = (ROOT / "src" / "counterflow" / room / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0].replace("`", "")


def picture() -> str:
    """The picture as SVG."""
    boxes, y = [], MARGIN
    for row in layers():
        width = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        wrapped = {room: textwrap.wrap(purpose(room), int(width / 6.7)) for room in row}
        height = 30 + 16 * max(map(len, wrapped.values()))
        for place, (room, lines) in enumerate(wrapped.items()):
            x = MARGIN + place * (width + GAP)
            kind = "torch" if room in TORCH else "people" if room in PEOPLE else "pure"
            boxes.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6" fill="{COLORS[kind]}" '
                f'stroke="#8a94a6"/><text x="{x + 12:g}" y="{y + 19:g}" font-weight="bold">{room}</text>'
            )
            boxes += [
                f'<text x="{x + 12:g}" y="{y + 36 + 16 * number:g}">{escape(line)}</text>'
                for number, line in enumerate(lines)
            ]
        y += height + GAP
    inside = "\n".join(boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - GAP + MARGIN}" '
        'font-family="sans-serif" font-size="12.5" fill="#1d2433" role="img">\n'
        f"<title>The rooms of Counterflow, the lowest at the bottom</title>\n{inside}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
