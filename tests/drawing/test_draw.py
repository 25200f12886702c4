"""The front door: suffixes, folders, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.drawing import Arrow, chart_of, draw
from counterflow.errors import ConfigError
from counterflow.schedule.schemes import chimera, dapple
from counterflow.simulation import Costs, simulate

RESULT = simulate(chimera(stages=2, micro_batches=2))


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".html", ".trace.json", ".PNG"])
@pytest.mark.parametrize("memory", [False, True])
def test_every_suffix(tmp_path: Path, suffix: str, memory: bool) -> None:
    path = tmp_path / f"x{suffix}"
    draw(RESULT, path, compare=simulate(dapple(2, 2)), memory=memory)
    assert path.stat().st_size > 500


@pytest.mark.parametrize("name", ["x.jpg", "x", "x.json", "x.png.txt"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"legal endings: \.png, \.svg, \.pdf, \.html, \.trace\.json"):
        draw(RESULT, tmp_path / name)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder .*nowhere does not exist; create it first"):
        draw(RESULT, str(tmp_path / "nowhere" / "x.svg"))


@pytest.mark.parametrize("suffix", [".png", ".html", ".trace.json"])
def test_file_that_cannot_be_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        draw(RESULT, path)


def test_messages_are_arrows_on_request(tmp_path: Path) -> None:
    result = simulate(dapple(stages=2, micro_batches=2), Costs(p2p=0.5))
    assert chart_of(result).messages == ()
    chart = chart_of(result, messages=True)
    assert chart.messages[0] == Arrow(0, 1, 1.0, 1.5, "message from F0.0 to F0.1")
    for suffix, sign in (
        ("svg", 'id="chart-0-messages"'),
        ("html", "[0,1,1,1.5]"),
        ("trace.json", '"message"'),
    ):
        for wanted in (False, True):
            path = tmp_path / f"x.{suffix}"
            draw(result, path, messages=wanted)
            assert (sign in path.read_text(encoding="utf-8")) is wanted
