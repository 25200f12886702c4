"""Real processes over Gloo: the same numbers, workers placed by a mesh, and what happens when one fails."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.train.trial import small_trial

JOBS = Path(__file__).with_name("jobs.py")


@pytest.mark.parametrize(
    ("schedule", "replicas", "recompute"),
    [
        (schemes.chimera(4, 5), 1, "layer"),
        (schemes.hanayo(2, 3, waves=2), 2, "none"),
        (schemes.wpipe(2, 3), 2, "stage"),
    ],
    ids=str,
)
def test_processes_agree_with_one_process(schedule: Schedule, replicas: int, recompute: str) -> None:
    trial = small_trial(schedule, replicas=replicas, steps=3 if schedule.synchronous else 7)
    found = trial.verify(transport="gloo", recompute=recompute)
    assert found.ok, found


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and stdout of a job; all its workers are gone afterwards."""
    done = subprocess.run([*command], capture_output=True, text=True, timeout=120, check=False)
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    assert len(pids) == 4, done.stderr
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kill", "WorkerError: worker 2 was killed by SIGKILL"),
        ("raise", "WorkerError: worker 2, action 11: Forward F2.2: ValueError: three is too many"),
        ("sleep", "worker 2 has been in Forward F"),
    ],
)
def test_a_worker_that_fails_ends_the_run(kind: str, told: str, tmp_path: Path) -> None:
    code, text = run([sys.executable, str(JOBS), kind, str(tmp_path)], tmp_path)
    assert code == 1
    assert told in text


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kill", "WorkerError: worker 2 was killed by SIGKILL"),
        ("sleep", "worker 2 has been in Forward F"),
    ],
)
def test_over_nccl_a_watch_ends_what_waits_for_a_worker_that_fails(
    kind: str, told: str, tmp_path: Path
) -> None:
    code, text = run([sys.executable, str(JOBS), kind, str(tmp_path), "strict"], tmp_path)
    assert code == 1
    assert told in text


def test_torchrun_and_a_device_mesh(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    code, text = run([*launcher, str(JOBS), "mesh", str(tmp_path)], tmp_path)
    assert code == 0, text
    assert "the mesh trains as one process does" in text
