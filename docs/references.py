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

import counterflow as cf
from counterflow.cli.output.results import page_sections

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
CLAIMS = ROOT / "tests" / "docs" / "claims.toml"
CONVERGENCE = ROOT / "benchmarks" / "results" / "convergence.txt"
FIGURES = ROOT / "benchmarks" / "results" / "reproduce.json"
OTHER_FIGURES = ROOT / "tests" / "papers" / "other_figures.toml"
MIXPIPE_ORDERS = ROOT / "benchmarks" / "results" / "mixpipe_asymmetric.txt"
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
    keys = ("paper", "figure", "about", "by")
    others = tomllib.loads(OTHER_FIGURES.read_text(encoding="utf-8"))["rows"]
    table = _table(
        ("paper", "figure", "what it is of", "by"), *(tuple(row[key] for key in keys) for row in others)
    )
    return "\n\n".join([*parts, "## The other tables and figures", table])


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


PLAN_FILES = {
    "model": "The kinds of layers, in their order.",
    "profile": "What a layer of each kind costs on a device, by samples of a micro-batch: linear between two"
    " sizes and above the largest; below the smallest seconds stay.",
    "cluster": "Nodes of devices, and links on two levels.",
    "unequal_cluster": "Where nodes differ, `[[kinds]]` say how, as many nodes in all as `nodes`. What a kind"
    " leaves out is the cluster's; `slowness` is the time of an op by that of the profile, by default 1.",
}


def plan_files_page() -> str:
    """The three files of a plan, each as an example with comments."""
    parts = [
        "# The three files of a plan",
        "Keys of model.toml, profile.toml and cluster.toml, from [examples](../../examples/plan_files). "
        "Seconds and bytes throughout; JSON with the same keys is read as well. `counterflow profile` writes "
        "them, and so does `counterflow plan --example chimera-bert48 --save-inputs mine`. "
        "[Planning](../planning.md) uses them.",
    ]
    for name, about in PLAN_FILES.items():
        text = (ROOT / "examples" / "plan_files" / f"{name}.toml").read_text(encoding="utf-8")
        parts += [f"## {name}.toml", about, f"```toml\n{text}```"]
    return "\n\n".join(parts)


def options_page() -> str:
    """Options of a pipeline, from the two records."""
    parts = [
        "# Options of a pipeline",
        "Keywords of `cf.Pipeline`, by the record that has them. `[pipeline]` of a config is a "
        "`cf.Execution`. "
        "[Train your own model](../train-your-own-model.md#options) says how to give them.",
    ]
    for record in (cf.Execution, cf.Batching):
        parts.append(f"## cf.{record.__name__}")
        for name, field in record.model_fields.items():
            default = getattr(field.default, "value", field.default)
            parts += [f"**`{name}`**, default `{default!r}`", (field.description or "").replace("``", "`")]
    return "\n\n".join(parts)


def testing_page() -> str:
    """Claims, each with its tests and kept results."""
    rows = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["rows"]
    cells = [(row["claim"], row["how"], *(_places(row[key]) for key in ("tests", "results"))) for row in rows]
    return "\n\n".join(
        [
            "# Claims and their tests",
            "Kept results are in `benchmarks/results`. [What is tested](../testing.md) says how to run them.",
            _table(("what is claimed", "how it is tested", "where", "kept results"), *cells),
        ]
    )


def _places(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def mixpipe_orders_page() -> str:
    """Least idle times of MixPipe's symmetric and asymmetric orders."""
    lines = [line.split() for line in MIXPIPE_ORDERS.read_text(encoding="utf-8").splitlines()[2:]]
    rows = [(*row[:4], f"**{row[4]}**" if int(row[4]) < int(row[3]) else row[4]) for row in lines]
    return "\n\n".join(
        [
            "# MixPipe's orders, depth by depth",
            "Idle time of a worker in a step, makespan − 3N, for N = D micro-batches, proved to be least; "
            "bold: asymmetric orders are shorter. [MixPipe's orders](../mixpipe-orders.md) has the columns.",
            _table(("D", "peak", "K/2 first", "symmetric", "asymmetric"), *rows),
        ]
    )


def convergence_page() -> str:
    """Tables of the study of late gradients."""
    command, _, tables = CONVERGENCE.read_text(encoding="utf-8").removeprefix("# ").partition("\n")
    about = f"`{command}`. [What late gradients cost](../convergence.md) has the results in short."
    return f"# Convergence, run by run\n\n{about}\n\n{tables.strip()}"


REFERENCES: dict[str, Callable[[], str]] = {
    "convergence.md": convergence_page,
    "figures.md": figures_page,
    "json.md": json_page,
    "mixpipe-orders.md": mixpipe_orders_page,
    "models.md": models_page,
    "options.md": options_page,
    "plan-files.md": plan_files_page,
    "statements.md": statements_page,
    "testing.md": testing_page,
}


def words() -> dict[str, int]:
    """Words of each page of prose, as ``wc -w docs/*.md`` counts them, without the references."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page_name, page in REFERENCES.items():
        (FOLDER / page_name).write_text(f"{page()}\n", encoding="utf-8")
