"""All the papers' figures: published values beside predictions, kept as JSON and in the page of the papers.

Writes ``benchmarks/results/reproduce.json`` and the tables of ``docs/reproducing.md`` between their marks;
with ``--dry-run`` it prints the page only. One process, one to two minutes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from counterflow.papers.figures import FIGURES, PAPERS
from counterflow.papers.figures.lines import lines_of
from counterflow.papers.figures.reproduction import Reproduction, reproduce, total

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "reproduce.json"
PAGE = ROOT / "docs" / "reproducing.md"


def table(reproductions: Sequence[Reproduction]) -> list[str]:
    """A paper's rows and causes as Markdown."""
    text = [
        "| figure | quantity | run | published | predicted | difference | verdict |",
        "|---|---|---|---|---|--:|---|",
    ]
    causes: dict[str, list[str]] = {}
    for each in reproductions:
        name = each.figure.name.partition("-")[2]
        for line in lines_of(each):
            use = " (fit)" if line.use == "fit" else ""
            verdict = line.verdict if line.verdict == "hit" else f"**{line.verdict}**"
            cells = (
                name,
                line.what,
                line.runs,
                line.published,
                line.predicted,
                line.difference,
                verdict + use,
            )
            text.append("| " + " | ".join(cells) + " |")
            if line.cause:
                causes.setdefault(line.cause, []).append(f"{name}, {line.what}")
    text += ["", "Misses:", ""]
    text += [f"* {'; '.join(dict.fromkeys(rows))}: {cause}." for cause, rows in causes.items()]
    return text


def written(page: str, paper: str, text: Sequence[str]) -> str:
    """The page with a paper's table between its marks."""
    start, end = f"<!-- rows of {paper} -->", f"<!-- end of {paper} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"{PAGE}: has no marks {start} and {end}")
    body = "\n".join([start, "", *text, "", end])
    return pattern.sub(lambda _: body, page)


def data(reproductions: Sequence[Reproduction]) -> dict[str, object]:
    """What is kept: every row, rounded, and the numbers of rows by verdict."""
    figures = {
        each.figure.name: [
            {
                "quantity": line.what,
                "runs": line.runs,
                "published": line.published,
                "predicted": line.predicted,
                "difference": line.difference,
                "verdict": line.verdict,
                "cause": line.cause,
                "use": line.use,
                "source": line.source,
            }
            for line in lines_of(each)
        ]
        for each in reproductions
    }
    return {"figures": figures, "summary": total(reproductions)}


def main() -> None:
    """Reproduce every figure and keep what was found."""
    reproductions = []
    for name, figure in FIGURES.items():
        reproductions.append(reproduce(figure))
        print(f"{name}: {reproductions[-1].summary()}", flush=True)
    page = PAGE.read_text(encoding="utf-8")
    for paper in PAPERS:
        text = table([each for each in reproductions if each.figure.name.startswith(paper)])
        page = written(page, paper, text)
    page = written(page, "summary", [total(reproductions)])
    if "--dry-run" in sys.argv:
        print(page)
        return
    RESULT.write_text(json.dumps(data(reproductions), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page, encoding="utf-8")
    print(total(reproductions))


if __name__ == "__main__":
    main()
