"""Shared parts of benchmarks: arguments, the machine, kept results.

A script computes lines and data, prints the lines and, with ``--keep``, writes both to ``results``. It says
nothing of another run unless it reads what was kept.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def arguments(doc: str | None, results: str = "") -> argparse.ArgumentParser:
    """A parser with the first line of a script's docstring and ``--keep``.

    Args:
        doc: docstring of the script.
        results: files that ``--keep`` writes, for its help; empty: the script has no ``--keep``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if results:
        parser.add_argument("--keep", action="store_true", help=f"write {results} in benchmarks/results")
    return parser


def load() -> float:
    """Processes that wanted to run, mean of the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, object]:
    """The machine as it is now, for a JSON file."""
    import torch  # noqa: PLC0415 - not all benchmarks need it

    from counterflow.measure.machine import processor  # noqa: PLC0415

    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": str(dt.date.today()),
        "load_before": round(load(), 2),
    }


def machine_line(about: dict[str, object] | None = None) -> str:
    """``machine()`` in a line; by default of now."""
    about = about or machine()
    line = (
        f"{about['cores']} cores of an {about['cpu']}, Python {about['python']}, torch {about['torch']}, "
        f"{about['date']}, load before {about['load_before']}"
    )
    before = about["load_before"]
    if isinstance(before, float) and before > 0.3:
        line += " - NOT IDLE, the numbers are noisy"
    return line


def keep(name: str, lines: Iterable[str], data: Any = None) -> None:
    """Write lines to ``results/NAME.txt``, and data to ``results/NAME.json``."""
    (RESULTS / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if data is not None:
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def kept(name: str) -> Any:
    """Data of ``results/NAME.json``; None if there are none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
