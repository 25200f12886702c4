"""Parts of the convergence study that need nothing but the project: how curves are told and compared."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    path = ROOT / "benchmarks" / "convergence.py"
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location("convergence", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "convergence", module)
    spec.loader.exec_module(module)
    return module


def test_a_curve_in_numbers(study: ModuleType) -> None:
    curve = study.Curve("gpt", "wpipe", 0, 20, losses=[3.0] * 10 + [1.0] * 10)
    assert curve.final_loss() == 1.0
    assert curve.smooth() == pytest.approx([3.0 - 0.2 * k for k in range(11)])
    assert curve.steps_to(2.0) == 15
    assert curve.steps_to(0.9) is None


def test_curves_that_have_to_be_one(study: ModuleType) -> None:
    one = study.Curve("gpt", "one device", 0, 3, losses=[4.0, 2.0, 1.0])
    near = study.Curve("gpt", "chimera", 0, 3, losses=[4.0, 2.001, 1.0])
    far = study.Curve("gpt", "wpipe", 0, 3, losses=[4.0, 2.0, 1.0])
    emulated = study.Curve("gpt", "wpipe", 0, 2, losses=[4.0, 2.1])
    found = study.checks([one, near, far], [emulated])
    assert [(check.ok, check.at_step) for check in found] == [(True, 1), (False, 1)]
    assert found[0].difference == pytest.approx(5e-4)


def test_all_methods_see_the_same(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps of each asynchronous scheme are those of one process that keeps old weights.

    Fewer samples than in the study.
    """
    inputs, targets = study.next_byte(1)(0)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"validation loss": float(study.EXAMPLE.loss(model(inputs), targets))}

    monkeypatch.setattr(study, "GPT_SAMPLES", 8)
    monkeypatch.setitem(study.TASKS, "gpt", replace(study.TASKS["gpt"], evaluate=evaluate))
    for method in study.LATE:
        job = study.Job("gpt", method, 0, 4, 300)
        ours = study.trained(job)
        theirs = study.trained(study.Job("gpt", method, 0, 4, 300, emulated=True))
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert ours.evaluations[4] == pytest.approx(theirs.evaluations[4], rel=1e-5)


def test_the_page_shows_what_was_kept(study: ModuleType) -> None:
    page = (ROOT / "docs" / "convergence.md").read_text()
    kept = (ROOT / "benchmarks" / "results" / "convergence.txt").read_text().splitlines()
    data = json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text())
    assert study.report(data) == kept
    tables = (ROOT / "docs" / "reference" / "convergence.md").read_text()
    missing = [line for line in kept if line.startswith("|") and line not in tables]
    assert not missing
    pictures = re.findall(r"\]\((pictures/[^)]+)\)", page)
    assert pictures
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
