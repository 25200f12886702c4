"""A TrainJob: Kubeflow's models accept it, and its pods' commands run here, where a worker is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from counterflow import ConfigError
from counterflow.integrations.launchers.kubeflow import check, runtime, train_job
from counterflow.training import load_config
from counterflow.training.supervision.events import FAILED, RESTARTED, read

from ...training.conftest import losses
from .conftest import ROOT, small

EXAMPLE = ROOT / "examples" / "kubeflow.yaml"
SECONDS = 240


@pytest.fixture
def models() -> None:
    pytest.importorskip(
        "kubeflow_trainer_api", reason='kubeflow-trainer-api is missing: pip install "counterflow[kubeflow]"'
    )


def test_the_example_is_what_is_made_of_its_config() -> None:
    config = load_config(ROOT / "examples" / "gpt.toml", out="/runs/first")
    assert list(yaml.safe_load_all(EXAMPLE.read_text())) == [
        runtime("registry.example.org/counterflow:0.1.0", "counterflow-runs"),
        train_job(config, "/runs/gpt.toml", nodes=2),
    ]


def test_kubeflows_models_accept_it(models: None) -> None:
    for resource in yaml.safe_load_all(EXAMPLE.read_text()):
        check(resource)
    check(train_job(small(Path("/runs/a")), "/runs/a.toml", gpus=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pods": 2}, r"TrainJob\.spec\.trainer\.pods: Kubeflow knows no such key"),
        ({"numNodes": "two"}, "TrainJob: Kubeflow does not accept it"),
        ({"env": [{"name": "A", "values": "1"}]}, r"trainer\.env\[0\]\.values: Kubeflow knows no such key"),
    ],
)
def test_what_kubeflow_does_not_accept(models: None, change: dict[str, Any], message: str) -> None:
    job = train_job(small(Path("/runs/a")), "/runs/a.toml")
    job["spec"]["trainer"] |= change
    with pytest.raises(ConfigError, match=message):
        check(job)


def test_refusals() -> None:
    with pytest.raises(
        ConfigError, match="3 pods for 2 workers: each pod needs as many; choose a divisor of 2"
    ):
        train_job(small(Path("/runs/a")), "/runs/a.toml", nodes=3)
    with pytest.raises(ConfigError, match=r"train\.out is missing"):
        train_job(small(None), "/runs/a.toml")


def environment(job: dict[str, Any], port: int, node: int) -> dict[str, str]:
    """Environment of a container: the job's variables, and those that Kubeflow's torch policy injects."""
    trainer = job["spec"]["trainer"]
    injected = {
        "PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_NODE_RANK": node, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
    }  # fmt: skip
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | variables | {name: str(value) for name, value in injected.items()} | here


@contextmanager
def pods(job: dict[str, Any], port: int, log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The containers of a job, as processes of this machine."""
    (node,) = runtime("image", "claim")["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *job["spec"]["trainer"]["args"]]
    started = []
    with log.open("ab") as errors:
        try:
            for number in range(job["spec"]["trainer"]["numNodes"]):
                settings = environment(job, port, number)
                started.append(subprocess.Popen(command, env=settings, stderr=errors))
            yield started
        finally:
            for pod in started:
                pod.terminate()
                pod.wait(SECONDS)


def test_a_killed_worker(tmp_path: Path, faulty: Callable[..., None], signals_blocked: list[float]) -> None:
    """torchrun starts the workers of both pods again."""
    faulty((1, 5, signal.SIGKILL))
    config = small(tmp_path / "run")
    (tmp_path / "my.toml").write_text(config.to_toml())
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    log = tmp_path / "log"
    with pods(train_job(config, str(tmp_path / "my.toml"), nodes=2), port, log) as started:
        codes = [pod.wait(SECONDS) for pod in started]
    assert codes == [0, 0], log.read_text()
    assert losses(tmp_path / "run") == signals_blocked
    events = {event["event"]: event for event in read(tmp_path / "run")}
    assert events[FAILED]["lost"]
    assert events[RESTARTED]["source"] == "checkpoint"
