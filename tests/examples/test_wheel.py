"""The wheel has all of the package and nothing else, and works where only it is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).parents[2]
DATA = (".css", ".html", ".js", ".py", ".toml", ".typed")
"""Suffixes of the package's files."""


def test_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and ".egg-info" not in name}
    assert {name for name in names if ".dist-info/" not in name} == files
    assert {"counterflow/py.typed", "counterflow/drawing/page.html"} <= names

    site = tmp_path / "site"
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    page = tmp_path / "page.html"
    words = ["show", "chimera", "--stages", "2", "--micro-batches", "2", "--out", str(page)]
    program = f"import sys; sys.argv[1:] = {words}; from counterflow.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", f"import counterflow; print(counterflow.__file__, flush=True); {program}"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(site / "counterflow" / "__init__.py")
    assert page.stat().st_size > 1000
    assert (site / "bin" / "counterflow").exists()


def test_the_sdist_has_what_a_wheel_and_the_tests_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/counterflow/drawing/page.html"}
    needed |= {"CITATION.cff", "CONTRIBUTING.md", "Makefile", "constraints.txt", "mkdocs.yml", ".ci/release"}
    needed |= {"hatch_build.py"}
    package = (path for path in (ROOT / "src").rglob("*") if path.suffix in DATA)
    needed |= {str(path.relative_to(ROOT)) for path in package}
    assert needed | {"examples/gpt.toml", "docs/planning.md", "tests/examples/test_wheel.py"} <= names
    assert not any("__pycache__" in name or name.startswith((".venv", "runs")) for name in names)
