"""Real processes over Gloo: the same numbers, workers placed by a mesh, and what happens when one fails."""

from __future__ import annotations

import operator
import runpy
import time
from pathlib import Path
from typing import Any

import pytest

from counterflow.errors import WorkerError
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial

from ...forked import torchrun

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


def test_processes_agree_over_nccls_transport() -> None:
    found = small_trial(schemes.chimera(2, 3), steps=2).verify(transport="nccl-on-gloo")
    assert found.ok, found


class Job:
    """A function of jobs.py, which other processes find by the path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return operator.getitem, (_Jobs(), self.name)

    def __call__(self, *args: object) -> None:
        """As it is read from a pickle, it is the function itself."""


class _Jobs:
    def __reduce__(self) -> Any:
        return runpy.run_path, (str(JOBS),)


def all_gone(folder: Path, workers: int = 4) -> None:
    """All workers of a job have been there, and end."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    assert len(pids) == workers
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kill", "^worker 2 was killed by SIGKILL"),
        ("raise", r"^worker 2, action 13: Forward F2.2, layer \d \(\w+\): ValueError: three is too many"),
        ("sleep", "worker 2 has been in Forward F"),
    ],
)
def test_a_worker_that_fails_ends_the_run(kind: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=told):
        launch(Job("step"), kind, str(tmp_path), workers=4, timeout_seconds=3)
    all_gone(tmp_path)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kill", "^worker 2 was killed by SIGKILL"),
        ("sleep", "worker 2 has been in Forward F"),
    ],
)
def test_over_nccl_a_watch_ends_what_waits_for_a_worker_that_fails(
    kind: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=told):
        launch(Job("step"), kind, str(tmp_path), workers=4, transport="nccl-on-gloo", timeout_seconds=3)
    all_gone(tmp_path)


def test_replicas_placed_by_a_device_mesh(tmp_path: Path) -> None:
    launch(Job("mesh"), str(tmp_path), workers=4, timeout_seconds=30)
    all_gone(tmp_path)


def test_torchrun_and_a_device_mesh(tmp_path: Path) -> None:
    """One replica whose workers the mesh turns round."""
    words = "--standalone", "--nproc-per-node", "2", str(JOBS), str(tmp_path)
    printed = torchrun(tmp_path / "logs", *words)
    assert "the mesh trains as one process does" in printed
    assert printed.count("all results: [0, 3]") == 2, "a launch under torchrun is a call in each process"
    all_gone(tmp_path, 2)
