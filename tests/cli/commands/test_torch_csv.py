"""Schedules as torch's CSV, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.schedule import schemes
from counterflow.schedule.torch_csv import dumps

from ..conftest import Run

DAPPLE = ("dapple", "--stages", "4", "--micro-batches", "8")
TEXT = dumps(schemes.dapple(4, 8))


@pytest.mark.parametrize("command", ["export", "show"])
def test_it_is_written(run: Run, command: str, tmp_path: Path) -> None:
    assert run(command, *DAPPLE, "--format", "csv").out == TEXT
    assert run(command, *DAPPLE, "--out", str(tmp_path / "x.csv")).code == 0
    assert (tmp_path / "x.csv").read_text() == TEXT
    assert run(command, "chimera", *DAPPLE[1:], "--out", str(tmp_path / "y.csv")).code == 2
    assert not (tmp_path / "y.csv").exists()


def test_it_is_read(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(TEXT)
    assert "Right: all" in run("check", str(path)).out
    text = run("simulate", str(path), "--json").out
    assert '"workers": 4' in text
    assert "csv" in run("show", str(path)).out
    assert run("export", str(path), "--format", "csv").out == TEXT
    assert '"F0.0", "F1.0"' in run("export", str(path)).out
    path.write_text(TEXT.replace("3F0", "3Q0"))
    assert "row 3, cell 0: '3Q0' is not an action" in run("check", str(path)).err
