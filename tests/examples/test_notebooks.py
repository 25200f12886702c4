"""The notebooks run from top to bottom and give what is kept; ``KEEP=1`` keeps what they give now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

_RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, record_timing=False).execute()
nbformat.write(notebook, sys.argv[2])
"""


def told(path: Path) -> list[list[object]]:
    """What each cell gives: its text; of a picture or a table only that it is one: versions draw it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [[_said(output) for output in cell["outputs"]] for cell in cells if cell["cell_type"] == "code"]


def _said(output: Any) -> object:
    assert output["output_type"] in ("stream", "execute_result"), output
    data = output.get("data", {"text": output.get("text")})
    return sorted(data) if len(data) > 1 else data


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path: Path, tmp_path: Path) -> None:
    made = tmp_path / path.name
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(path), str(made)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if os.environ.get("KEEP"):
        path.write_bytes(made.read_bytes())
    assert sum(map(len, told(made))) >= 5
    assert told(made) == told(path)
