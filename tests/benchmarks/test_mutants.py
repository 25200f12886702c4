"""Modules and tests that ``benchmarks/mutants.py`` names exist; its ``--stale`` checks the reasons."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_mutants_name_modules_and_tests_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    mutants = import_module("mutants")
    tests = {test for files in mutants.MODULES.values() for test in files}
    paths = [ROOT / mutants.PACKAGE / module for module in mutants.MODULES]
    paths += [ROOT / "tests" / test for test in tests]
    assert [str(path) for path in paths if not path.exists()] == []
    assert set(tomllib.loads(mutants.EQUIVALENT.read_text(encoding="utf-8"))) <= set(mutants.MODULES)
