"""The program of the page on transformers' Trainer runs under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..forked import torchrun

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_on_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "transformers-trainer.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    command = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0].split()
    (tmp_path / "tune.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    printed = torchrun(tmp_path / "logs", *command[1:])
    losses = [float(line) for line in printed.splitlines() if re.fullmatch(r"[\d.]+", line)]
    assert len(losses) == 2
    assert losses[0] == losses[1] < 3.5
    assert (tmp_path / "tuned" / "final" / "config.json").exists()
