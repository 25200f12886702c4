"""Pictures of bars: what is drawn where, and files that are the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from counterflow import ConfigError
from counterflow.drawing import palette
from counterflow.drawing.bars import Bars, Series, draw_bars, make_bars

BARS = Bars(
    "Two schemes",
    "on two clusters",
    "samples/s",
    ("small", "large"),
    (
        Series("gpipe", (10.0, 20.0), (None, 16.0), ("D=4", "D=8")),
        Series("chimera", (12.0, None), (None, None), ("D=2", "does\nnot fit")),
    ),
    "published",
)


def test_bars_marks_and_texts() -> None:
    axes = make_bars(BARS).axes[0]
    drawn = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in drawn] == [10.0, 20.0, 12.0, 0.0]
    marks = [mark for mark in axes.collections if isinstance(mark, LineCollection)]
    assert [segment[1] for mark in marks for segment in mark.get_segments()[0]] == [16.0, 16.0]
    assert [text.get_text() for text in axes.texts] == ["D=4", "D=8", "D=2", "does\nnot fit"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["small", "large"]
    assert [to_hex(bar.get_facecolor()) for bar in drawn] == [
        palette.hue(series).forward for series in (0, 0, 1, 1)
    ]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_bars_give_the_same_file(tmp_path: Path, ending: str) -> None:
    first, second = tmp_path / f"one.{ending}", tmp_path / f"two.{ending}"
    draw_bars(BARS, first)
    draw_bars(BARS, second)
    assert first.read_bytes() == second.read_bytes()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.html: cannot tell what to draw .* \.png, \.svg, \.pdf"):
        draw_bars(BARS, tmp_path / "x.html")
    with pytest.raises(ConfigError, match=r"the folder .* does not exist"):
        draw_bars(BARS, tmp_path / "no" / "x.png")
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_bars(BARS, tmp_path / "x.png")
