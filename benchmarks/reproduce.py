"""All the papers' figures: published values beside predictions, kept as JSON.

Writes ``benchmarks/results/reproduce.json`` and the references that are made from it; with ``--dry-run`` it
prints the summaries only. One process, one to two minutes.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from counterflow.papers.figures import FIGURES
from counterflow.papers.figures.lines import lines_of
from counterflow.papers.figures.reproduction import Reproduction, reproduce, total

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "reproduce.json"


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
    print(total(reproductions))
    if "--dry-run" in sys.argv:
        return
    RESULT.write_text(json.dumps(data(reproductions), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "references.py"), run_name="__main__")


if __name__ == "__main__":
    main()
