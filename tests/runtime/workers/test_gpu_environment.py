"""What workers find in their environment for CUDA and NCCL, as their launchers leave it."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import counterflow as cf
from counterflow.runtime.transport import gpu_environment
from counterflow.runtime.transport.gpu_environment import ERRORS, QUEUES, before_nccl
from counterflow.runtime.workers.world import current_transport


def report() -> str:
    """What a worker has before and after its transport was made, with all that NCCL's does then."""
    found = [os.environ.get(name) for name in (ERRORS, QUEUES)]
    current_transport("nccl-on-gloo").gather([])  # nobody leaves before the others are there
    return " ".join(map(str, [*found, *(os.environ.get(name) for name in (ERRORS, QUEUES))]))


SCRIPT = f"""
import os, pathlib, sys
from counterflow.runtime.transport.gpu_environment import ERRORS, QUEUES
from counterflow.runtime.workers.world import current_transport

{inspect.getsource(report)}
pathlib.Path(sys.argv[1]).write_text(report())
"""


def test_workers_of_a_launch(environment: pytest.MonkeyPatch) -> None:
    environment.delenv(QUEUES)
    assert cf.launch(report, workers=2, transport="nccl-on-gloo") == ["2 32 2 32"] * 2
    environment.setenv(ERRORS, "1")  # a user's choice
    environment.setenv(QUEUES, "16")
    assert cf.launch(report, workers=1, transport="nccl-on-gloo") == ["1 16 1 16"]


def test_workers_of_torchrun(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's agent puts 1 there if nobody chose; who wants 0 or 3 has it."""
    environment.delenv(QUEUES)
    script, found = tmp_path / "report.py", tmp_path / "found"
    script.write_text(SCRIPT)
    words = "--standalone", "--nproc-per-node", "1", str(script), str(found)
    command = [sys.executable, "-m", "torch.distributed.run", *words]

    def reported() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return found.read_text()

    assert reported() == "1 None 2 32"
    environment.setenv(ERRORS, "3")
    assert reported() == "3 None 3 32"


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
