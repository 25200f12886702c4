"""The check of GPUs goes its way without one."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield runpy.run_path(str(FOLDER / "gpu_check.py"))


def test_it_verifies_with_nccls_rules_and_writes_a_report(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "report.json"
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--small", "--devices", "1", "--parts", "verify", "--out", str(out)]
    )
    assert script["main"]() == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found["verify"].values()) == ["agrees"]
    assert "0 failed" in capsys.readouterr().out


def test_operations_are_counted_by_torch(script: dict[str, Any]) -> None:
    (subject,) = script["subjects"](["gpt-2"], 1, small=True)
    layers = subject.layers()
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)
    tokens = subject.samples * subject.micro_batches * subject.config.positions
    embeddings = sum(p.numel() for p in layers[0].parameters())
    forward_and_backward = 6 * (matrices - embeddings) * tokens
    assert forward_and_backward < subject.flops() < 1.5 * forward_and_backward
