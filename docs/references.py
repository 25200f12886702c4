"""The references in docs/reference, made from records, tests and kept results.

``python docs/references.py`` writes them; tests/docs/test_references.py compares. A fact stands in its source
alone: keys of ``--json`` in the records' docstrings, what models may do in ``tests/docs/models.toml`` beside
the tests that hold it, the papers' figures in ``benchmarks/results/reproduce.json``, their statements in
``tests/papers/statements.toml``.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterflow.cli.output.results import page_sections

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
FIGURES = ROOT / "benchmarks" / "results" / "reproduce.json"
MODELS = ROOT / "tests" / "docs" / "models.toml"
STATEMENTS = ROOT / "tests" / "papers" / "statements.toml"
TITLES = {"chimera": "Chimera", "mixpipe": "MixPipe", "hanayo": "Hanayo", "wpipe": "WPipe"}


def _table(*rows: tuple[str, ...]) -> str:
    """Rows, of which the first has the heads."""
    lines = [rows[0], tuple("---" for _ in rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def json_page() -> str:
    """Keys of every command's ``--json``."""
    about = (
        "Keys of each command's object, from its record. [What `--json` prints](../json.md) has the rules."
    )
    return "\n\n".join(["# Keys of `--json`", about, *page_sections()])


def models_page() -> str:
    """What models may be and do, row by row."""
    parts = [
        "# Models, row by row",
        'What was tried, each row by at least one test. "As in one process": the same losses, gradients and '
        "weights, in every scheme and recomputation unless the row says otherwise. Texts in quotes are parts "
        "of the errors. "
        "[What models may be and do](../supported-models.md) is the guide.",
    ]
    for section in tomllib.loads(MODELS.read_text(encoding="utf-8"))["sections"]:
        rows = [(row["what"], row["how"]) for row in section["rows"]]
        parts += [f"## {section['title']}", _table(("what", "how"), *rows)]
    return "\n\n".join(parts)


def figures_page() -> str:
    """Published values of the papers beside predictions, with the causes of misses."""
    kept: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    parts = [
        "# The papers' figures, value by value",
        f"{kept['summary'].rstrip('.')}. [The papers' figures](../reproducing.md) says how they are "
        "predicted and what the verdicts mean.",
    ]
    for paper, title in TITLES.items():
        rows: list[tuple[str, ...]] = []
        causes: dict[str, list[str]] = {}
        for name, lines in kept["figures"].items():
            if name.startswith(paper):
                for line in lines:
                    figure = name.partition("-")[2]
                    rows.append((figure, *(line[key] for key in CELLS), _verdict(line)))
                    if line["cause"]:
                        causes.setdefault(line["cause"], []).append(f"{figure}, {line['quantity']}")
        heads = ("figure", "quantity", "run", "published", "predicted", "difference", "verdict")
        misses = [f"* {'; '.join(dict.fromkeys(where))}: {cause}." for cause, where in causes.items()]
        parts += [f"## {title}", _table(heads, *rows), "Misses:", "\n".join(misses)]
    return "\n\n".join(parts)


CELLS = ("quantity", "runs", "published", "predicted", "difference")


def _verdict(line: dict[str, str]) -> str:
    text = line["verdict"] if line["verdict"] == "hit" else f"**{line['verdict']}**"
    return text + (" (fit)" if line["use"] == "fit" else "")


def statements_page() -> str:
    """Statements of the papers, each with where it is met."""
    rows = tomllib.loads(STATEMENTS.read_text(encoding="utf-8"))["rows"]
    counts = Counter(row["verdict"].partition(":")[0] for row in rows)
    table = [
        (str(number), *(row[key] for key in ("source", "statement", "where", "verdict")))
        for number, row in enumerate(rows, 1)
    ]
    return "\n\n".join(
        [
            "# The papers' statements, one by one",
            f"The four papers and the reading notes on Chimera make {len(rows)} statements that a system can "
            f"be held to: {counts['met']} are met, {counts['deviation']} are met with a known deviation, "
            f"{counts['partly']} partly. A test holds each. Published numbers are in "
            "[the papers' figures, value by value](figures.md).",
            _table(("#", "source", "statement", "where", "verdict"), *table),
        ]
    )


REFERENCES: dict[str, Callable[[], str]] = {
    "figures.md": figures_page,
    "json.md": json_page,
    "models.md": models_page,
    "statements.md": statements_page,
}


def words() -> dict[str, int]:
    """Words of each page of prose, as ``wc -w docs/*.md`` counts them, without the references."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page_name, page in REFERENCES.items():
        (FOLDER / page_name).write_text(f"{page()}\n", encoding="utf-8")
