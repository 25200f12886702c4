"""Ray Train: a worker is killed and replaced, a node is lost; the curve stays. Skipped without Ray."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from counterflow import ConfigError
from counterflow.integrations.launchers import ray as adapter
from counterflow.training.supervision.events import FEWER, RESTARTED, read

from ...training.conftest import losses
from . import faults
from .conftest import ROOT, small

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "counterflow[ray]"')
pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings by which Ray's processes find the packages of this one."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)]))


@pytest.fixture
def cluster(settings: None) -> Iterator[Any]:
    """Two nodes on this machine with a worker each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "include_dashboard": False}
    cluster_: Any = Cluster(initialize_head=True, head_node_args={**node, "_system_config": QUICK})
    try:
        cluster_.second = cluster_.add_node(num_cpus=1)
        ray.init(address=cluster_.address, log_to_driver=False)
        yield cluster_
    finally:
        ray.shutdown()
        cluster_.shutdown()


@pytest.fixture
def machine(settings: None) -> Iterator[None]:
    """One node for two workers."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


RunExample = Callable[[int, faults.Faults], Path]


@pytest.fixture
def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunExample:
    """Run the example with at least this many workers, which meet faults; returns the run's folder."""

    def run_example_(least: int, planned_faults: faults.Faults) -> Path:
        call = adapter.Loop.__call__

        def faulty(self: adapter.Loop) -> None:
            faults.install(planned_faults)
            call(self)

        for module in (adapter, faults, sys.modules[__name__]):  # workers get them as they are here
            ray.cloudpickle.register_pickle_by_value(module)
        monkeypatch.setattr(adapter.Loop, "__call__", faulty)
        (tmp_path / "my.toml").write_text(small(None).to_toml())
        words = [str(tmp_path / "my.toml"), str(tmp_path / "ray"), str(least), "2"]
        monkeypatch.setattr(sys, "argv", ["ray_train.py", *words])
        try:
            runpy.run_path(str(ROOT / "examples" / "ray_train.py"), run_name="__main__")
        finally:
            for module in (adapter, faults, sys.modules[__name__]):
                ray.cloudpickle.unregister_pickle_by_value(module)
        return tmp_path / "ray" / "first" / adapter.FOLDER

    return run_example_


def test_a_killed_worker(
    machine: None,
    run_example: RunExample,
    tmp_path: Path,
    signals_blocked: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray replaces the worker, and gets the last checkpoint."""
    folder = run_example(2, faults.faults(tmp_path, (1, 5, signal.SIGKILL)))
    shown = capsys.readouterr().out
    assert f"trained {len(signals_blocked)} steps, loss {signals_blocked[-1]:.3f}" in shown
    assert f"its last checkpoint is {folder}/checkpoint/step-{len(signals_blocked)}" in shown
    assert losses(folder) == signals_blocked
    assert [event["attempt"] for event in read(folder) if event["event"] == RESTARTED] == [1]


def test_a_lost_node(
    cluster: Any, run_example: RunExample, tmp_path: Path, signals_blocked: list[float]
) -> None:
    """The run goes on with the worker that is left; after a while, as Ray looks for the lost one first."""
    gone = tmp_path / "gone"
    planned_faults = faults.faults(tmp_path, (0, 5, signal.SIGKILL), after=gone)
    losing = threading.Thread(
        target=lose_node, args=(cluster, Path(planned_faults[-1]["mark"]), gone), daemon=True
    )
    losing.start()
    folder = run_example(1, planned_faults)
    losing.join()
    assert losses(folder) == pytest.approx(signals_blocked, rel=1e-6, abs=0)
    (resumed,) = [event for event in read(folder) if event["event"] == FEWER]
    assert resumed["workers"] == 1
    assert [event["attempt"] for event in read(folder) if event["event"] == RESTARTED] == [1]


def lose_node(cluster: Any, when: Path, gone: Path) -> None:
    """Remove the second node at a worker's mark; the file says that Ray knows."""
    while not when.exists():
        time.sleep(0.05)
    cluster.remove_node(cluster.second, allow_graceful=False)
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        time.sleep(0.05)
    gone.touch()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.out = .*under Ray the run is in the folder of Ray's run"):
        adapter.Loop(small(tmp_path))
    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name="s3"))
    context = SimpleNamespace(get_storage=lambda: storage)
    with pytest.raises(ConfigError, match=r"is on s3: .* choose a folder"):
        adapter._folder(SimpleNamespace(get_context=lambda: context))


def test_how_often_ray_has_started_it(tmp_path: Path) -> None:
    assert [adapter._begun(tmp_path, name) for name in ("a", "a", "a", "b", "b")] == [0, 1, 2, 0, 1]
