"""Signs of results are words where a terminal cannot encode them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterflow.cli import application
from counterflow.cli.output.console import bullet, sign_of
from counterflow.cli.output.screen import Screen
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps


@pytest.mark.parametrize(
    ("encoding", "signs"),
    [
        ("utf-8", ["✓", "✗", "·", "·"]),
        ("latin-1", ["ok", "WRONG", "·", "·"]),
        ("ascii", ["ok", "WRONG", "skipped", "-"]),
    ],
)
def test_signs_by_encoding(encoding: str, signs: list[str]) -> None:
    out = Screen(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert [*(sign_of(out, ok)[0] for ok in (True, False, None)), bullet(out)] == signs


def test_a_check_says_in_ascii_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    text = dumps(schemes.dapple(stages=2, micro_batches=2)).replace('"F0.0", ', "", 1)
    path.write_text(text, encoding="utf-8")
    runner = CliRunner(charset="ascii", env={"COLUMNS": "200", "TERM": "dumb"})
    lines = runner.invoke(application(), ["check", str(path)]).stdout.splitlines()
    assert "WRONG every op exactly once" in lines
    assert any(line.startswith("ok ") for line in lines)
    assert any(line.startswith("- ") and "skipped" in line for line in lines)
    assert not any("?" in line for line in lines)
