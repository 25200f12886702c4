"""``counterflow doctor``: what it finds, what it says of what is missing, and its test of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.errors import WorkerError
from counterflow.measure import health, storage
from counterflow.training.trial import TrialTraining

from ..conftest import Run


def findings_of(run: Run, *more: str, code: int = 0) -> dict[str, Any]:
    answer = run("doctor --json", *more)
    assert answer.code == code
    assert answer.json["ok"] is (code == 0)
    return {finding["about"]: finding for finding in answer.json["findings"]}


def test_what_there_is(run: Run) -> None:
    findings = findings_of(run, "--no-test")
    assert findings["torch"] == {"about": "torch", "found": torch.__version__, "ok": True, "advice": ""}
    assert {"system", "Python", "CPU", "memory", "networks", "ports", "open files"} <= findings.keys()
    assert findings["gloo"]["ok"] is True
    assert not any(about.startswith("training") for about in findings)


def test_it_trains_as_threads_and_as_processes(run: Run) -> None:
    answer = run("doctor")
    assert answer.code == 0
    assert "✓  training over local" in answer.out
    assert "✓  training over gloo" in answer.out
    assert answer.out.endswith("Nothing is wrong here.\n")


def test_a_test_that_fails_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, transport: str, **__: Any) -> None:
        raise WorkerError(f"{transport} is cut")

    monkeypatch.setattr(TrialTraining, "verify", fail)
    findings = findings_of(run, code=1)
    assert findings["training over gloo"]["found"] == "gloo is cut"
    answer = run("doctor")
    assert answer.code == 1
    assert "2 things are wrong here." in answer.out


def test_a_network_that_is_not_there_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    finding = findings_of(run, "--no-test", code=1)["GLOO_SOCKET_IFNAME"]
    assert (finding["found"], finding["ok"]) == ("nosuch0", False)
    assert "no network has that name" in finding["advice"]


def test_little_shared_memory_and_few_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**26, 0, 2**26))
    monkeypatch.setattr(health.resource, "getrlimit", lambda _: (256, 256))  # type: ignore[attr-defined]
    wrong = {finding.about: finding for finding in health.findings() if finding.ok is not True}
    assert wrong["shared memory"].found == "64 MiB of 64 MiB free"
    assert wrong["open files"].advice == "ulimit -n 1024 or more"


def test_a_missing_extra_is_told_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(health.EXTRAS, "synthesize", ("no-such-package",))
    (finding,) = (f for f in health.findings() if f.about == "extra synthesize")
    assert finding.ok is None
    assert finding.found == "no no-such-package"
    assert 'pip install "counterflow[synthesize]"' in finding.advice


def test_storage_that_a_run_cannot_trust(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "36 25 0:31 / / rw - ext4 /dev/vda rw\n52 36 0:45 / /data rw - fuse.gcsfuse bucket rw\n"
    )
    monkeypatch.setattr(storage, "MOUNTS", mounts)
    assert findings_of(run, "--no-test")["storage of runs"]["ok"] is True
    finding = findings_of(run, "/data/runs", "--no-test", code=1)["storage of runs"]
    assert finding["found"].startswith("fuse.gcsfuse, at /data: an object store, whose renames are copies")
