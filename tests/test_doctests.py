"""The examples in docstrings: what they print is what comes out."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for root, folder in ((ROOT / "src", "counterflow"), (ROOT, "tests"))
    for path in sorted((root / folder).rglob("*.py"))
    if not path.name.startswith("test_") and ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted
    assert not found.failed


def test_they_are_found() -> None:
    assert len(MODULES) > 100
