"""The page's job script, with a stand-in for Slurm: after a killed worker the job is requeued and goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from counterflow.training.supervision.events import read

from ...training.conftest import losses
from .conftest import ROOT, small

SRUN = """#!{python}
import os, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {{
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1",
    }})
    for rank in range(2)
]
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
"""What srun does: one command for all tasks, and the highest exit code, 128 + N after signal N."""

SCONTROL = """#!/bin/sh
test "$1" = requeue && touch requeued
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The page's script, for a run in this folder."""
    page = (ROOT / "docs" / "restarts.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    script_: str = next(block for block in blocks if "requeue" in block)
    return script_.replace("/shared/runs/first", str(tmp_path / "run"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Slurm's commands."""
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    paths = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(paths))
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        monkeypatch.setenv("MASTER_PORT", str(chosen.getsockname()[1]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)


def test_a_killed_worker(  # noqa: PLR0917
    slurm: None,
    script: str,
    tmp_path: Path,
    faulty: Callable[..., None],
    signals_blocked: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty((1, 5, signal.SIGKILL))
    Path("my.toml").write_text(small(None).to_toml())
    codes: list[int] = []
    while not codes or Path("requeued").exists():
        Path("requeued").unlink(missing_ok=True)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(len(codes)))
        codes.append(subprocess.run(["/bin/bash", "-c", script], check=False).returncode)
    assert codes == [137, 0]
    assert losses(tmp_path / "run") == signals_blocked
    (failed,) = read(tmp_path / "run")
    assert failed["lost"]


@pytest.mark.parametrize(
    ("code", "count", "requeued"),
    [(0, 0, False), (1, 0, True), (1, 10, False), (2, 0, False), (75, 99, True), (137, 9, True)],
)
def test_what_is_requeued(  # noqa: PLR0917
    slurm: None, script: str, monkeypatch: pytest.MonkeyPatch, code: int, count: int, requeued: bool
) -> None:
    Path("bin/srun").write_text(f"#!/bin/sh\nexit {code}\n")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
    assert subprocess.run(["/bin/bash", "-c", script], check=False).returncode == code
    assert Path("requeued").exists() == requeued
