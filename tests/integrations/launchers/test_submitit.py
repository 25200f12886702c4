"""Jobs of submitit on this machine: a worker is killed, the job's time ends, and the curve stays the same."""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from counterflow import ConfigError, WorkerError
from counterflow.integrations.launchers.submitit import Task, join, place_of
from counterflow.training.supervision.events import FAILED, RESTARTED, STOPPED, note, read

from ...training.conftest import losses
from .conftest import ROOT, small

submitit = pytest.importorskip(
    "submitit", reason='submitit is not installed: pip install "counterflow[submitit]"'
)


def test_a_job_whose_time_ends_and_which_loses_a_worker(
    tmp_path: Path,
    faulty: Callable[..., None],
    signals_blocked: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The example: submitit's signal ends the run after a step; then rank 0 is killed, and its store."""
    faulty((1, 2, signal.SIGUSR2), (0, 5, signal.SIGKILL))
    (tmp_path / "my.toml").write_text(small(None).to_toml())
    monkeypatch.setattr(sys, "argv", ["submitit_job.py", str(tmp_path / "my.toml"), str(tmp_path / "run")])
    runpy.run_path(str(ROOT / "examples" / "submitit_job.py"), run_name="__main__")
    assert f"trained {len(signals_blocked)} steps, loss " in capsys.readouterr().out
    assert losses(tmp_path / "run") == signals_blocked
    events = {event["event"]: event for event in read(tmp_path / "run")}
    assert events[STOPPED]["signal"] == "SIGUSR1"
    assert events[FAILED]["lost"]
    assert events[RESTARTED]["attempt"] == 2
    assert events[RESTARTED]["source"] == "checkpoint"


class Environment:
    """A task's record, as submitit has it."""

    USR_SIG = "USR2"
    cluster = "local"
    num_tasks, num_nodes, global_rank, local_rank = 2, 1, 1, 1
    requeued = 0
    job_id = "7"
    paths: Any = None

    def _requeue(self, countdown: int) -> None:
        Environment.requeued += 1


@pytest.mark.parametrize(
    ("reported", "failures", "requeued", "ends"),
    [(False, 1, 1, SystemExit), (True, 1, 0, SystemExit), (False, 2, 0, WorkerError)],
)
def test_who_requeues_a_failed_job(  # noqa: PLR0917
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reported: bool,
    failures: int,
    requeued: int,
    ends: type[BaseException],
) -> None:
    """The worker that reports the failure; nobody after the same failure in the same step."""

    def fails(*_: Any, **__: Any) -> None:
        for _number in range(failures):
            note(tmp_path, FAILED, step=6, worker=1, message="worker 1: ValueError", lost=False)
        error = WorkerError("worker 1: ValueError")
        error.reported = reported
        raise error

    monkeypatch.setattr(submitit, "JobEnvironment", Environment)
    monkeypatch.setattr(Environment, "requeued", 0)
    monkeypatch.setattr("counterflow.integrations.launchers.submitit.place_of", lambda *_: None)
    monkeypatch.setattr("counterflow.integrations.launchers.submitit.trained_at", fails)
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ends) as ended:
        Task(small(tmp_path))()
    assert Environment.requeued == requeued
    assert ends is WorkerError or ended.value.code == 75  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks meet through a file; one that rank 0 of an earlier start left does not count."""
    monkeypatch.setattr(Environment, "paths", SimpleNamespace(folder=tmp_path))
    environment = Environment()
    old = {"process": 2**22 + 1, "port": 1, "restarts": 3}
    (tmp_path / "7_meeting.json").write_text(json.dumps(old))
    with pytest.raises(WorkerError, match=r"rank 0 did not write .*7_meeting.json within 0.1 s"):
        place_of(environment, 0.1)
    monkeypatch.setattr(Environment, "global_rank", 0)
    first = place_of(environment, 60)
    monkeypatch.setattr(Environment, "global_rank", 1)
    second = place_of(environment, 60, most_restarts=3)
    assert first is not None
    assert second == replace(first, rank=1, most_restarts=3)
    assert second.restarts == 4
    assert (second.launcher, second.world_size) == ("submitit", 2)
    monkeypatch.setattr(Environment, "num_nodes", 2)
    with pytest.raises(ConfigError, match="executor local has 2 machines"):
        place_of(environment, 60)
    monkeypatch.setattr(Environment, "num_tasks", 1)
    assert place_of(environment, 60) is None


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.out is missing"):
        Task(small(tmp_path / "run").but(train={"out": None}))
    with pytest.raises(ConfigError, match="no task of submitit"):
        join()
