"""The references in docs/reference are what their sources say; tests and texts that these name exist."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCRIPT = runpy.run_path(str(DOCS / "references.py"))


@pytest.mark.parametrize("name", sorted(SCRIPT["REFERENCES"]))
def test_a_reference_is_what_its_source_says(name: str) -> None:
    text = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert text == SCRIPT["REFERENCES"][name]() + "\n", "python docs/references.py writes it anew"


def test_there_is_no_reference_without_a_source() -> None:
    assert sorted(path.name for path in (DOCS / "reference").iterdir()) == sorted(SCRIPT["REFERENCES"])


def _rows() -> list[dict[str, Any]]:
    sections = tomllib.loads((ROOT / "tests" / "docs" / "models.toml").read_text(encoding="utf-8"))[
        "sections"
    ]
    return [row for section in sections for row in section["rows"]]


def test_each_row_of_the_models_names_tests_that_exist() -> None:
    rows = _rows()
    assert len(rows) > 180
    texts: dict[str, str] = {}
    for row in rows:
        assert row["tests"], row["what"]
        for file, name in (place.split("::") for place in row["tests"]):
            text = texts.setdefault(file, (ROOT / "tests" / "runtime" / file).read_text(encoding="utf-8"))
            assert f"def {name}(" in text, f"{file} has no {name}"


def test_quoted_refusals_are_the_librarys() -> None:
    """Texts in quotes, in the rows and in the pages on models."""
    text = "\n".join(row["how"] for row in _rows())
    for page in ("supported-models.md", "more-dimensions.md"):
        blocks = r"^```.*?^```"
        text += re.sub(blocks, "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    refusals = re.sub(r"\"\s*\n\s*f?\"", "", sources)  # texts that go over several lines
    quotes = re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", text))
    assert len(quotes) > 80
    for quote in quotes:
        assert " ".join(quote.split()) in refusals, f"nothing is refused with: {quote}"


def test_the_summary_of_the_papers_figures() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "reproduce.json").read_text(encoding="utf-8"))
    assert kept["summary"] in (DOCS / "reproducing.md").read_text(encoding="utf-8")
    figures = (DOCS / "reference" / "figures.md").read_text(encoding="utf-8")
    rows = [line for lines in kept["figures"].values() for line in lines]
    assert len(re.findall(r"^\| (?:fig|table|conv|fits)(?!ure \|)", figures, re.MULTILINE)) == len(rows)
    assert all(f": {line['cause']}." in figures for line in rows if line["cause"])


def test_each_statement_of_the_papers_has_a_test_that_exists() -> None:
    rows = tomllib.loads((ROOT / "tests" / "papers" / "statements.toml").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 130
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for row in rows:
        place = row["test"]
        folder = ROOT if "/" in place else ROOT / "tests" / "papers"
        assert place in tests or (folder / place).exists(), place
        kind, _, reason = row["verdict"].partition(": ")
        assert kind == "met" or (kind in ("deviation", "partly") and reason)


def test_each_claim_has_tests_and_tables_that_exist() -> None:
    rows = tomllib.loads((ROOT / "tests" / "docs" / "claims.toml").read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 20
    assert all(row["tests"] or row["results"] for row in rows)
    assert all((ROOT / place).exists() for row in rows for place in row["tests"])
    results = ROOT / "benchmarks" / "results"
    assert all((results / table).exists() for row in rows for table in row["results"])


WORDS = 34_500
"""Most words of ``docs/*.md``. A page that grows makes another shorter; tables that grow are references."""


def test_pages_stay_short() -> None:
    words: dict[str, int] = SCRIPT["words"]()
    listed = "\n".join(f"{count:6} {name}" for name, count in sorted(words.items(), key=lambda item: item[1]))
    assert sum(words.values()) <= WORDS, f"{sum(words.values()):,} words, at most {WORDS:,}:\n{listed}"
