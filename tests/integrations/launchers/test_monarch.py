"""Monarch: a killed worker is an event, and the curve stays the same. Skipped without Monarch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from counterflow import ConfigError
from counterflow.integrations.launchers import monarch as adapter
from counterflow.runtime.workers.rank_info import RankInfo
from counterflow.training.supervision.events import FAILED, RESTARTED, read

from ...training.conftest import losses
from . import faults
from .conftest import ROOT, small

HERE = Path(__file__).parent


@pytest.fixture
def installed() -> None:
    pytest.importorskip("monarch", reason='Monarch is not installed: pip install "counterflow[monarch]"')


def test_a_killed_worker(installed: None, tmp_path: Path, signals_blocked: list[float]) -> None:
    """The example, in a process of its own: Monarch's runtime stays in one until it ends."""
    (tmp_path / "my.toml").write_text(small(None).to_toml())
    planned_faults = json.dumps(faults.faults(tmp_path, (1, 5, signal.SIGKILL)))
    example = str(ROOT / "examples" / "monarch_train.py")
    words = [
        str(HERE / "monarch_job.py"),
        example,
        str(tmp_path / "my.toml"),
        str(tmp_path / "run"),
        planned_faults,
    ]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    settings = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *words], env=settings, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith(("event: ", "trained "))]
    assert shown[0] == "event: the process this actor was running on failed: Killed(sig=9)"
    assert shown[-1].startswith(f"trained {len(signals_blocked)} steps, loss ")
    assert losses(tmp_path / "run") == signals_blocked
    events = {event["event"]: event for event in read(tmp_path / "run")}
    assert events[RESTARTED]["attempt"] == 1
    assert FAILED not in events or events[FAILED]["lost"]


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def named(name: str, extra: str) -> Any:
        assert (name, extra) == ("monarch.actor", "monarch")
        return SimpleNamespace()

    monkeypatch.setattr(adapter, "imported", named)
    with pytest.raises(ConfigError, match=r"train\.out is missing"):
        adapter.train(small(None))
    with pytest.raises(ConfigError, match=r"3 hosts for 2 workers: .* choose a divisor of 2"):
        adapter.train(small(tmp_path), hosts=SimpleNamespace(size=lambda: 3))


def test_places() -> None:
    first = RankInfo("monarch", 0, 4, 0, "node0", 1, machines=2)
    assert [adapter.place_of(first, rank).local_rank for rank in range(4)] == [0, 1, 0, 1]
