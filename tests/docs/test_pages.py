"""The pages in docs/ say what is so: their programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from counterflow.plan import files

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def test_train_your_own_model(tmp_path: Path) -> None:
    program, meta = blocks("train-your-own-model.md", "python")
    script = tmp_path / "train.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.9 * float(found[1])
    scope: dict[str, object] = {}
    exec(f"import torch\nfrom torch import nn\n{meta}", scope)
    assert len(scope["layers"]) == 64  # type: ignore[arg-type]


def test_planning(tmp_path: Path) -> None:
    found: list[Any] = []
    for text, load in zip(
        blocks("planning.md", "toml"), (files.load_model, files.load_profile, files.load_cluster), strict=True
    ):
        path = tmp_path / "x.toml"
        path.write_text(text, encoding="utf-8")
        found.append(load(path))
    model, profile, cluster = found
    assert len(model.layers) == 14
    assert profile.layer("block").forward(3) == pytest.approx(0.002)
    assert cluster.allreduce_link(spans_nodes=True).seconds_per_byte == 2e-10
