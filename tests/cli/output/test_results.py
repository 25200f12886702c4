"""The page on ``--json`` says what the models say."""

from __future__ import annotations

from pathlib import Path

from counterflow.cli.output.results import COMMANDS, page_sections

PAGE = Path(__file__).parents[3] / "docs" / "json.md"


def test_the_page_has_every_key_with_its_meaning() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.endswith("\n\n".join(page_sections()) + "\n")
    assert text.index(page_sections()[0]) == text.index("### ")


def test_every_command_says_its_format() -> None:
    assert all(next(iter(model.model_fields)) == "format" for model in COMMANDS)
