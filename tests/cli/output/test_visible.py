"""Names of files are shown by the terminal and never obeyed by it."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from counterflow.cli import application
from counterflow.cli.output.screen import Screen
from counterflow.cli.output.visible import VisibleFormatter
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps

EVIL = "\x1b]0;owned\x07\x9b31m\u202ex"
SHOWN = "\\x1b]0;owned"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A schedule whose scheme has a name that sets the title of a terminal, its colour and its direction."""
    path = tmp_path / "evil.json"
    text = dumps(schemes.dapple(stages=2, micro_batches=2))
    path.write_text(text.replace('"dapple"', json.dumps(EVIL), 1))
    return path


@pytest.mark.parametrize("words", [["show"], ["check"], ["simulate"], ["check", "--json"], ["export"]])
def test_a_name_is_shown(evil: Path, words: list[str]) -> None:
    result = CliRunner().invoke(application(), [words[0], str(evil), *words[1:]])
    assert result.exit_code == 0
    assert not any(character in result.stdout for character in EVIL if not character.isprintable())
    if words[-1] == "--json":
        assert json.loads(result.stdout)["scheme"] == EVIL
    elif words[-1] != "export":
        assert SHOWN in result.stdout


@pytest.mark.parametrize("words", [[EVIL], ["dapple", "--concat", EVIL], ["dapple", EVIL]])
def test_wrong_words_are_shown(words: list[str]) -> None:
    result = CliRunner().invoke(application(), ["simulate", *words])
    assert result.exit_code == 2
    assert SHOWN in result.stderr
    assert not any(character in result.stderr for character in EVIL if not character.isprintable())


def test_styles_are_obeyed() -> None:
    file = io.StringIO()
    table = Table(title=EVIL)
    table.add_row(EVIL, Text(EVIL, style="bold"))
    Screen(file=file, force_terminal=True, color_system="standard", width=200).print(table)
    assert "\x1b[1m\\x1b]0;owned" in file.getvalue()
    assert "\x1b]" not in file.getvalue()


def test_messages_of_the_library_are_shown() -> None:
    record = logging.LogRecord("counterflow", logging.WARNING, "", 0, "%s is damaged", (EVIL,), None)
    assert VisibleFormatter("%(message)s").format(record) == ("\\x1b]0;owned\\x07\\x9b31m\\u202ex is damaged")


@pytest.mark.parametrize(
    "words",
    [
        ["check", "/dev/zero"],
        ["train", "/dev/zero"],
        ["train", "--dry-run", "--set", "schedule.file=/dev/zero"],
        ["train", "--dry-run", "--set", "data.path=/dev/zero"],
        ["synthesize", "--placement", "/dev/zero", "--micro-batches", "2"],
        ["plan", "--example", "chimera-bert48", "--cluster", "/dev/zero"],
    ],
)
def test_files_without_an_end_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.common.text_files._MOST_BYTES", 2**20)
    result = CliRunner().invoke(application(), words)
    assert result.exit_code == 2
    assert "/dev/zero" in result.stderr
    assert "bug" not in result.stderr


def test_placements_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nest.json"
    path.write_text("[" * 100_000)
    result = CliRunner().invoke(
        application(), ["synthesize", "--placement", str(path), "--micro-batches", "2"]
    )
    assert result.exit_code == 2
    assert "nested too deeply" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--workers", "100000", "--micro-batches", "4", "--seconds", "0"],
        ["compare", "--workers", "2", "--micro-batches", "10000000", "--moves", "10"],
        ["compare", "--workers", "2", "--micro-batches", "2", "--stages-a-worker", "100000"],
        ["train", "--dry-run", "--set", "schedule.slices=2", "--set", "schedule.micro_batches=100000"],
    ],
)
def test_sizes_that_take_minutes_are_refused_at_once(words: list[str]) -> None:
    result = CliRunner().invoke(application(), words)
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr


@pytest.mark.parametrize("flag", ["--recompute", "--concat"])
def test_a_long_wrong_word_is_shortened(flag: str) -> None:
    result = CliRunner().invoke(
        application(), ["simulate", "chimera", "--stages", "2", "--micro-batches", "2", flag, "x" * 5000]
    )
    assert result.exit_code == 2
    assert len(result.stderr) < 1000
