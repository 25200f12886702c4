"""The page on ``--json`` says what the models say."""

from __future__ import annotations

from pathlib import Path

from counterflow.cli.output.results import COMMANDS, page_sections
from counterflow.common.json_models import meanings
from counterflow.simulation.result import Bubbles, MessageSpan
from counterflow.training.training_report import Trained

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"


def test_the_page_has_every_key_with_its_meaning() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.endswith("\n\n".join(page_sections()) + "\n")
    assert text.index(page_sections()[0]) == text.index("### ")


def test_every_command_says_its_format() -> None:
    assert all(next(iter(model.model_fields)) == "format" for model in COMMANDS)


def test_a_record_s_docstring_says_what_its_keys_mean() -> None:
    descriptions = meanings(Trained)
    assert descriptions["planned_samples_per_second"].endswith("; null: no plan")
    assert "." not in {about[-1] for about in descriptions.values()}
    assert meanings(Bubbles)["drain"] == "after its last op, until the makespan"
    assert meanings(MessageSpan)["start"] == "start"
