"""The programme for one GPU goes its whole way on CPUs, and keeps what came before a part that ends early."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.timeout(2700)  # two minutes on a quiet machine; each part has a limit of its own
def test_it_is_rehearsed_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, str(FOLDER / "gpu_check.py"), "--one-gpu", "--pretend", "--thin", "8"]
    run = subprocess.run(
        [*command, "--out", str(out)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    report = json.loads(out.read_text(encoding="utf-8"))
    wrong = [row for row in report["rows"] if row["verdict"] not in {"agrees", "measured", "not available"}]
    assert not wrong, (wrong, run.stdout[-2000:], run.stderr[-2000:])
    assert run.returncode == 0
    parts = [row["part"] for row in report["rows"]]
    assert list(dict.fromkeys(parts)) == list(report["seconds"])
    assert len(report["seconds"]) == 7
    assert "0 of them failures" in run.stdout


def test_graphs_are_rehearsed(tmp_path: Path) -> None:
    """The part that no other test covers, as it makes graphs itself."""
    out = tmp_path / "report.json"
    command = [sys.executable, str(FOLDER / "gpu_check.py"), "--one-gpu", "--pretend", "--parts", "graphs"]
    run = subprocess.run(
        [*command, "--out", str(out)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    verdicts = [row["verdict"] for row in json.loads(out.read_text(encoding="utf-8"))["rows"]]
    assert verdicts == ["agrees"] * 4 + ["not available"] * 2, (run.stdout[-2000:], run.stderr[-2000:])


@pytest.fixture
def programme(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {*sys.modules}
    yield importlib.import_module("one_gpu")
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in {"one_gpu", "kit"}:
            del sys.modules[name]


def test_its_parts_take_less_than_eight_minutes(programme: ModuleType) -> None:
    assert sum(part.seconds for part in programme.PARTS) <= 480 - programme.GRACE_SECONDS


def test_a_part_that_takes_too_long_keeps_its_rows(
    programme: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process writes a row and sleeps."""
    (tmp_path / "one_gpu.py").write_text(
        "import json, sys, time\n"
        "row = {'part': 'numbers', 'name': 'first', 'verdict': 'agrees'}\n"
        "open(sys.argv[sys.argv.index('--rows') + 1], 'a').write(json.dumps(row) + '\\n')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(programme, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(programme, "REHEARSAL_FACTOR", 1.0)
    monkeypatch.setattr(
        programme, "PARTS", (programme.Part("numbers", "", 10.0, "a part that does not end"),)
    )
    out = tmp_path / "report.json"
    assert programme.run(["numbers"], out, pretend=True, thin=1) == 1
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["verdict"] for row in rows] == ["agrees", "cut off"]


def test_an_error_of_a_case_is_a_row(programme: ModuleType, tmp_path: Path) -> None:
    report = programme.Report("numbers", tmp_path / "rows", time.monotonic() + 60, pretend=True)

    def fails() -> None:
        raise ValueError("wrong")

    report.case("a case", fails)
    (row,) = map(json.loads, (tmp_path / "rows").read_text(encoding="utf-8").splitlines())
    assert (row["verdict"], row["text"]) == ("failed", "ValueError: wrong")
    assert list(report.cases([1, 2, 3])) == [1, 2, 3]
    assert list(programme.Report("numbers", tmp_path / "rows", time.monotonic(), True).cases([1, 2])) == []
