"""Every script in ``benchmarks/`` finds what it imports; no type checker covers them."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_imports(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):  # also those inside functions
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("counterflow"):
            module = import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    import_module(f"{node.module}.{name.name}")
