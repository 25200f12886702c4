"""Pictures of a comparison: a row each, its idle part empty, and files that are the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from counterflow import ConfigError
from counterflow.drawing import palette
from counterflow.drawing.ranking import Ranked, draw_ranking, make_ranking

ROWS = (
    Ranked("zb-v", 20.0, 0.1, 4.0, 1.0, synchronous=True),
    Ranked("pipedream-2bw", 24.0, 0.0, 4.0, 2.0, synchronous=False),
)


def test_three_panels_with_a_row_each() -> None:
    figure = make_ranking(ROWS, title="4 workers", about="forward 1", unit="F")
    steps, activations, weights = figure.axes
    bars = [bar for bar in steps.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [20.0, 18.0, 24.0, 24.0]  # whole, and without bubbles
    assert to_hex(bars[1].get_facecolor()) == palette.HUES[0].forward
    assert to_hex(bars[3].get_facecolor()) == palette.HUES[1].forward
    assert [tick.get_text() for tick in steps.get_yticklabels()] == ["zb-v", "pipedream-2bw"]
    assert steps.get_xlabel() == "step, F"
    assert [text.get_text() for text in activations.texts] == ["4", "4"]
    assert [text.get_text() for text in weights.texts] == ["1", "2"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["computing", "idle", "asynchronous: older weights"]


def test_without_rows_there_is_a_figure_still() -> None:
    figure = make_ranking((), title="none", about="", unit="s")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["computing", "idle"]


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_files_are_the_same_each_time(tmp_path: Path, form: str) -> None:
    for name in ("one", "two"):
        draw_ranking(ROWS, tmp_path / f"{name}.{form}", title="t", about="a", unit="s")
    assert (tmp_path / f"one.{form}").read_bytes() == (tmp_path / f"two.{form}").read_bytes()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="legal endings"):
        draw_ranking(ROWS, tmp_path / "x.html", title="t", about="a", unit="s")
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_ranking(ROWS, tmp_path / "x.png", title="t", about="a", unit="s")
