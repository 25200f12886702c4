"""The scripts of other systems and ours beside them, on docs/coming-from.md, print the same losses."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from counterflow.runtime.workers.launch import launch

from ..forked import python, torchrun

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_scripts_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = re.findall(r"^```python\n(# (\w+\.py).*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for text, name in programs:
        (tmp_path / name).write_text(text)
    names = [name for _, name in programs]
    assert names == ["theirs.py", "ours.py", "accelerated.py", "piped.py", "deep.py"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pairs = {
        "ours": torchrun(tmp_path / "theirs", "--standalone", "--nproc-per-node", "2", "theirs.py"),
        "piped": python(tmp_path / "accelerated", "accelerated.py"),
    }
    for name, printed in pairs.items():
        expected = [line for line in printed.splitlines() if line.startswith("loss ")]
        work = importlib.import_module(name).work
        losses = launch(work, workers=2, transport="local", timeout_seconds=60)
        assert [f"loss {loss:.6f}" for loss in losses[0]] == expected
        assert len(expected) in {4, 5}
        assert losses[0] == losses[1]
    losses = launch(importlib.import_module("deep").work, workers=2, transport="local", timeout_seconds=60)[0]
    assert losses == sorted(losses, reverse=True)
