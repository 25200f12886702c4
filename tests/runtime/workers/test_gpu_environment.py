"""What workers find in their environment for CUDA and NCCL, as their launchers leave it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from counterflow.runtime.transport import gpu_environment
from counterflow.runtime.transport.gpu_environment import ERRORS, QUEUES, before_nccl

REPORT = """
import os, pathlib, sys
import counterflow as cf
from counterflow.runtime.workers.world import current_transport
names = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_DEVICE_MAX_CONNECTIONS"

def report():
    found = [os.environ.get(name) for name in names]
    # All that NCCL's does when it is made; nobody leaves before the others are there.
    current_transport("nccl-on-gloo").gather([])
    return " ".join(map(str, [*found, *(os.environ.get(name) for name in names)]))

if __name__ == "__main__":
    found = pathlib.Path(sys.argv[1])
    if "RANK" in os.environ:
        (found / os.environ["RANK"]).write_text(report())
    else:
        workers = int(sys.argv[2])
        for rank, told in enumerate(cf.launch(report, workers=workers, transport="nccl-on-gloo")):
            (found / str(rank)).write_text(told)
"""


def reported(folder: Path, *launcher: str, workers: int = 2, **chosen: str) -> list[str]:
    """What workers had before and after their transport was made, each in a file: others print too."""
    script, found = folder / "report.py", folder / "found"
    script.write_text(REPORT)
    found.mkdir()
    others = {name: value for name, value in os.environ.items() if name not in (ERRORS, QUEUES)}
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(found), str(workers)],
        env={**others, **chosen},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [path.read_text() for path in sorted(found.iterdir())]
    shutil.rmtree(found)
    return reports


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def test_workers_of_a_launch(tmp_path: Path) -> None:
    assert reported(tmp_path) == ["2 32 2 32"] * 2
    own = {ERRORS: "1", QUEUES: "16"}  # a user's choice
    assert reported(tmp_path, workers=1, **own) == ["1 16 1 16"]


def test_workers_of_torchrun(tmp_path: Path) -> None:
    """torch's agent puts 1 there if nobody chose; who wants 0 or 3 has it."""
    assert reported(tmp_path, *TORCHRUN, "1") == ["1 None 2 32"]
    assert reported(tmp_path, *TORCHRUN, "1", workers=1, **{ERRORS: "3"}) == ["3 None 3 32"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    slow = "CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"
    for name in (ERRORS, "TORCHELASTIC_RUN_ID", "LOCAL_RANK", *slow):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(QUEUES, "32")
    return monkeypatch


def test_what_torchrun_set_is_told(environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, gpu_environment.__name__)
    environment.setenv("TORCHELASTIC_RUN_ID", "a run")
    environment.setenv(ERRORS, "1")
    before_nccl()
    assert os.environ[ERRORS] == "2"
    assert caplog.messages == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1, as torchrun sets it, would end this process before it reports "
        "an error: it is 2 now"
    ]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING is set: each op and message holds its worker"),
        ("CUDA_LAUNCH_BLOCKING", "0", ""),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "TORCH_NCCL_BLOCKING_WAIT is set: hosts wait for messages"),
        (QUEUES, "1", "CUDA_DEVICE_MAX_CONNECTIONS is 1: ops may wait behind messages"),
        (QUEUES, "8", ""),
    ],
)
def test_what_makes_training_slow_is_told_once_a_machine(
    name: str, value: str, told: str, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv(name, value)
    before_nccl()
    assert [message[: len(told)] for message in caplog.messages] == ([told] if told else [])
    caplog.clear()
    environment.setenv("LOCAL_RANK", "1")
    before_nccl()
    assert caplog.messages == []


def test_queues_that_cuda_began_without_are_told(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.delenv(QUEUES)
    environment.setattr("torch.cuda.is_initialized", lambda: True)
    gpu_environment.before_cuda()
    before_nccl()
    assert QUEUES not in os.environ
    assert "CUDA_DEVICE_MAX_CONNECTIONS is not set, and CUDA began before it could be" in caplog.messages[0]
